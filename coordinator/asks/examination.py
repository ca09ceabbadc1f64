"""What a reply has to be so that it is accepted: its numbers, its label counts and its tensors."""

from __future__ import annotations

from collections.abc import Sequence

from fedemu.algorithms.interface import DeviceReply
from fedemu.coordinator.asks.parts import AskParts, Contribution
from fedemu.coordinator.asks.payload import Payload, PayloadError, check, spill
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import Result
from fedemu.protocol.sharing.edge_messages import Held


def examined(
    parts: AskParts, device: DeviceId, result: Result, frames: Sequence[memoryview]
) -> Contribution | PayloadError:
    """Check a reply, and keep its tensors. A reply that cannot be used is a PayloadError."""
    try:
        reply = _reply(parts, device, result)
        check(result.tensors, frames, parts.template, parts.max_norm)
    except PayloadError as error:
        return error
    if parts.spill is None:
        payload = Payload.of(device, result.tensors, frames)
    else:
        payload = spill(parts.spill, device, result.tensors, frames)
    return Contribution(reply, payload, result.seconds)


def counted(parts: AskParts, device: DeviceId, held: Held) -> Contribution | PayloadError:
    """The same for a reply whose tensors an edge has checked and keeps."""
    if held.reason:
        return PayloadError(held.reason, held.detail)
    try:
        return Contribution(_reply(parts, device, held), None, held.seconds)
    except PayloadError as error:
        return error


def _reply(parts: AskParts, device: DeviceId, result: Result | Held) -> DeviceReply:
    """What a script gets to know of a reply beside its tensors. Raises PayloadError if its numbers cannot be."""
    counts = _label_counts(result, parts.label_counts)
    if parts.holdings is not None:
        parts.holdings.check(device, parts.task, result.examples, counts)
    return DeviceReply(device, result.examples, result.steps, result.metrics, counts)


def _label_counts(result: Result | Held, expected: int | None) -> tuple[int, ...] | None:
    """The label counts of a result if the program declares some. Raises PayloadError if they do not fit.

    Label counts that were not asked for are ignored.
    """
    if expected is None:
        return None
    counts = result.label_counts
    if counts is None or len(counts) != expected or sum(counts) != result.examples:
        raise PayloadError("label_counts", f"{expected} label counts that add up to {result.examples} were asked for")
    return counts
