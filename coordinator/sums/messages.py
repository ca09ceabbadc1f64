"""Partial sums as messages between edges and the coordinator, and back."""

from __future__ import annotations

from collections.abc import Sequence

from fedemu.coordinator.sums.digits import Packed
from fedemu.coordinator.sums.partial import PackedPartial
from fedemu.protocol.sharing import edge_messages as edge
from fedemu.protocol.tensors import pack, unpack


def message_of(
    packed: PackedPartial, gather: edge.Gather, devices: Sequence[int]
) -> tuple[edge.Partial, list[memoryview]]:
    """The sum over the results of ``devices``, for which ``gather`` has asked, as a message and its frames."""
    specs, frames = pack({name: of_leaf.digits for name, of_leaf in packed.sums.items()})
    message = edge.Partial(
        ask=gather.ask,
        epoch=gather.epoch,
        devices=tuple(devices),
        examples=packed.examples,
        lowest=tuple(packed.sums[spec.name].lowest for spec in specs),
        tensors=specs,
    )
    return message, frames


def packed_of(message: edge.Partial, frames: Sequence[memoryview]) -> PackedPartial:
    """The sum of a message, as ``Partial.unpack`` takes it. Raises ValueError if it cannot be one."""
    if len(message.lowest) != len(message.tensors) or len({*message.devices}) != len(message.devices):
        raise ValueError("the parts of a sum do not fit each other")
    arrays = unpack(message.tensors, frames)
    sums = {
        spec.name: Packed(lowest, arrays[spec.name])
        for spec, lowest in zip(message.tensors, message.lowest, strict=True)
    }
    return PackedPartial(len(message.devices), message.examples, sums)
