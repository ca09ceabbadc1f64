"""The processes that fork on command, as their supervisor sees them: the zygote of devices, the nursery of trainers."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from fedemu.device.pipe import Unpacker, pack_message
from fedemu.protocol.code.source import interpreter
from fedemu.protocol.codec import Decoder
from fedemu.protocol.errors import FedemuError
from fedemu.protocol.messages import Message
from fedemu.protocol.wording import refusal

END_SECONDS: Final = 5.0
"""A process that has not ended after so many seconds is killed."""


class ForkingProcess:
    """A process that forks on command, from its start to its end. It imports what it needs beside anything else."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        decoder: Decoder,
        process: asyncio.subprocess.Process,
        ours: socket.socket,
    ) -> None:
        self._command = command
        self._environment = environment
        self._decoder = decoder
        self._process = process
        self._ours = ours
        self._writer: asyncio.StreamWriter | None = None
        self._has_spoken = False
        """Whether it has said something, so that it does not import any more, and hears."""

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], decoder: Decoder) -> ForkingProcess:
        """Start a Python interpreter with the arguments ``command``, whose messages ``decoder`` reads.

        Two more arguments follow: the descriptor of its end of the line, and the id of this process. ``environment``
        are variables beside those of this process. Raises FedemuError if no process can be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *interpreter(),
                    *command,
                    str(theirs.fileno()),
                    str(os.getpid()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    env=os.environ | environment,
                    process_group=0,
                )
            except OSError as error:
                ours.close()
                raise FedemuError(f"no process can be started on this machine: {refusal(error)}") from error
        return cls(command, environment, decoder, process, ours)

    async def again(self) -> ForkingProcess:
        """Start another one like it. Raises FedemuError if no process can be started."""
        return await ForkingProcess.start(self._command, self._environment, self._decoder)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def follow(self, heard: Callable[[Message], None], connected: Callable[[], None]) -> int:
        """Call ``connected``, and ``heard`` with each message, until it ends. Returns its exit code.

        Raises ProtocolError for a message that cannot be read.
        """
        reader, self._writer = await asyncio.open_connection(sock=self._ours)
        connected()
        unpacker = Unpacker(self._decoder)
        with suppress(ConnectionError):
            while data := await reader.read(2**16):
                self._has_spoken = True
                for message in unpacker.feed(data):
                    heard(message)
        code = await self._process.wait()
        self._writer.close()
        return code

    def tell(self, message: Message) -> None:
        """Send it a message, if it is followed."""
        if self._writer is not None:
            self._writer.write(pack_message(message))

    async def stop(self) -> None:
        """End it and its children, which leave nothing behind. A second call does nothing."""
        (self._ours if self._writer is None else self._writer).close()  # it then kills its children and ends
        await (ended if self._has_spoken else killed)(self._process)


async def ended(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a process whose line was closed, which kills its children and ends."""
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        await killed(process)


async def killed(process: asyncio.subprocess.Process) -> None:
    """Kill a process, if it has not just ended, and wait for its end.

    One that still imports does not hear that its line was closed.
    """
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
