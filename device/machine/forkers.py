"""Starts and ends the processes that fork on command: the zygote of the devices, and the nursery of the trainers."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from fedemu.protocol.code.source import interpreter
from fedemu.protocol.errors import FedemuError
from fedemu.protocol.wording import refusal

END_SECONDS: Final = 5.0
"""A process that has not ended after so many seconds is killed."""


async def begun(*command: str, environment: Mapping[str, str]) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """A Python interpreter with the arguments ``command``, and the supervisor's end of the line to it.

    Two more arguments follow: the descriptor of its own end, and the id of this process. ``environment`` are variables
    beside those of this process. Raises FedemuError if no process can be started.
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
    return process, ours


async def ended(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a process whose line was closed, which kills its children and ends."""
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def killed(process: asyncio.subprocess.Process) -> None:
    """Kill a process, and wait for its end. One that still imports does not hear that its line was closed."""
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()
