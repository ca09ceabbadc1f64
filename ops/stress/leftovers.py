"""What a run may not leave behind: processes, temporary files and sockets, shared memory, a port, open descriptors."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from fedemu.protocol.host.paths import exists

SHARED_MEMORY = Path("/dev/shm")
SLACK_DESCRIPTORS = 20
"""Further descriptors that a coordinator may have later than at first: a download, a server job, a reconnection."""
SAMPLE_SECONDS = 0.2
_FEWEST_SAMPLES = 4


def shared_memory() -> set[str]:
    """The names of this user's pieces of shared memory."""
    found = set()
    with suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            with suppress(OSError):
                if not entry.is_dir() and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    found.add(entry.name)
    return found


def orphaned_memory(before: set[str]) -> list[str]:
    """Pieces of shared memory that are new since ``before``, and that no living process uses.

    They are known by their inodes: a semaphore is mapped by the name that it had before it got its own.
    """
    new: dict[int, str] = {}
    for name in sorted(shared_memory() - before):
        with suppress(OSError):
            new[(SHARED_MEMORY / name).stat().st_ino] = name
    if not new:
        return []
    used = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                # address, permissions, offset, device, inode, and a name that need not be text
                maps = [line.split(None, 5) for line in (process / "maps").read_bytes().splitlines()]
                used |= {int(words[4]) for words in maps if len(words) == 6 and _is_shared(words[5])}
                for descriptor in (process / "fd").iterdir():
                    with suppress(OSError):
                        if _is_shared(os.fsencode(os.readlink(descriptor))):
                            used.add(descriptor.stat().st_ino)
    orphaned = [SHARED_MEMORY / name for inode, name in new.items() if inode not in used]
    return [str(path) for path in orphaned if exists(path)]


def _is_shared(path: bytes) -> bool:
    return path.startswith(os.fsencode(f"{SHARED_MEMORY}/"))


def of_sessions(sessions: Iterable[int], seconds: float) -> list[str]:
    """The processes of these sessions that still live after ``seconds``, each with its id and name."""
    wanted = set(sessions)
    end = time.monotonic() + seconds
    while (alive := list(living(wanted))) and time.monotonic() < end:
        time.sleep(0.02)
    named = []
    for process in alive:
        with suppress(psutil.Error):
            named.append(f"{process.pid} {process.name()}")
    return named


def living(sessions: Collection[int]) -> Iterator[psutil.Process]:
    """The living processes of these sessions. A process is in the session of its parent also when that has ended.

    One that has ended and that its parent has not asked about is left out.
    """
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):
            if os.getsid(pid) in sessions:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process


@dataclass
class Descriptors:
    """Numbers of open descriptors of one process: one before the first accident, and those after the last one."""

    count: Callable[[], int]
    clock: Callable[[], float] = time.monotonic
    first: int | None = None
    last: list[int] = field(default_factory=list)
    _due: float = -math.inf

    def begin(self) -> None:
        """An accident is about to happen."""
        if self.first is None:
            self.last.clear()
            self._due = -math.inf
            self.sample()
            self.first = next(iter(self.last), None)

    def sample(self) -> None:
        """Take a sample if the process lives, and if the last sample is ``SAMPLE_SECONDS`` old."""
        now = self.clock()
        if now >= self._due:
            self._due = now + SAMPLE_SECONDS
            with suppress(psutil.Error, OSError):
                self.last.append(self.count())

    def struck(self) -> None:
        """An accident has happened. What was sampled before does not count as the end."""
        self.last.clear()

    def grown(self) -> list[str]:
        """A complaint if every later sample is far above the first one."""
        if self.first is None or len(self.last) < _FEWEST_SAMPLES or min(self.last) <= self.first + SLACK_DESCRIPTORS:
            return []
        return [f"the coordinator's open descriptors grew from {self.first} to {min(self.last)}"]
