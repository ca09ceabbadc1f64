"""Arrays to specs and frames and back, without copies. Only numpy is needed.

numpy has no bfloat16, so its bits travel as uint16 arrays. The sender declares them in ``dtypes``; the receiver gets
uint16, and reads ``bfloat16`` in the spec. The wire has no uint16 of its own, so a received uint16 array always is
bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedemu.protocol.codec import Buffer
from fedemu.protocol.errors import MalformedMessage
from fedemu.protocol.messages import TensorSpec

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "int16": np.dtype("<i2"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
    "bool": np.dtype("?"),
}
"""The numpy dtype for each dtype of the wire."""
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items() if name != "bfloat16"}
"""The dtype of the wire for numpy's dtypes, without the one that must be declared."""


def wire_dtype(name: str, array: NDArray[Any], dtypes: Mapping[str, str]) -> str:
    """The name of the array's dtype on the wire. Raises MalformedMessage if the wire does not carry this dtype."""
    if name not in dtypes and (known := _NAMES.get(array.dtype)) is not None:
        return known
    declared = dtypes.get(name, array.dtype.name)
    if declared not in DTYPES or (array.dtype.newbyteorder("<") != DTYPES[declared]):
        hint = "; declare it as bfloat16 if these are its bits" if array.dtype == np.uint16 else ""
        raise MalformedMessage(
            "dtype", f"the tensor {name!r} is {array.dtype.name}, which is not one of {', '.join(DTYPES)}{hint}"
        )
    return declared


def buffer_of(array: NDArray[Any], dtype: str) -> memoryview:
    """The array's bytes, little-endian and in C order. They are a view if the array is like this, otherwise a copy."""
    laid_out = np.ascontiguousarray(array, dtype=DTYPES[dtype])
    return laid_out.reshape(-1).view(np.uint8).data


def pack(
    arrays: Mapping[str, NDArray[Any]], dtypes: Mapping[str, str] | None = None
) -> tuple[tuple[TensorSpec, ...], list[memoryview]]:
    """Specs and frames of the arrays, sorted by name. ``dtypes`` names the uint16 arrays that are bfloat16.

    Frames are views if possible, so the arrays must not change until the message is sent.
    """
    specs, frames = [], []
    for name in sorted(arrays):
        array = arrays[name]
        dtype = wire_dtype(name, array, dtypes or {})
        specs.append(TensorSpec(name=name, dtype=dtype, shape=array.shape))  # type: ignore[arg-type]
        frames.append(buffer_of(array, dtype))
    return tuple(specs), frames


def unpack(specs: Sequence[TensorSpec], frames: Sequence[Buffer]) -> dict[str, NDArray[Any]]:
    """Read-only views of the frames by name. The specs must fit the frames, as in every decoded message."""
    return {spec.name: view(frame, spec.dtype, spec.shape) for spec, frame in zip(specs, frames, strict=True)}


def view(data: Buffer, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """A read-only array of this dtype and shape over ``data``."""
    array: NDArray[Any] = np.ndarray(tuple(shape), DTYPES[dtype], buffer=data)
    array.flags.writeable = False
    return array
