"""The replies of one ask that edges keep. When nobody else is awaited, each edge is asked for one sum of what it keeps.

A reply that an edge keeps counts as accepted when its sum has come. If an edge is lost before, its devices are asked
again, as if they had not replied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fedemu.coordinator.sums.digits import Packed
from fedemu.coordinator.sums.partial import PackedPartial
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import Message
from fedemu.protocol.sharing import edge_messages as edge
from fedemu.protocol.tensors import unpack

Kept = TypeVar("Kept")


@dataclass
class Branches(Generic[Kept]):
    """What edges keep for ``gather``. ``send`` sends a message on an edge's connection.

    A ``Kept`` is what the coordinator itself keeps of a reply. Times are monotonic.
    """

    gather: edge.Gather
    send: Callable[[bytes, Message], object]
    resend: float
    _kept: dict[DeviceId, tuple[bytes, Kept]] = field(default_factory=dict)
    _asked: dict[bytes, tuple[tuple[int, ...], float]] = field(default_factory=dict)

    def welcome(self, stations: Iterable[bytes]) -> None:
        """Tell edges of the ask."""
        for station in stations:
            self.send(station, self.gather)

    def keep(self, device: DeviceId, station: bytes, kept: Kept) -> None:
        """An edge keeps the reply of a device."""
        self._kept[device] = (station, kept)

    def has(self, device: DeviceId) -> bool:
        """Whether an edge keeps the reply of this device."""
        return device in self._kept

    def lose(self, station: bytes) -> list[DeviceId]:
        """An edge is gone, with what it kept. Returns the devices whose replies these were."""
        self._asked.pop(station, None)
        lost = [device for device, (at, _) in self._kept.items() if at == station]
        for device in lost:
            del self._kept[device]
        return lost

    def collect(self, running: Collection[DeviceId], now: float) -> None:
        """Ask for the sums if every device that still has to reply has a reply that is kept."""
        if not running or len(self._kept) < len(running) or any(device not in self._kept for device in running):
            return
        at: dict[bytes, list[int]] = {}
        for device in running:
            at.setdefault(self._kept[device][0], []).append(device)
        for station, devices in at.items():
            wanted = tuple(sorted(devices)[: edge.MOST_DEVICES])
            asked, when = self._asked.get(station, ((), 0.0))
            if asked != wanted or now >= when + self.resend:
                self._asked[station] = (wanted, now)
                self.send(station, edge.Sum(ask=self.gather.ask, epoch=self.gather.epoch, devices=wanted))

    def take(
        self, station: bytes, partial: edge.Partial, running: Collection[DeviceId]
    ) -> tuple[dict[DeviceId, Kept], list[DeviceId]] | None:
        """A sum has come: the replies in it, and the devices that were asked for and are not in it.

        None if it is not the sum that was asked for last, or holds a reply that counts no more.
        """
        asked, _ = self._asked.get(station, ((), 0.0))
        found = {DeviceId(device) for device in partial.devices}
        if not asked or not found <= set(asked) or any(d not in running or d not in self._kept for d in found):
            return None
        del self._asked[station]
        lost = [DeviceId(device) for device in asked if device not in found]
        for device in lost:
            self._kept.pop(device, None)
        return {device: self._kept.pop(device)[1] for device in sorted(found)}, lost


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
