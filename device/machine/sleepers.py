"""Which devices of a machine are awake, and with which incarnation their next lives begin. It has no I/O."""

from __future__ import annotations

from collections.abc import Iterable

from fedemu.device.machine.processes import BIRTH_STRIDE

Lives = list[tuple[int, int]]
"""Devices, each with the first incarnation that its life may use."""


class Sleepers:
    """The devices of ``ranges``. Only those that were ever awake are remembered one by one."""

    def __init__(self, ranges: Iterable[tuple[int, int]], first_incarnation: int) -> None:
        self._ranges = tuple(ranges)
        self._first = first_incarnation
        self._known: dict[int, int] = {}
        self._awake: set[int] = set()
        self._joined: set[int] = set()
        self._again: set[int] = set()

    def __len__(self) -> int:
        """The number of devices, awake or not."""
        return sum(stop - start for start, stop in self._ranges)

    @property
    def joined(self) -> int:
        """The number of devices that are awake and members."""
        return len(self._joined)

    def incarnation(self, device: int) -> int:
        """The last known incarnation of a device."""
        return self._known.get(device, self._first)

    def wake(self, devices: Iterable[int]) -> Lives:
        """Devices are asked. Returns the lives that have to begin.

        One that is awake may be about to fall asleep, because it was told so before. Then it is to wake again.
        """
        lives = []
        for device in devices:
            if device in self._joined:
                self._again.add(device)
            elif device not in self._awake and any(start <= device < stop for start, stop in self._ranges):
                self._awake.add(device)
                self._known[device] = self.incarnation(device) + BIRTH_STRIDE
                lives.append((device, self._known[device]))
        return lives

    def has_joined(self, device: int, incarnation: int) -> None:
        """The coordinator has made a device a member."""
        self._known[device] = max(incarnation, self.incarnation(device))
        if device in self._awake:
            self._joined.add(device)
            self._again.discard(device)

    def asleep(self, device: int, incarnation: int) -> Lives:
        """A device has fallen asleep. Returns its next life if it was asked meanwhile."""
        self._known[device] = max(incarnation, self.incarnation(device))
        self.died(device)
        if device not in self._again:
            return []
        self._again.discard(device)
        return self.wake([device])

    def died(self, device: int) -> None:
        """The life of a device has ended with its process."""
        self._awake.discard(device)
        self._joined.discard(device)
