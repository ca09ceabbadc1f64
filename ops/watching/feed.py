"""What a process of a run does now, written into a small file for the live page, while somebody looks at the page.

The page marks a folder as watched. Only then a process writes there, a few times a second, and it spends at most a
fiftieth of its time on it. Nobody waits for a reader.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from fedemu.coordinator.record.json_lines import object_in
from fedemu.protocol.host.paths import is_file

MARK: Final = "watched"
"""The file whose age says whether somebody watches."""
WATCHED_SECONDS: Final = 5.0
"""A folder is watched if its mark is not older than this."""
LIVE: Final = "live"
"""The folder, within a run directory and within the folder of the devices' state, that is watched."""
MACHINE: Final = "machine-"
"""The beginning of the name of a supervisor's file. Its process id follows."""
FLEET: Final = "fleet"
"""The file of the coordinator: one line of JSON, and then a byte for each device."""
EVERY_SECONDS: Final = 0.25
LOOK_SECONDS: Final = 1.0
"""How often a process looks whether it is watched."""
LEAST_PAUSES: Final = 50
"""The pause after a file was written is at least so many times as long as the writing took."""


class States(IntEnum):
    """What a device does now."""

    ABSENT = 0
    """It has never come."""
    ONLINE = 1
    ASKED = 2
    """It has work, and may not begin yet, or cannot begin."""
    TRAINING = 3
    UPLOADING = 4
    """Its reply is computed, and the ask goes on."""
    AWAY = 5
    """It is off-line, as the experiment plans it."""
    CRASHED = 6
    """Its process has ended, or it has lost its connection."""
    FROZEN = 7
    """Its process is stopped."""


class Feed:
    """Writes what ``tell`` says into the file ``name`` of ``folder`` while the folder is watched.

    ``tell`` runs on the event loop, and returns an object for JSON and the bytes that follow it.
    """

    def __init__(self, folder: Path, name: str, tell: Callable[[], tuple[Mapping[str, Any], bytes]]) -> None:
        self._folder = folder
        self._path = folder / name
        self._tell = tell
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look whether the folder is watched. Must be called on the event loop."""
        self._timer = asyncio.get_running_loop().call_later(0.0, self._turn)

    def stop(self) -> None:
        """Write no more, and remove the file."""
        if self._timer is not None:
            self._timer.cancel()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _turn(self) -> None:
        pause = LOOK_SECONDS
        if is_watched(self._folder):
            began = time.perf_counter()
            # A disk that is full or gone must not harm the run.
            with suppress(OSError):
                self._write()
            pause = max(EVERY_SECONDS, LEAST_PAUSES * (time.perf_counter() - began))
        self._timer = asyncio.get_running_loop().call_later(pause, self._turn)

    def _write(self) -> None:
        head, body = self._tell()
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        partial.write_bytes(json.dumps(head, separators=(",", ":")).encode() + b"\n" + body)
        partial.replace(self._path)


def told_by(facts: Callable[[], Mapping[str, Any]]) -> Callable[[], tuple[Mapping[str, Any], bytes]]:
    """What ``Feed`` writes of a process that has facts and no bytes."""
    return lambda: ({**facts(), "pid": os.getpid()}, b"")


def is_watched(folder: Path) -> bool:
    """Whether somebody watches what is written into this folder."""
    try:
        return time.time() - (folder / MARK).stat().st_mtime < WATCHED_SECONDS
    except OSError:
        return False


def watch(folder: Path) -> None:
    """Say that somebody watches. The folder is made if it is missing.

    Raises OSError if the folder can't be written, if it, or the one around it, is another user's, or if the folder or
    the mark is a link. The page may show runs of another user, whose links could lead to any place that this user may
    write. And that user could not remove what the superuser makes among his files.
    """
    around = _own(folder.parent)
    try:
        with suppress(FileExistsError):
            os.mkdir(folder.name, dir_fd=around)
        inside = _own(folder.name, os.O_NOFOLLOW, around)
    finally:
        os.close(around)
    try:
        how = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe is not waited for
        mark = os.open(MARK, how, 0o644, dir_fd=inside)
    finally:
        os.close(inside)
    try:
        os.utime(mark)
    finally:
        os.close(mark)


def _own(folder: Path | str, more: int = 0, place: int | None = None) -> int:
    """A descriptor of a folder of this user. Raises PermissionError if it is another user's."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | more, dir_fd=place)
    if os.fstat(descriptor).st_uid != os.getuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(folder))
    return descriptor


def read_feed(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """What a process wrote last. None if there is nothing that can be read, or no file, such as a pipe."""
    if not is_file(path):
        return None
    try:
        head, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    value = object_in(head)
    return None if value is None else (value, body)
