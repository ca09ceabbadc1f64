"""The results of one ask at an edge: checked as the coordinator checks them, kept, and added up when it says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedemu.algorithms.interface import Reducer
from fedemu.coordinator.asks.payload import Payload, PayloadError, PayloadTemplate, check, spill
from fedemu.coordinator.sums.leaf import Leaf
from fedemu.coordinator.sums.messages import message_of, packed_of
from fedemu.coordinator.sums.partial import Arrays, Partial
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import Envelope
from fedemu.protocol.sharing import edge_messages as edge

_OF_HELD = frozenset(edge.Held.__struct_fields__)


class Gathering:
    """What ``gather`` asks for. Large results are kept in ``folder``, as at the coordinator."""

    def __init__(self, gather: edge.Gather, folder: Path) -> None:
        self.gather = gather
        self.template = PayloadTemplate({spec.name: Leaf(spec.dtype, spec.shape) for spec in gather.leaves})
        self._reducers = {key: Reducer(kind, sent) for key, kind, sent in gather.reducers}
        self._folder = folder
        self._kept: dict[int, tuple[Payload, edge.Held]] = {}

    def covers(self, ask: str, epoch: int | None) -> bool:
        """Whether a message about this ask belongs here."""
        return ask == self.gather.ask and epoch in (None, self.gather.epoch)

    def take(self, device: int, result: wire.Result, frames: Sequence[memoryview]) -> edge.Held:
        """Keep the first result of a device that can be used. Returns what the coordinator is told of it.

        Of a device whose result is kept it is told the same again, whatever the device says now: the coordinator
        uses no sum that has other examples than it was told.
        """
        if (known := self._kept.get(device)) is not None:
            return known[1]
        said: dict[str, Any] = {
            name: getattr(result, name) for name in wire.Result.__struct_fields__ if name in _OF_HELD
        }
        try:
            check(result.tensors, frames, self.template, self.gather.max_norm)
        except PayloadError as error:
            return edge.Held(**said | {"reason": error.reason, "detail": str(error)[:2048]})
        held = edge.Held(**said)
        self._kept[device] = (spill(self._folder, device, result.tensors, frames), held)
        return held

    def has(self, device: int) -> bool:
        """Whether the result of this device is kept."""
        return device in self._kept

    def drop(self, device: int) -> None:
        """Forget the result of a device, if it is kept. The next one counts."""
        if (kept := self._kept.pop(device, None)) is not None:
            kept[0].discard()

    def kept(self, devices: Iterable[int]) -> list[tuple[Arrays, int]]:
        """The results of devices, with the numbers of their examples. They stay valid after ``close``."""
        return [(payload.load(), held.examples) for payload, held in map(self._kept.__getitem__, devices)]

    def sum(self, kept: Sequence[tuple[Arrays, int]]) -> Partial:
        """The sum over results."""
        total = self.empty()
        total.fold([arrays for arrays, _ in kept], [examples for _, examples in kept])
        return total

    def empty(self) -> Partial:
        """A sum over nothing."""
        return Partial(self._reducers, self.template.leaves)

    def close(self) -> None:
        """Forget the results."""
        for payload, _ in self._kept.values():
            payload.discard()
        self._kept.clear()

    def told(self, total: Partial, devices: Sequence[int]) -> tuple[edge.Partial, list[memoryview]]:
        """A sum as a message and its frames."""
        return message_of(total.pack(), self.gather, devices)

    def merge(self, total: Partial, envelope: Envelope) -> None:
        """Add the sum that another edge has sent. Raises ValueError if it does not fit this ask."""
        total.merge(self.empty().unpack(packed_of(envelope.message, envelope.frames)))
