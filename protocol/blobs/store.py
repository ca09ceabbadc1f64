"""Blobs: large values named by their SHA-256. Trees of arrays as bytes, and the folder where a machine keeps blobs.

A tree is a file in the safetensors format. As in ``tensors``, bfloat16 is held as uint16: declared when written, and
the only thing that uint16 means when read.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from fedemu.protocol.blobs.downloads import CHUNK, Download, abandoned, partial_file, write_at
from fedemu.protocol.codec import ITEM_BYTES, Buffer
from fedemu.protocol.errors import BlobError
from fedemu.protocol.ids import Digest, digest_of
from fedemu.protocol.tensors import buffer_of, view, wire_dtype

__all__ = ["CHUNK", "BlobStore", "Download", "decode_tree", "encode_tree"]

_NAMES: Final[Mapping[str, str]] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_CODES: Final[Mapping[str, str]] = {name: code for code, name in _NAMES.items()}
_PREFIX = 8
_DIGEST = re.compile(r"[0-9a-f]{64}")


def encode_tree(arrays: Mapping[str, NDArray[Any]], dtypes: Mapping[str, str] | None = None) -> bytes:
    """The file's bytes: a function of names, dtypes, shapes and values only. ``dtypes`` as in ``tensors.pack``.

    Larger elements come first, then the order is that of the names, so that every array is aligned.
    """
    kinds = {name: wire_dtype(name, array, dtypes or {}) for name, array in arrays.items()}
    header: dict[str, Any] = {}
    parts: list[Buffer] = [b"", b""]
    position = 0
    for name in sorted(arrays, key=lambda name: (-ITEM_BYTES[kinds[name]], name)):
        part = buffer_of(arrays[name], kinds[name])
        end = position + len(part)
        header[name] = {
            "dtype": _CODES[kinds[name]],
            "shape": list(arrays[name].shape),
            "data_offsets": [position, end],
        }
        parts.append(part)
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _PREFIX)
    parts[:2] = len(text).to_bytes(_PREFIX, "little"), text
    return b"".join(parts)


def decode_tree(data: Buffer | Path) -> dict[str, NDArray[Any]]:
    """Read-only arrays over ``data``, or over the mapped file, which may be unlinked while they are in use.

    Raises BlobError for what is not such a file, or holds a dtype that the wire does not carry.
    """
    if isinstance(data, Path):
        try:
            with data.open("rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise BlobError(f"the tensor file {data} cannot be read: {error}") from error
    try:
        return _views(memoryview(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BlobError(f"this is not a tensor file in the safetensors format: {error!r:.300}") from error


def _views(data: memoryview) -> dict[str, NDArray[Any]]:
    length = int.from_bytes(data[:_PREFIX], "little")
    if length > len(data) - _PREFIX:
        raise ValueError(f"a header of {length} bytes does not fit in {len(data)} bytes")
    header = json.loads(bytes(data[_PREFIX : _PREFIX + length]))
    header.pop("__metadata__", None)
    body = data[_PREFIX + length :]
    position = 0
    arrays = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        dtype, shape = _NAMES[entry["dtype"]], entry["shape"]
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name!r} has the shape {shape}")
        if start != position or end - start != math.prod(shape) * ITEM_BYTES[dtype] or end > len(body):
            raise ValueError(f"{name!r} of shape {shape} does not lie where it should")
        arrays[name] = view(body[start:end], dtype, shape)
        position = end
    if position != len(body):
        raise ValueError(f"{len(body) - position} bytes belong to no tensor")
    return dict(sorted(arrays.items()))


class BlobStore:
    """A folder of blobs, each a read-only file named by its digest. Several processes may use one folder at a time.

    A blob appears there whole or not at all: partial files are locked by who writes them, and what a crashed process
    left behind is removed when the folder is next opened.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._downloads: dict[Digest, Download] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for leftover in abandoned(directory):
                leftover.unlink(missing_ok=True)
        except OSError as error:
            raise BlobError(f"the blob folder {directory} cannot be used: {error.strerror}") from error

    def path(self, digest: Digest) -> Path:
        """Where the blob is, or would be."""
        if not _DIGEST.fullmatch(digest):
            raise BlobError(f"{digest!r:.80} is not a digest: 64 lower-case hexadecimal digits")
        return self.directory / digest

    def has(self, digest: Digest) -> bool:
        return self.path(digest).exists()

    def size(self, digest: Digest) -> int:
        """In bytes."""
        try:
            return self.path(digest).stat().st_size
        except OSError as error:
            raise _missing(digest, error) from error

    def put(self, data: Buffer) -> Digest:
        """Keep ``data`` and name it."""
        digest = digest_of(data)
        path = self.path(digest)
        if not path.exists():
            try:
                with partial_file(path) as file:
                    write_at(file.fileno(), memoryview(data), 0)
                    os.replace(file.name, path)
            except OSError as error:
                raise BlobError(f"the blob {digest} cannot be written: {error.strerror}") from error
        return digest

    def read(self, digest: Digest, offset: int, length: int) -> bytes:
        """At most ``length`` bytes from ``offset``, fewer at the end; BlobError beyond it or without the blob."""
        try:
            descriptor = os.open(self.path(digest), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _missing(digest, error) from error
        try:
            size = os.fstat(descriptor).st_size
            if not 0 <= offset <= size:
                raise BlobError(f"the blob {digest} has {size} bytes and none from {offset} on")
            return os.pread(descriptor, length, offset)
        finally:
            os.close(descriptor)

    def receive(self, digest: Digest, offset: int, size: int, data: Buffer) -> bool:
        """A chunk of a blob of ``size`` bytes; True once the blob is here, whole and verified.

        Chunks may come again and in any order. BlobError where they contradict each other or the digest; nothing of
        that blob is then left, and it can be fetched anew.
        """
        path = self.path(digest)
        if path.exists():
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
        return complete

    def missing(self, digest: Digest, size: int, length: int = CHUNK) -> tuple[int, int] | None:
        """The first (offset, length) that has not been received of a blob of ``size`` bytes, None if it is here."""
        if self.has(digest):
            return None
        download = self._downloads.get(digest)
        return (0, min(length, size)) if download is None else download.missing(length)

    def abandon(self, digest: Digest) -> None:
        """Give up a download, if there is one."""
        download = self._downloads.pop(digest, None)
        if download is not None:
            download.close()

    def evict(self, keep: Container[Digest] | Callable[[Digest], bool]) -> list[Digest]:
        """Remove the blobs that ``keep`` does not name, and return them. Arrays that map them stay usable."""
        kept = keep if callable(keep) else keep.__contains__
        evicted = []
        for path in sorted(self.directory.iterdir()):
            digest = Digest(path.name)
            if _DIGEST.fullmatch(path.name) and not kept(digest):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    evicted.append(digest)
        return evicted

    def close(self) -> None:
        """Give up all downloads; the blobs stay."""
        for digest in list(self._downloads):
            self.abandon(digest)


def _missing(digest: Digest, error: OSError) -> BlobError:
    return BlobError(f"the blob {digest} is not here: {error.strerror}")
