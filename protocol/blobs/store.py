"""The folder in which a machine keeps blobs: large values that are named by their SHA-256."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

from fedemu.protocol.blobs.downloads import CHUNK, Download, unwritable
from fedemu.protocol.codec import Buffer
from fedemu.protocol.errors import BlobError
from fedemu.protocol.host.files import PartialFile, refusal_of, remove_abandoned
from fedemu.protocol.host.mapping import mapped
from fedemu.protocol.host.paths import exists
from fedemu.protocol.ids import Digest, digest_of, digest_of_file
from fedemu.protocol.messages import Blob, Need

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")


class BlobStore:
    """A folder of blobs. Each is a read-only file, named by its digest. Several processes may use a folder at a time.

    A blob appears there whole or not at all. A process locks the partial files that it writes. Partial files of crashed
    processes are removed when the folder is opened again. A blob that an earlier process left is read once and held
    against its digest; one that is damaged, or can't be read, is removed, and counts as missing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._verified: set[Digest] = set()
        self._downloads: dict[Digest, Download] = {}
        self._mapped: dict[Digest, memoryview] = {}
        self._lock = threading.Lock()
        """No blob is mapped while some are removed."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            remove_abandoned(directory)
        except OSError as error:
            raise _unusable(directory, error) from error

    def path(self, digest: Digest) -> Path:
        """The place of the blob, which need not exist. Raises BlobError if ``digest`` is not a digest."""
        if not _DIGEST.fullmatch(digest):
            raise BlobError(f"{digest!r:.80} is not a digest: 64 lower-case hexadecimal digits")
        return self.directory / digest

    def has(self, digest: Digest) -> bool:
        """Whether the blob is here, whole."""
        path = self.path(digest)
        if not exists(path):
            return False
        if digest in self._verified:
            return True
        try:
            if digest_of_file(path) == digest:
                self._verified.add(digest)
                return True
            fault = "its checksum is wrong"
        except FileNotFoundError:
            return False
        except OSError as error:
            fault = f"it can't be read ({refusal_of(error)})"
        log.warning("the blob %s is damaged: %s; it is removed", path, fault)
        self._mapped.pop(digest, None)
        with contextlib.suppress(OSError):  # the one that is fetched will replace it, or an error will tell
            path.unlink()
        return False

    def doubt(self, digest: Digest) -> None:
        """Hold the blob against its digest once more when it is next asked for, because somebody found it damaged."""
        self._verified.discard(digest)

    def put(self, data: Buffer) -> Digest:
        """Keep ``data`` as a blob, and return its digest."""
        digest = digest_of(data)
        path = self.path(digest)
        if not self.has(digest):
            try:
                with PartialFile(path) as file:
                    file.write(data, 0)
                    file.put_in_place()
            except OSError as error:
                raise unwritable(path, error) from error
            self._verified.add(digest)
        return digest

    def answer(self, need: Need) -> tuple[Blob, memoryview]:
        """The bytes that a peer asks for, ``CHUNK`` at most, and fewer at the end of the blob.

        They stay in the file and take no memory of this process, however many are held: chunks wait in queues to peers
        that may never read them. They stay valid after the blob was removed. Raises BlobError if the offset is behind
        the end, or if the blob is not here or cannot be read.
        """
        digest, offset = Digest(need.digest), need.offset
        with self._lock:
            descriptor, whole = self._opened(digest)
        try:
            if not 0 <= offset <= len(whole):
                raise BlobError(f"the blob {digest} has {len(whole)} bytes and none from {offset} on")
            # What the disk cannot read is an error here. In the memory of the file it would end the process.
            found = os.pread(descriptor, min(need.length, CHUNK), offset)
        except OSError as error:
            raise BlobError(f"the blob {digest} can't be read: {refusal_of(error)}") from error
        finally:
            os.close(descriptor)
        return Blob(digest=digest, offset=offset, size=len(whole)), whole[offset : offset + len(found)]

    def _opened(self, digest: Digest) -> tuple[int, memoryview]:
        """A descriptor of the blob's file, and the whole blob as memory."""
        try:
            descriptor = os.open(self.path(digest), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _missing(digest, error) from error
        try:
            size = os.fstat(descriptor).st_size
            whole = self._mapped.get(digest)
            if whole is None or len(whole) != size:
                whole = self._mapped[digest] = mapped(descriptor, size) if size else memoryview(b"")
        except OSError as error:
            os.close(descriptor)
            raise _missing(digest, error) from error
        return descriptor, whole

    def receive(self, digest: Digest, offset: int, size: int, data: Buffer) -> bool:
        """Take a chunk of a blob of ``size`` bytes. Returns whether the blob is now here, whole and verified.

        Chunks may come again, and in any order. Raises BlobError if they contradict each other or the digest; then
        nothing of the blob is left, and it can be fetched anew. Raises UnwritableError if the disk does not take it.
        """
        path = self.path(digest)
        if self.has(digest):
            # Another process may have fetched it meanwhile.
            self.abandon(digest)
            return True
        download = self._downloads.get(digest)
        if download is None:
            download = self._downloads[digest] = Download(path, digest, size)
        try:
            complete = download.receive(offset, size, data)
        except BlobError:
            del self._downloads[digest]
            raise
        if complete:
            del self._downloads[digest]
            self._verified.add(digest)
        return complete

    def abandon(self, digest: Digest) -> None:
        """Give up the download of the blob, if there is one."""
        download = self._downloads.pop(digest, None)
        if download is not None:
            download.close()

    def evict(self, stays: Callable[[Digest], bool]) -> None:
        """Remove the blobs for which ``stays`` is False. Arrays that are mapped from a removed blob stay usable.

        Raises BlobError if the folder is not there any more, or refuses.
        """
        try:
            for path in sorted(self.directory.iterdir()):
                digest = Digest(path.name)
                if _DIGEST.fullmatch(path.name) and not stays(digest):
                    self._verified.discard(digest)
                    with self._lock:
                        self._mapped.pop(digest, None)
                        path.unlink(missing_ok=True)
        except OSError as error:
            raise _unusable(self.directory, error) from error

    def close(self) -> None:
        """Give up all downloads. The blobs stay."""
        self._mapped.clear()
        for digest in list(self._downloads):
            self.abandon(digest)


def _unusable(directory: Path, error: OSError) -> BlobError:
    return BlobError(f"the blob folder {directory} cannot be used: {refusal_of(error)}")


def _missing(digest: Digest, error: OSError) -> BlobError:
    return BlobError(f"the blob {digest} is not here: {error.strerror}")
