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
class _Asked:
    """The devices whose sum an edge was asked for: first at the time ``first``, and again at ``next``.

    The time ``wait`` until it is asked again doubles, because the edge may need long for the sum, or to send it.
    """

    devices: tuple[int, ...]
    first: float
    next: float
    wait: float


@dataclass
class Branches(Generic[Kept]):
    """What edges keep for ``gather``, which tells them of the ask. None: they are not told, and keep nothing.

    ``send`` sends a message on an edge's connection.

    A ``Kept`` is what the coordinator itself keeps of a reply. An edge that has not sent its sum is asked again after
    ``resend`` seconds, and then ever later, but not while ``is_sending`` says that something long comes from it. Times
    are monotonic.
    """

    gather: edge.Gather | None
    send: Callable[[bytes, Message], object]
    resend: float
    is_sending: Callable[[bytes], bool] = lambda station: False
    _kept: dict[DeviceId, tuple[bytes, Kept]] = field(default_factory=dict)
    _keepers: set[bytes] = field(default_factory=set)
    """The edges that have kept something. Every other peer that leaves is none of them."""
    _asked: dict[bytes, _Asked] = field(default_factory=dict)

    def welcome(self, stations: Iterable[bytes]) -> None:
        """Tell edges of the ask."""
        if self.gather is not None:
            for station in stations:
                self.send(station, self.gather)

    def keep(self, device: DeviceId, station: bytes, kept: Kept) -> None:
        """An edge keeps the reply of a device."""
        self._kept[device] = (station, kept)
        self._keepers.add(station)

    def has(self, device: DeviceId) -> bool:
        """Whether an edge keeps the reply of this device."""
        return device in self._kept

    def lose(self, station: bytes) -> list[DeviceId]:
        """A peer is gone, and with it what it kept, if it was an edge. Returns the devices whose replies these were."""
        if station not in self._keepers:
            return []
        self._keepers.remove(station)
        self._asked.pop(station, None)
        lost = [device for device, (at, _) in self._kept.items() if at == station]
        for device in lost:
            del self._kept[device]
        return lost

    def collect(self, running: Collection[DeviceId], now: float) -> None:
        """Ask for the sums if every device that still has to reply has a reply that is kept."""
        here = len(self._kept) >= len(running) and all(device in self._kept for device in running)
        if self.gather is None or not here:
            return
        at: dict[bytes, list[int]] = {}
        for device in running:
            at.setdefault(self._kept[device][0], []).append(device)
        for station, devices in at.items():
            wanted = tuple(sorted(devices)[: edge.MOST_DEVICES])
            asked = self._asked.get(station)
            if asked is None or asked.devices != wanted:
                asked = self._asked[station] = _Asked(wanted, now, now, self.resend)
            if now >= asked.next:
                asked.next = now + asked.wait
                if now > asked.first and self.is_sending(station):
                    continue
                asked.wait *= 2
                self.send(station, edge.Sum(ask=self.gather.ask, epoch=self.gather.epoch, devices=wanted))

    def overdue(self, now: float, limit: float) -> dict[DeviceId, float]:
        """The devices whose sum was first asked for more than ``limit`` seconds ago, and for how long it is awaited.

        Nothing of them is kept any more.
        """
        late = [station for station, asked in self._asked.items() if now - asked.first > limit]
        waited = {
            DeviceId(d): now - self._asked[station].first for station in late for d in self._asked[station].devices
        }
        for station in late:
            del self._asked[station]
        for device in waited:
            self._kept.pop(device, None)
        return waited

    def stalled(self, seconds: float) -> None:
        """So much time does not count."""
        for asked in self._asked.values():
            asked.first += seconds

    def take(
        self, station: bytes, partial: edge.Partial, running: Collection[DeviceId]
    ) -> tuple[dict[DeviceId, Kept], list[DeviceId]] | None:
        """A sum has come: the replies in it, and the devices that were asked for and are not in it.

        None if it is not the sum that was asked for last, or holds a reply that counts no more.
        """
        asked = self._asked[station].devices if station in self._asked else ()
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
