"""Planned corruption: the broken payload that a device sends in place of its result."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from fedemu.device.behaviour.faults import Corruption
from fedemu.protocol.codec import ITEM_BYTES, Buffer
from fedemu.protocol.messages import Result, TensorSpec


def corrupt(result: Result, frames: Sequence[Buffer], kind: Corruption) -> tuple[Result, list[bytes]]:
    """The result with a payload that cannot be used.

    ``nan`` fills the first tensor of floats with NaN. ``shape`` gives the first tensor a wrong shape, with one element
    more. ``truncate`` cuts the bytes of the last tensor in half. A payload that has no tensor for its corruption gets
    a wrong shape instead. A payload without tensors gets one tensor first.
    """
    tensors, damaged = list(result.tensors), [bytes(frame) for frame in frames]
    if not tensors:
        tensors.append(TensorSpec(name="corrupt", dtype="uint8", shape=(0,)))
        damaged.append(b"")
    floats = [place for place, spec in enumerate(tensors) if "float" in spec.dtype and damaged[place]]
    if kind == "nan" and floats:
        damaged[floats[0]] = b"\xff" * len(damaged[floats[0]])  # all ones is NaN in every IEEE format and in bfloat16
    elif kind == "truncate" and damaged[-1]:
        damaged[-1] = damaged[-1][: len(damaged[-1]) // 2]
    else:
        item = ITEM_BYTES[tensors[0].dtype]
        damaged[0] += bytes(item)
        tensors[0] = replace(tensors[0], shape=(len(damaged[0]) // item,))
    return replace(result, tensors=tuple(tensors)), damaged
