"""The replies of one ask that edges keep, from the word of an edge to the sum that it sends.

A reply that an edge keeps counts as accepted when its sum has come. When nobody else is awaited, each edge is asked for
one sum of what it keeps. If an edge is lost before, its devices are asked again, as if they had not replied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fedemu.coordinator.asks.ask import LIVES, Action, AskMachine, Missed
from fedemu.coordinator.asks.folding import Folding
from fedemu.coordinator.asks.parts import Contribution
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.sums.messages import packed_of
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import Message
from fedemu.protocol.sharing import edge_messages as edge


@dataclass
class _Asked:
    """The devices whose sum an edge was asked for: first at the time ``first``, and again at ``next``.

    The time ``wait`` until it is asked again doubles, because the edge may need long for the sum, or to send it.
    """

    devices: tuple[DeviceId, ...]
    first: float
    next: float
    wait: float


class AtEdges:
    """What edges keep for ``gather``, which tells them of the ask. None: they are not told, and keep nothing.

    ``send`` sends a message on an edge's connection. An edge that has not sent its sum is asked again, and then ever
    later, but not while ``is_sending`` says that something long comes from it. Times are monotonic. The actions that
    are returned are what ``machine`` wants.
    """

    def __init__(
        self,
        gather: edge.Gather | None,
        machine: AskMachine,
        folding: Folding,
        send: Callable[[bytes, Message], object],
        is_sending: Callable[[bytes], bool],
        observers: Observers,
    ) -> None:
        self._gather = gather
        self._machine = machine
        self._folding = folding
        self._send = send
        self._is_sending = is_sending
        self._observers = observers
        self._kept: dict[DeviceId, tuple[bytes, Contribution]] = {}
        self._keepers: set[bytes] = set()
        """The edges that have kept something. Every other peer that leaves is none of them."""
        self._asked: dict[bytes, _Asked] = {}
        self._losses: dict[DeviceId, tuple[float, int]] = {}
        """When a reply of a device was lost first, and how often replies were."""

    @property
    def wanted(self) -> bool:
        """Whether edges are to keep replies to this ask."""
        return self._gather is not None

    def welcome(self, stations: Iterable[bytes]) -> None:
        """Tell edges of the ask."""
        if self._gather is not None:
            for station in stations:
                self._send(station, self._gather)

    def has(self, device: DeviceId) -> bool:
        """Whether an edge keeps the reply of this device."""
        return device in self._kept

    def keep(self, device: DeviceId, station: bytes, found: Contribution, now: float) -> list[Action]:
        """An edge keeps a good reply of a device that is expected to send one."""
        self._kept[device] = station, found
        self._keepers.add(station)
        self._machine.kept(device, now)
        return self.collect(now)

    def collect(self, now: float) -> list[Action]:
        """Ask for the sums if every device that still has to reply has a reply that is kept.

        An edge may take ``answer_timeout`` for its sum. Then its devices are given up.
        """
        if self._gather is None or not (self._kept or self._asked):  # as with most messages
            return []
        running = self._machine.running
        if len(self._kept) >= len(running) and all(device in self._kept for device in running):
            at: dict[bytes, list[DeviceId]] = defaultdict(list)
            for device in running:
                at[self._kept[device][0]].append(device)
            for station, devices in at.items():
                self._ask(self._gather, station, tuple(sorted(devices)[: edge.MOST_DEVICES]), now)
        return self._give_up_late(now)

    def stalled(self, seconds: float) -> None:
        """The coordinator stood still for so long. This time does not count for an edge that is waited for."""
        for asked in self._asked.values():
            asked.first += seconds

    def lose(self, station: bytes, now: float) -> list[Action]:
        """A peer is gone, and with it what it kept, if it was an edge."""
        if station not in self._keepers:
            return []
        self._keepers.remove(station)
        self._asked.pop(station, None)
        lost = [device for device, (at, _) in self._kept.items() if at == station]
        for device in lost:
            del self._kept[device]
        return self._ask_again(lost, now)

    def merge(
        self, station: bytes, message: edge.Partial, frames: Sequence[memoryview], now: float
    ) -> tuple[dict[DeviceId, Contribution], list[Action]]:
        """An edge has sent a sum: the replies in it, which are accepted. The devices that it lacks are asked again.

        There are none if it is not the sum that was asked for last, if it holds a reply that counts no more, or if it
        cannot be used, of which an event tells.
        """
        asked = self._asked[station].devices if station in self._asked else ()
        found = {DeviceId(device) for device in message.devices}
        running = self._machine.running
        if not asked or not found <= set(asked) or any(d not in running or d not in self._kept for d in found):
            return {}, []
        del self._asked[station]
        accepted = {device: self._kept.pop(device)[1] for device in sorted(found)}
        lost = [device for device in asked if device not in found]
        for device in lost:
            self._kept.pop(device, None)
        actions: list[Action] = []
        if accepted:
            try:
                if message.examples != sum(contribution.reply.examples for contribution in accepted.values()):
                    raise ValueError("the examples of a sum are not those of its results")
                sums = self._folding.unpack(packed_of(message, frames))
            except ValueError as error:
                self._observers.event("edge", ask=message.ask, detail=f"a sum cannot be used: {error}")
                return {}, self._ask_again([*accepted, *lost], now)
            self._folding.merge(sums)
            for device in accepted:
                actions += self._machine.result(device, now)
        return accepted, actions + self._ask_again(lost, now)

    def _ask(self, gather: edge.Gather, station: bytes, devices: tuple[DeviceId, ...], now: float) -> None:
        """Ask an edge for the sum over these devices, unless it was asked for just that a moment ago."""
        asked = self._asked.get(station)
        if asked is None or asked.devices != devices:
            asked = self._asked[station] = _Asked(devices, now, now, self._machine.terms.resend)
        if now < asked.next:
            return
        asked.next = now + asked.wait
        if now > asked.first and self._is_sending(station):
            return
        asked.wait *= 2
        self._send(station, edge.Sum(ask=gather.ask, epoch=gather.epoch, devices=devices))

    def _give_up_late(self, now: float) -> list[Action]:
        """Give up the devices whose sum has been awaited for too long. Nothing of them is kept any more."""
        actions: list[Action] = []
        for station, asked in list(self._asked.items()):
            waited = now - asked.first
            if waited <= self._machine.terms.answer_timeout:
                continue
            del self._asked[station]
            for device in asked.devices:
                self._kept.pop(device, None)
                if self._machine.pending(device):  # otherwise its reply has come past the edge
                    missed = Missed("is behind an edge that sent no sum", waited, "fleet.answer_timeout")
                    actions += self._machine.give_up(device, missed, now)
        return actions

    def _ask_again(self, devices: Iterable[DeviceId], now: float) -> list[Action]:
        """These replies are lost. Devices that are connected are asked now, the others when they join.

        A device whose replies are lost again and again is given up.
        """
        actions: list[Action] = []
        for device in devices:
            first, times = self._losses.get(device, (now, 0))
            self._losses[device] = first, times + 1
            if times < LIVES or not self._machine.pending(device):
                actions += self._machine.lost(device, now)
            else:
                missed = Missed("is behind edges that lost its replies", now - first, f"{LIVES} replies")
                actions += self._machine.give_up(device, missed, now)
        return actions
