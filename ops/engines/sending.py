"""Decoded data that an engine sends to nodes that have none: cut into blobs, put together, and checked by digests."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedemu.ops.data.cache import locked, read
from fedemu.protocol.errors import DataError
from fedemu.protocol.host.private import own_folder, temporary_folder

BLOB_BYTES: Final = 32 * 2**20
"""The most bytes of a blob. So neither side holds more of the data than this in memory."""


@dataclass(frozen=True, kw_only=True)
class SentFile:
    """A file of the data: its name, its SHA-256, and the engine's names of its blobs, in order."""

    name: str
    sha256: str
    blobs: tuple[Any, ...]


def offer(entry: Path, put: Callable[[bytes], Any]) -> tuple[SentFile, ...]:
    """Give all files of a folder with decoded data to an engine. ``put`` takes a blob and returns its name."""
    files = []
    for path in sorted(entry.iterdir()):
        digest, blobs = hashlib.sha256(), []
        with path.open("rb") as file:
            while content := file.read(BLOB_BYTES):
                digest.update(content)
                blobs.append(put(content))
        files.append(SentFile(name=path.name, sha256=digest.hexdigest(), blobs=tuple(blobs)))
    return tuple(files)


def receive(files: Sequence[SentFile], get: Callable[[Any], bytes], folder: Path) -> None:
    """Make ``folder`` of what was offered, unless it is there. It appears as a whole. ``get`` returns a blob.

    Raises DataError if a file is not what was offered, or if the folder cannot be written.
    """
    try:
        with locked(folder), tempfile.TemporaryDirectory(prefix=f"{folder.name}.partial-", dir=folder.parent) as place:
            if read(folder) is not None:
                return
            made = Path(place) / "entry"
            made.mkdir()
            for file in files:
                digest = hashlib.sha256()
                with (made / Path(file.name).name).open("wb") as target:
                    for name in file.blobs:
                        content = get(name)
                        digest.update(content)
                        target.write(content)
                if digest.hexdigest() != file.sha256:
                    raise DataError(f"{file.name} of the data came with another content than was sent; run it again")
            shutil.rmtree(folder, ignore_errors=True)  # a cleaner of /tmp may have left a part of it
            made.rename(folder)
    except OSError as error:
        raise DataError(f"the data that were sent can't be stored in {folder.parent}: {error.strerror}") from error


def folder_of(digest: str) -> Path:
    """Where this node keeps the data with this digest, if they were sent. Only this user can enter it."""
    return node_folder() / f"data-{digest[:16]}"


def node_folder() -> Path:
    """The folder of this user on this node. Only this user can enter it. Raises ConfigurationError if it cannot be."""
    return own_folder(temporary_folder() / f"fedemu-{os.getuid()}")
