"""The device processes of a machine whose devices sleep until they are asked: a few packs, in which they wake."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from fedemu.device.host.limits import pack_size
from fedemu.device.machine.forkers import ForkingProcess
from fedemu.device.machine.processes import DeviceProcesses, Process
from fedemu.device.machine.sleepers import Lives, Sleepers
from fedemu.device.pipe import Fork, Setup
from fedemu.protocol.host.phases import mark


class Packs(DeviceProcesses):
    """Processes with at most ``per_process`` devices awake in each. ``rouse`` has one begin lives, if it can hear.

    The other arguments are those of DeviceProcesses. A pack is started when the others are full, and stays.
    """

    def __init__(
        self,
        zygote: ForkingProcess,
        setup: Setup,
        sleepers: Sleepers,
        per_process: int,
        *arguments: Any,
        rouse: Callable[[int, Lives], object],
        **more: Any,
    ) -> None:
        super().__init__(zygote, setup, (), 1, *arguments, **more)
        self._sleepers = sleepers
        self._most = pack_size(per_process)
        self._rouse = rouse

    def wake(self, devices: Iterable[int]) -> None:
        """Devices are asked: those that sleep begin a life."""
        self._begin(self._sleepers.wake(devices))

    def attached(self, number: int) -> None:
        """A pack can hear: it begins the lives that have waited for it."""
        self._rouse(
            number, [(device, self._sleepers.incarnation(device)) for device in self._processes[number].devices]
        )

    def joined(self, device: int, incarnation: int) -> None:
        self._sleepers.has_joined(device, incarnation)
        number = self._number_of.get(device)
        if number is not None:
            self._processes[number].joined.add(device)
            self._processes[number].failures = 0
        self._count()

    def asleep(self, device: int, incarnation: int) -> None:
        """A device has fallen asleep. Its pack has room for another."""
        number = self._number_of.pop(device, None)
        if number is not None:
            self._processes[number].devices.remove(device)
            self._processes[number].joined.discard(device)
        self._begin(self._sleepers.asleep(device, incarnation))
        self._count()

    def _begin(self, lives: Lives) -> None:
        by_pack: dict[int, Lives] = defaultdict(list)
        number = 0
        for device, incarnation in lives:
            number = self._place(number)  # none before it has got room meanwhile
            self._processes[number].devices.append(device)
            self._number_of[device] = number
            by_pack[number].append((device, incarnation))
        for number, some in by_pack.items():
            self._rouse(number, some)

    def _place(self, first: int) -> int:
        """The first pack with room from number ``first`` on, or a new one."""
        for number in range(first, len(self._processes)):
            if len(self._processes[number].devices) < self._most:
                return number
        self._processes.append(Process([], {}))
        if self._launched and self._born is not None:  # otherwise all packs are forked once the zygote is ready
            self._fork(len(self._processes) - 1)
        return len(self._processes) - 1

    def _fork(self, number: int) -> None:
        if not self._stopping:
            self._zygote.tell(Fork(number=number, lives=()))

    def _bury(self, number: int) -> None:
        process = self._processes[number]
        self._pids.pop(number, None)
        process.joined.clear()
        self._process_ended(number)
        ended, process.devices = process.devices, []
        for device in ended:  # whoever is still asked is woken again by the coordinator
            del self._number_of[device]
            self._sleepers.died(device)
            self._died(device, self._sleepers.incarnation(device))
        self._count()

    def _count(self) -> None:
        awake, total = self._sleepers.joined, len(self._sleepers)
        self._observer.devices({"connected": total, "awake": awake, "starting": 0, "stopped": 0})
        if awake and not self._attached:
            self._attached = True
            mark("devices", "attach", lambda: {"devices": self.used()})
