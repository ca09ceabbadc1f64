"""Trees of arrays as bytes: a file in the safetensors format.

As in ``tensors.py``, a bfloat16 array is a uint16 array here. The dtype is declared when a tree is written. When a
tree is read, uint16 always means bfloat16.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from fedemu.protocol.codec import ITEM_BYTES, Buffer
from fedemu.protocol.errors import BlobError
from fedemu.protocol.host.mapping import mapped
from fedemu.protocol.ids import digest_of
from fedemu.protocol.tensors import buffer_of, view, wire_dtype

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
_METADATA, _CHECKSUM = "__metadata__", "sha256"
_PREFIX = 8
"""The bytes at the beginning of a file that hold the header's length. The header is padded to a multiple of this."""


def encode_tree(
    arrays: Mapping[str, NDArray[Any]], dtypes: Mapping[str, str] | None = None, *, checksum: bool = False
) -> bytes:
    """The bytes of the file: a function of names, dtypes, shapes and values only. ``dtypes`` is as in ``tensors.pack``.

    Arrays with larger elements come first, then the names decide, so that every array is aligned. With ``checksum`` the
    header's metadata hold the SHA-256 of the rest. A blob needs none, because it is named by its digest. Raises
    MalformedMessage for a dtype that the wire does not carry.
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
    if checksum:
        header[_METADATA] = {_CHECKSUM: digest_of(_text(header), *parts[2:])}
    text = _text(header)
    text += b" " * (-len(text) % _PREFIX)
    parts[:2] = len(text).to_bytes(_PREFIX, "little"), text
    return b"".join(parts)


def decode_tree(data: Buffer | Path) -> dict[str, NDArray[Any]]:
    """Read-only arrays over ``data``, or over the mapped file, which may be unlinked while they are in use.

    Raises BlobError if this is not such a file, if it holds a dtype that the wire does not carry, or if it has a
    checksum that is wrong.
    """
    place = f"the file {data}" if isinstance(data, Path) else "this"
    if isinstance(data, Path):
        try:
            with data.open("rb") as file:
                if not (size := os.fstat(file.fileno()).st_size):
                    raise ValueError("it is empty")
                data = mapped(file.fileno(), size)
        except (OSError, ValueError) as error:
            raise BlobError(f"{place} cannot be read: {error}") from error
    try:
        return _views(memoryview(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BlobError(
            f"{place} is not a tensor file in the safetensors format, or is damaged: {error!s:.300}"
        ) from error


def _text(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()


def _views(data: memoryview) -> dict[str, NDArray[Any]]:
    """The arrays over the bytes of a file. Raises one of several built-in errors if the file is malformed."""
    length = int.from_bytes(data[:_PREFIX], "little")
    if length > len(data) - _PREFIX:
        raise ValueError(f"a header of {length} bytes does not fit in {len(data)} bytes")
    header = json.loads(bytes(data[_PREFIX : _PREFIX + length]))
    metadata = header.pop(_METADATA, None) or {}
    body = data[_PREFIX + length :]
    wanted = metadata.get(_CHECKSUM)
    if wanted is not None and wanted != digest_of(_text(header), body):
        raise ValueError("its checksum is wrong")
    position = 0
    arrays = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        dtype, shape = _NAMES[entry["dtype"]], entry["shape"]
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"{name!r} has the shape {shape}")
        if start != position or end - start != math.prod(shape) * ITEM_BYTES[dtype] or end > len(body):
            raise ValueError(f"{name!r} of shape {shape} is not at the place that the header gives")
        arrays[name] = view(body[start:end], dtype, shape)
        position = end
    if position != len(body):
        raise ValueError(f"{len(body) - position} bytes belong to no tensor")
    return dict(sorted(arrays.items()))
