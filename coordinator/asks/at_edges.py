"""The replies of one ask that edges keep, from the word of an edge to the sum that it sends.

``branches.py`` knows which edge keeps what, and asks for the sums. Here is what that means for the ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fedemu.coordinator.asks.ask import LIVES, Action, AskMachine, Missed
from fedemu.coordinator.asks.branches import Branches, packed_of
from fedemu.coordinator.asks.folding import Folding
from fedemu.coordinator.asks.parts import Contribution
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.sharing.edge_messages import Partial


class AtEdges:
    """What edges keep. ``accept`` gets each reply whose sum has come, and ``perform`` what the machine then wants.

    ``told`` hears why a sum cannot be used.
    """

    def __init__(
        self,
        machine: AskMachine,
        branches: Branches[Contribution],
        folding: Folding,
        accept: Callable[[DeviceId, Contribution, float], None],
        perform: Callable[[list[Action]], None],
        told: Callable[[str], None],
    ) -> None:
        self._machine = machine
        self._branches = branches
        self._folding = folding
        self._accept = accept
        self._perform = perform
        self._told = told
        self._losses: dict[DeviceId, tuple[float, int]] = {}
        """When a reply of a device was lost first, and how often replies were."""

    @property
    def wanted(self) -> bool:
        """Whether edges are to keep replies to this ask."""
        return self._branches.gather is not None

    def welcome(self, stations: Iterable[bytes]) -> None:
        """Tell edges of the ask."""
        self._branches.welcome(stations)

    def has(self, device: DeviceId) -> bool:
        """Whether an edge keeps the reply of this device."""
        return self._branches.has(device)

    def keep(self, device: DeviceId, station: bytes, found: Contribution, now: float) -> None:
        """An edge keeps a good reply of a device that is expected to send one."""
        self._branches.keep(device, station, found)
        self._machine.kept(device, now)
        self.collect(now)

    def collect(self, now: float) -> None:
        """Ask for the sums if no other reply is awaited. An edge may take ``answer_timeout`` for its sum."""
        self._branches.collect(self._machine.running, now)
        limit = self._machine.terms.answer_timeout
        for device, waited in self._branches.overdue(now, limit).items():
            if self._machine.pending(device):  # otherwise its reply has come past the edge
                missed = Missed("is behind an edge that sent no sum", waited, "fleet.answer_timeout")
                self._perform(self._machine.give_up(device, missed, now))

    def stalled(self, seconds: float) -> None:
        """The coordinator stood still for so long. This time does not count for an edge that is waited for."""
        self._branches.stalled(seconds)

    def lose(self, station: bytes, now: float) -> None:
        """An edge is gone, and with it what it kept."""
        self._ask_again(self._branches.lose(station), now)

    def merge(self, station: bytes, message: Partial, frames: Sequence[memoryview], now: float) -> None:
        """An edge has sent the sum of what it was asked for. One that cannot be used costs asking its devices again."""
        taken = self._branches.take(station, message, self._machine.running)
        if taken is None:
            return
        found, lost = taken
        if found:
            try:
                if message.examples != sum(contribution.reply.examples for contribution in found.values()):
                    raise ValueError("the examples of a sum are not those of its results")
                sums = self._folding.unpack(packed_of(message, frames))
            except ValueError as error:
                self._told(f"a sum cannot be used: {error}")
                self._ask_again([*found, *lost], now)
                return
            self._folding.merge(sums)
        for device, contribution in found.items():
            self._accept(device, contribution, now)
        self._ask_again(lost, now)

    def _ask_again(self, devices: Sequence[DeviceId], now: float) -> None:
        """These replies are lost. Devices that are connected are asked now, the others when they join.

        A device whose replies are lost again and again is given up.
        """
        for device in devices:
            first, times = self._losses.get(device, (now, 0))
            self._losses[device] = first, times + 1
            if times < LIVES or not self._machine.pending(device):
                self._perform(self._machine.lost(device, now))
            else:
                missed = Missed("is behind edges that lost its replies", now - first, f"{LIVES} replies")
                self._perform(self._machine.give_up(device, missed, now))
