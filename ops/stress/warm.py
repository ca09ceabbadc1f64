"""Starts commands of fedemu from a process that has imported everything already, in milliseconds instead of seconds."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from fedemu.device.compute.environment import COMPUTE_ENVIRONMENT
from fedemu.device.machine.processes import ZYGOTE_ENVIRONMENT
from fedemu.ops.stress.warm_process import MESSAGE_BYTES, TASKS
from fedemu.protocol.code.source import interpreter
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import exists


class Started(psutil.Process):  # type: ignore[misc]
    """A command that a ``WarmStart`` has started. It has ``poll`` and ``wait`` like ``psutil.Popen``."""

    def __init__(self, pid: int, warm: WarmStart) -> None:
        super().__init__(pid)
        self.returncode: int | None = None
        self._warm = warm

    def poll(self) -> int | None:
        """The exit code; None while the process lives."""
        self._warm.listen(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises psutil.TimeoutExpired after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = 60.0 if end is None else end - time.monotonic()
            if left <= 0:
                raise psutil.TimeoutExpired(timeout, self.pid)
            self._warm.listen(left)
        assert self.returncode is not None
        return self.returncode


class WarmStart:
    """A process that forks commands (``warm_process.py``). It starts with the first command, and ends with ``close``.

    Use it in one thread. On a system without /proc the first command raises ConfigurationError.
    """

    def __init__(self) -> None:
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started: dict[int, Started] = {}
        self._said: list[int] = []

    def __enter__(self) -> WarmStart:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def start(
        self, words: Sequence[str], log: Path, environment: Mapping[str, str], network: int | None = None
    ) -> Started:
        """Start ``fedemu WORDS`` in this folder and a session of its own, with its output in the file ``log``.

        It is in the network namespace of the process ``network``, if there is one.
        """
        line = self._open()
        request = {"words": list(words), "environment": dict(environment), "folder": os.getcwd(), "network": network}
        with log.open("wb") as file:
            socket.send_fds(line, [json.dumps(request).encode()], [file.fileno()])
        while not self._said:
            self.listen(60.0)
        started = Started(self._said.pop(), self)
        self._started[started.pid] = started
        line.send(json.dumps({"seen": started.pid}).encode())
        return started

    def listen(self, seconds: float) -> None:
        """Take in which processes have started and ended. Waits for the first news, at most ``seconds``."""
        if self._line is None:
            return
        while select.select([self._line], [], [], seconds)[0]:
            content = self._line.recv(MESSAGE_BYTES)
            if not content:
                raise RuntimeError("the process that starts commands has ended")
            self._hear(json.loads(content))
            seconds = 0.0

    def close(self) -> None:
        """End the process, and with it all commands that are left."""
        if self._line is not None and self._process is not None:
            self._line.close()
            self._process.wait()
            self._line = self._process = None

    def _hear(self, news: dict[str, Any]) -> None:
        if "started" in news:
            self._said.append(news["started"])
        else:
            self._started.pop(news["ended"]).returncode = news["code"]

    def _open(self) -> socket.socket:
        if self._line is None:
            if not exists(TASKS):
                raise ConfigurationError(
                    "this system has no /proc, which tells what processes do; mount it, as by mount -t proc proc /proc"
                )
            self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [
                        *interpreter(),
                        "-m",
                        "fedemu.ops.stress.warm_process",
                        str(theirs.fileno()),
                        str(os.getpid()),
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | COMPUTE_ENVIRONMENT | ZYGOTE_ENVIRONMENT,
                    start_new_session=True,
                )
        return self._line
