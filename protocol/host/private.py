"""Short-lived folders, which only this user can enter: for sockets, and for what a process need not keep.

That for sockets is not in the run directory: the path of a socket has at most 107 bytes, and not every file system has
sockets.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final

from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import refusal_of, usable
from fedemu.protocol.host.paths import LONGEST_OF_SOCKET, exists

PREFIX: Final = "fedemu-private-"
"""The beginning of the names of these folders."""
_LONGEST_NAME: Final = 16
"""The most bytes of the name of a socket in such a folder."""
_REMEDY: Final = "set TMPDIR to a folder for temporary files"


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder of mode 0700 with a short path, in which sockets can be made. It is removed at the end.

    It is in ``XDG_RUNTIME_DIR`` or in the folder for temporary files. A process that is killed leaves its folder; the
    next call of this function removes it, which a lock on the folder tells from those in use. Raises
    ConfigurationError if there is no place for such a folder.
    """
    folder, lock = _make()
    try:
        yield folder
    finally:
        _remove(folder, lock)


@contextmanager
def working_folder(prefix: str, place: Path | None = None) -> Iterator[Path]:
    """A new folder of mode 0700 in ``place``, whose name begins with ``prefix``. It is removed at the end.

    None stands for the folder of temporary files. A process that is killed leaves its folder; the next call of this
    function with the same prefix and place removes it. Raises OSError if the place takes no such folder, and for that
    of temporary files the errors of ``temporary_folder``.
    """
    chosen = place or temporary_folder()
    with nullcontext() if place else usable(chosen, _REMEDY):
        folder, lock = _locked(chosen, prefix)
    try:
        yield folder
    finally:
        _remove(folder, lock)


def temporary_folder() -> Path:
    """The folder of temporary files, in which this process can write.

    If there is none, as in a container that may only be read, raises ConfigurationError, or FedemuError for a full
    disk. Most libraries need this folder, too: torch and matplotlib may not even be imported without it.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        place = Path(os.environ.get("TMPDIR") or "/tmp")
        with usable(place, _REMEDY), tempfile.TemporaryFile(dir=place) as file:
            os.write(file.fileno(), b"?")  # one of the two tells why the system refuses
        return place


def own_folder(path: Path) -> Path:
    """The folder at ``path``, which is made if it is not there, and which only this user can enter.

    Raises ConfigurationError if it is somebody else's: among the temporary files anybody may have made it before.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigurationError(f"{path} was made by somebody else; remove it, or set TMPDIR to a folder of your own")
    path.chmod(0o700)
    return path


def leave_private(address: str) -> None:
    """Remove the private folder of an ipc address if it is empty. Its maker may have been killed."""
    folder = Path(address.removeprefix("ipc://")).parent
    if folder.name.startswith(PREFIX):
        with suppress(OSError):
            folder.rmdir()


def _make() -> tuple[Path, int]:
    """A new folder for sockets, and a descriptor that locks it."""
    refused = []
    for place in _places():
        if not str(place).isprintable():  # no address may have such a path
            refused.append(f"{str(place)!r} (its path has control characters, or bytes that are no UTF-8)")
            continue
        try:
            made = _make_in(place)
        except OSError as error:
            refused.append(f"{place} ({refusal_of(error)})")
            continue
        if made is not None:
            return made
        refused.append(f"{place} (its path is too long)")
    raise ConfigurationError(
        f"no folder for the sockets of this run can be in {' or in '.join(refused)}; set XDG_RUNTIME_DIR to a folder "
        "with a short path, whose file system has sockets and locks"
    )


def _make_in(place: Path) -> tuple[Path, int] | None:
    """A new locked folder in ``place``. None if paths in it are too long. Raises OSError if it takes no sockets."""
    folder, lock = _locked(place, PREFIX)
    try:
        if len(os.fsencode(folder)) + 1 + _LONGEST_NAME <= LONGEST_OF_SOCKET:
            _try_socket(folder / "try")
            return folder, lock
    except OSError:
        _remove(folder, lock)
        raise
    _remove(folder, lock)
    return None


def _try_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(os.fspath(path))
    path.unlink()


def _locked(place: Path, prefix: str) -> tuple[Path, int]:
    """A new folder in ``place``, and a descriptor that locks it. Raises OSError, and leaves no folder then.

    Folders there that killed processes have left are removed.
    """
    _remove_leftovers(place, prefix)
    while True:
        folder, lock = Path(tempfile.mkdtemp(prefix=prefix, dir=place)), None
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if exists(folder):
                return folder, lock
        except OSError:
            if exists(folder):
                _remove(folder, lock)
                raise
        # Another process has taken the folder for a leftover, before it was locked.
        _remove(folder, lock)


def _remove(folder: Path, lock: int | None) -> None:
    """Remove a folder, and then its lock, if it has one."""
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def _places() -> list[Path]:
    """Where such folders may be, the best place first."""
    named = os.environ.get("XDG_RUNTIME_DIR")
    return [Path(place).absolute() for place in dict.fromkeys([named, str(temporary_folder()), "/tmp"]) if place]


def _remove_leftovers(place: Path, prefix: str) -> None:
    """Remove this user's folders whose process has ended."""
    with suppress(OSError):
        for folder in place.glob(prefix + "*"):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                _remove_unless_locked(folder)


def _remove_unless_locked(folder: Path) -> None:
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
