"""Writes files so that a reader finds the whole new file or the whole old one, even if the writer is killed.

Every write goes to a partial file in the same folder, which is then renamed. A file that was renamed survives the death
of its process. It survives a power failure only if the writer waited for the disk (``durable``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, BinaryIO

from fedemu.protocol.errors import ConfigurationError, FedemuError, lacks_memory
from fedemu.protocol.host.paths import exists
from fedemu.protocol.wording import refusal

Buffer = bytes | bytearray | memoryview

PARTIAL = ".partial"
"""The end of the names of partial files."""
_LETTERS = 8
"""The number of letters, hexadecimal digits, by which the partial files of several writers differ."""
_NO_THREAD = "can't start new thread"
"""What Python says when the system starts no thread."""
GO_ON = "make it writable, or go on in a copy of it"
"""The remedy if the folder of a run that has begun cannot be written."""


def write_whole(path: Path, content: bytes | str, *, durable: bool = False, private: bool = False) -> None:
    """Replace the file at ``path``. Text is written as UTF-8. Raises FedemuError if the system refuses.

    With ``durable`` the file is on the disk when this returns. Otherwise nothing waits for the disk. With ``private``
    only this user can read the file, at every moment, where the file system keeps modes. The partial file
    is ``path.partial``, so the next writer overwrites what a killed one left. So only one may write at a time. What
    commands write for people is for ``write_for_people``.
    """
    partial = path.with_name(path.name + PARTIAL)
    with named_failure(path):
        try:
            if private:
                partial.unlink(missing_ok=True)  # what a killed writer left keeps its mode
                partial.touch(mode=0o600)
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
            if durable:
                wait_for_disk(partial)
            os.replace(partial, path)
        except OSError:
            with contextlib.suppress(OSError):  # on a full disk others need the room that it takes
                partial.unlink()
            raise
        if durable:
            wait_for_disk(path.parent)


def write_among_others(path: Path, content: bytes) -> None:
    """Replace the file at ``path``, which others may do at the same time. Raises FedemuError if the system refuses.

    Each has a partial file of its own. ``remove_abandoned`` removes those that killed writers left.
    """
    with named_failure(path), PartialFile(path) as partial:
        partial.write(content, 0)
        partial.put_in_place()


def write_for_people(path: Path, content: bytes | str) -> None:
    """Replace a file that a command makes for people, such as a report. Text is written as UTF-8.

    Another command may do so at the same time: the file is that of the last one, whole. What killed writers of this
    file left is removed. Raises FedemuError if the system refuses.
    """
    with named_failure(path), PartialFile(path, writable=True) as partial:
        _remove_unlocked(path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * _LETTERS}{PARTIAL}"))
        partial.write(content.encode() if isinstance(content, str) else content, 0)
        partial.put_in_place()


def whole_name(name: str) -> str:
    """The name of the file that a partial file becomes. The name of another file stays."""
    return re.sub(rf"(\.[0-9a-f]{{{_LETTERS}}})?{re.escape(PARTIAL)}$", "", name)


def wait_for_disk(path: Path) -> None:
    """Return when the content of a file, or the names in a folder, are on the disk. Raises OSError.

    Some file systems, such as those that a machine shares with its guests, do not know this question about folders.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def make_durable(folder: Path) -> None:
    """Make a folder, and those around it that are missing. Their names are on the disk when this returns.

    Raises OSError.
    """
    missing = [each for each in (folder, *folder.parents) if not exists(each)]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        wait_for_disk(each.parent)


class PartialFile:
    """A file that is written piece by piece, in any order, and becomes ``path`` by ``put_in_place``.

    It is locked while it is open; the lock ends with the process. Unless it is ``writable``, it is read-only for
    everybody. Methods raise OSError.
    As a context manager it removes the file at the end of the block, unless the file was put in place.
    """

    def __init__(self, path: Path, writable: bool = False) -> None:
        self.path = path
        self._file = _open_locked(path, writable)

    def write(self, data: Buffer, offset: int) -> None:
        """Write all bytes of ``data`` from ``offset`` on."""
        write_at(self._file.fileno(), data, offset)

    def read(self, offset: int, length: int) -> bytes:
        """Read at most ``length`` bytes from ``offset`` on; there are fewer at the end of what was written."""
        return os.pread(self._file.fileno(), length, offset)

    def put_in_place(self) -> None:
        """Rename the partial file to ``path``, and close it."""
        os.replace(self._file.name, self.path)
        self._file.close()

    def discard(self) -> None:
        """Remove and close the partial file. There is no effect after ``put_in_place`` or another ``discard``."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                os.unlink(self._file.name)
            self._file.close()

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def write_at(descriptor: int, data: Buffer, offset: int) -> None:
    """Write all bytes of ``data`` from ``offset`` on; the kernel takes at most 2 GiB at a time. Raises OSError."""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left = left[written:]
        offset += written


def append_line(file: BinaryIO, line: bytes) -> None:
    """Append a line to a log, a file that is open without a buffer. Raises OSError, and appends nothing then.

    A full disk may take a part of the line, to which a later one would be joined.
    """
    before = os.fstat(file.fileno()).st_size
    if file.write(line) != len(line):
        os.ftruncate(file.fileno(), before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def remove_abandoned(folder: Path) -> None:
    """Remove the partial files of ``folder`` that no living process has open as a ``PartialFile``."""
    _remove_unlocked(folder.glob(f"*{PARTIAL}"))


def _remove_unlocked(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


@contextlib.contextmanager
def named_failure(path: Path) -> Iterator[None]:
    """An OSError in the block becomes a FedemuError, one sentence that names ``path``."""
    try:
        yield
    except OSError as error:
        raise FedemuError(f"{path} cannot be written: {refusal_of(error)}") from error


@contextlib.contextmanager
def usable(path: Path, remedy: str) -> Iterator[None]:
    """What the block writes is at a path that the user has named. A refusal becomes one sentence with the ``remedy``.

    It is a FedemuError if the disk is full or fails. Otherwise it is a ConfigurationError: the path is at fault, or
    this machine has no memory or no open files left, for which another path is no remedy.
    """
    try:
        with named_failure(path):
            yield
    except FedemuError as error:
        cause = error.__cause__
        if isinstance(error, ConfigurationError) or not isinstance(cause, OSError):
            raise
        told = str(error) if shortage(cause) else f"{error}{', or' if is_full(cause) else ';'} {remedy}"
        raise (FedemuError(told) if is_of_disk(cause) else ConfigurationError(told)) from cause


def refusal_of(error: OSError) -> str:
    """Why the system refused, in words. What can be done about a full disk or another shortage is told, too."""
    return "the disk is full; make room there" if is_full(error) else shortage(error) or error.strerror or str(error)


def shortage(error: BaseException) -> str:
    """What this machine lacks if that is the error, and what to do. Empty for other errors.

    It is memory, open files or threads.
    """
    number = error.errno if isinstance(error, OSError) else None
    if lacks_memory(error):
        number = errno.ENOMEM
    elif isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        number = errno.EAGAIN
    elif number not in (errno.EMFILE, errno.ENFILE):
        return ""
    return refusal(OSError(number, ""))


def is_full(error: OSError) -> bool:
    """Whether a write failed because the disk, or the user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_of_disk(error: OSError) -> bool:
    """Whether a write failed because the disk is full, fails, or takes no file of this size."""
    return is_full(error) or error.errno in (errno.EFBIG, errno.EIO)


def refusal_by_disk(error: BaseException) -> str:
    """Why a disk refused, if that is this error or has led to it. Empty if it has other reasons."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and is_of_disk(seen):
            return refusal_of(seen)
        seen = seen.__cause__ or seen.__context__
    return ""


def require_held(path: Path, error: OSError) -> None:
    """A lock at ``path`` could not be taken at once. Raise ConfigurationError unless another process has it.

    A file system may have no locks, as those of some clusters.
    """
    if error.errno not in (errno.EACCES, errno.EAGAIN):
        raise ConfigurationError(
            f"{path} is in a file system that gives no locks ({error.strerror}), so that two processes could write "
            "there at the same time; choose a folder in another one."
        ) from None


def _open_locked(path: Path, writable: bool) -> IO[bytes]:
    """A new locked file beside ``path``. The lock shows that the file is in use, and not a leftover."""
    while True:
        name = f"{path}.{secrets.token_hex(_LETTERS // 2)}{PARTIAL}"
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if writable else 0o600)
        # A file system may have no locks. Then nobody takes the file for a leftover, because nobody gets its lock.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not writable:
            with contextlib.suppress(PermissionError):  # some file systems have no modes
                os.fchmod(descriptor, 0o444)
        # Another process may have opened the folder just before the lock and removed the file as a leftover.
        if os.fstat(descriptor).st_nlink:
            return open(name, "r+b", buffering=0, opener=lambda _path, _flags, held=descriptor: held)  # type: ignore[misc]
        os.close(descriptor)
