"""What a file of Weights & Biases holds. wandb writes what it is told block by block, so a killed one lacks the last.

The file is a log of LevelDB: https://github.com/google/leveldb/blob/main/doc/log_format.md. The file has a header, and
its checksums are CRC-32.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

_BLOCK: Final = 2**15
_FILE_HEADER: Final = 7
_CHUNK: Final = struct.Struct("<IHB")
"""Before each chunk: its checksum, the number of its bytes, and its kind."""
_WHOLE, _FIRST, _LAST = 1, 2, 4


def read(file: Path) -> tuple[int, bool]:
    """The last round that a file holds, 0 if there is none, and whether the run was closed in it."""
    protocol: Any = import_module("wandb.proto.wandb_internal_pb2")  # an extra, which need not be installed
    last, closed = 0, False
    for content in records(file.read_bytes()):
        record = protocol.Record.FromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            last = max(last, record.history.step.num)
        closed = closed or kind == "exit"
    return last, closed


def records(log: bytes) -> Iterator[bytes]:
    """The whole records of a log. What follows a damaged one, or one that was cut off, is left out."""
    place, record = _FILE_HEADER, b""
    while True:
        left = _BLOCK - place % _BLOCK
        if left < _CHUNK.size:  # the end of a block in which no chunk can begin
            place += left
        if place + _CHUNK.size > len(log):
            return
        checksum, size, kind = _CHUNK.unpack_from(log, place)
        chunk = log[place + _CHUNK.size : place + _CHUNK.size + size]
        if len(chunk) < size or zlib.crc32(chunk, zlib.crc32(bytes([kind]))) != checksum:
            return
        place += _CHUNK.size + size
        record = chunk if kind in (_WHOLE, _FIRST) else record + chunk
        if kind in (_WHOLE, _LAST):
            yield record
