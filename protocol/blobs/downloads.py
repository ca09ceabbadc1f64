"""The download of one blob: chunks in any order go into a partial file, which is verified and then renamed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from fedemu.protocol.codec import Buffer
from fedemu.protocol.errors import BlobError, UnwritableError
from fedemu.protocol.host.files import PartialFile, refusal_of
from fedemu.protocol.ids import Digest

CHUNK: Final = 2**20
"""The bytes that are requested, and read back, at a time."""
_MOST_RANGES = 1024
"""The most pieces with gaps between them that a download keeps in mind."""


class Download:
    """Receives one blob of known size, with the memory of one chunk. After a BlobError or ``close`` no file is left."""

    def __init__(self, path: Path, digest: Digest, size: int) -> None:
        self.path = path
        self.digest = digest
        self.size = size
        self._sha = hashlib.sha256()
        self._hashed = 0
        """The number of bytes from the start that are written and hashed."""
        self._later: list[tuple[int, int]] = []
        """The disjoint ranges behind them that are written but not hashed, ascending."""
        try:
            self._file = PartialFile(path)
        except OSError as error:
            raise unwritable(path, error) from error

    def receive(self, offset: int, size: int, data: Buffer) -> bool:
        """Take the bytes from ``offset`` on. Returns whether the blob is now complete, verified and in its place.

        Raises BlobError if the bytes do not fit the size or the digest, and UnwritableError if the disk does not take
        them.
        """
        try:
            self._take(offset, size, memoryview(data))
            if self._hashed < self.size:
                return False
            self._place()
        except OSError as error:
            self.close()
            raise unwritable(self.path, error) from error
        except BlobError:
            self.close()
            raise
        return True

    def close(self) -> None:
        """Remove the partial file. May be called twice."""
        self._file.discard()

    def _take(self, offset: int, size: int, data: memoryview) -> None:
        """Write the bytes, and hash them if all bytes before them are here. Raises BlobError if they do not fit."""
        end = offset + len(data)
        if size != self.size or not 0 <= offset <= end <= size:
            raise BlobError(
                f"bytes {offset} to {end} of {size} do not belong to the blob {self.digest} of {self.size} bytes"
            )
        if end <= self._hashed:
            return
        if offset < self._hashed:
            data = data[self._hashed - offset :]
            offset = self._hashed
        self._file.write(data, offset)
        if offset > self._hashed:
            self._later = _joined([*self._later, (offset, end)])
            if len(self._later) > _MOST_RANGES:
                raise BlobError(f"the blob {self.digest} comes in too many pieces with gaps between them")
            return
        self._sha.update(data)
        self._hashed = end
        while self._later and self._later[0][0] <= self._hashed:
            _, end = self._later.pop(0)
            self._hash_written(end)

    def _hash_written(self, end: int) -> None:
        while self._hashed < end:
            part = self._file.read(self._hashed, min(CHUNK, end - self._hashed))
            if not part:
                raise BlobError(f"the partial file of the blob {self.digest} was cut short")
            self._sha.update(part)
            self._hashed += len(part)

    def _place(self) -> None:
        found = self._sha.hexdigest()
        if found != self.digest:
            raise BlobError(f"the blob {self.digest} arrived with the digest {found}; it has to be fetched again")
        self._file.put_in_place()


def unwritable(path: Path, error: OSError) -> UnwritableError:
    """The error if the system refuses to write a blob to its ``path``, whose name is its digest."""
    return UnwritableError(f"the blob {path.name} cannot be written to {path.parent}: {refusal_of(error)}")


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same ranges, ascending. Ranges that touch or overlap become one."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined
