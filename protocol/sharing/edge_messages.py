"""The messages between an edge and the coordinator, or an edge further up, beside those that edges pass on.

An edge keeps the results of an ask that devices behind it send, and sends one sum of them. ``docs/edges.md`` explains
the exchange.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from fedemu.protocol.codec import Decoder, Limits
from fedemu.protocol.messages import (
    AskText,
    BeatSeconds,
    Down,
    Index,
    Message,
    Metrics,
    Name,
    RealSeconds,
    Sentence,
    Size,
    Tensors,
    TensorSpec,
    Up,
)

NO_EDGE: Final = "no_edge"
"""The reason for which a machine is refused that would be an edge, and is not approved as one."""
MOST_DEVICES: Final = 60_000
"""The most devices whose results one sum adds up."""
Devices = Annotated[tuple[Index, ...], Meta(max_length=MOST_DEVICES)]


class Station(Message):
    """An edge takes its place. It sends this on its connection itself, and not on a channel."""

    host: Name = ""


class Vouch(Message):
    """The key of the machine behind a channel, on this channel, before what the key is needed for.

    With edges behind edges these are the keys from the top, parted by blanks. Only an edge can vouch.
    """

    key: Annotated[str, Meta(max_length=1024)]


class Held(Message):
    """A result of a device, on its channel: the edge keeps the tensors. With a ``reason`` they cannot be used.

    The other fields are those of Result. Reasons become labels of metrics, so there are no others than these.
    """

    ask: AskText
    examples: Size
    steps: Size
    metrics: Metrics
    label_counts: Annotated[tuple[Size, ...], Meta(max_length=65536)] | None = None
    seconds: RealSeconds | None = None
    epoch: Size | None = None
    reason: Literal["", "names", "dtype", "shape", "nonfinite", "norm"] = ""
    detail: Sentence = ""


class Partial(Message):
    """The exact sum of the results of ``devices``: each tensor is ``[places, elements]`` int32, the lowest place first.

    The value of an element is the sum of ``tensor[k] * 2**(32 * (lowest + k))``. ``examples`` is the number of all
    their examples.
    """

    ask: AskText
    epoch: Size
    devices: Devices
    examples: Size
    lowest: Annotated[tuple[Annotated[int, Meta(ge=-64, le=64)], ...], Meta(max_length=8192)]
    tensors: Tensors


class Stationed(Message):
    """The edge has its place in a run of ``devices`` devices, and says a heartbeat as every peer does."""

    run: Name
    devices: Index
    heartbeat_seconds: BeatSeconds
    patience: Annotated[int, Meta(ge=1)]


class Gather(Message):
    """Keep results of this ask that have these tensors. ``reducers`` are triples: key, kind, the payload's key.

    A sum of more than ``most_bytes`` would not be read. It is not sent, and the results pass. With 0 they pass at once.
    """

    ask: AskText
    epoch: Size
    leaves: Annotated[tuple[TensorSpec, ...], Meta(max_length=8192)]
    reducers: Annotated[tuple[tuple[Name, Literal["weighted_mean", "mean", "total"], Name], ...], Meta(max_length=256)]
    max_norm: float
    most_bytes: Size = 2**53 - 1


class Sum(Message):
    """Add up the results of these devices that are here, and send the sum. They stay until the next Gather."""

    ask: AskText
    epoch: Size
    devices: Devices


FromEdge = Station | Vouch | Held | Partial
ToEdge = Stationed | Gather | Sum


def no_edge(key: str) -> str:
    """What a machine with this key is told that is refused with the reason ``NO_EDGE``."""
    return f"this key is not approved for an edge; say there: fedemu keys approve NAME '{key}' --edge"


def path_of(*keys: str) -> str:
    """The keys of an edge and of what is behind it, as ``Vouch`` has them. Empty ones are left out."""
    return " ".join(key for key in keys if key)


def up_decoder(limits: Limits) -> Decoder:
    """What a coordinator takes."""
    return Decoder(Up | FromEdge, limits)


def down_decoder(limits: Limits) -> Decoder:
    """What an edge takes from further up."""
    return Decoder(Down | ToEdge, limits)
