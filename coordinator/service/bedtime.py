"""When devices that sleep until they are asked are woken, and when they are told to sleep again."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable

from fedemu.coordinator.asks.exchange import Exchange
from fedemu.coordinator.fleet.roster import Roster
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import Message, Sleep, Wake

MOST_DEVICES = 65_536
"""The most devices of one Wake."""


class Bedtime:
    """Wakes the devices of an open ask that sleep, through their supervisors, again every ``again`` real seconds.

    A device that is awake and not asked is told to sleep, as soon as it knows its outcome, and again as often until it
    has left.
    """

    def __init__(self, roster: Roster, send: Callable[[bytes, Message], None], again: float) -> None:
        self._roster = roster
        self._send = send
        self._again = again
        self._woken = -math.inf
        self._heralds: set[DeviceId] = set()

    def opened(self, exchange: Exchange, now: float) -> None:
        """An ask is open: wake its devices."""
        self._woken = now
        self.wake(device for device in exchange.machine.terms.cohort if exchange.machine.pending(device))

    def wake_heralds(self, again: bool = False) -> None:
        """Have one device woken of each machine that has woken none yet. Each is woken once, or ``again``."""
        heralds = self._roster.heralds()
        self.wake(device for device in heralds if again or device not in self._heralds)
        self._heralds = set(heralds)

    def wake(self, devices: Iterable[DeviceId]) -> None:
        """Have those of the devices woken that sleep, if their supervisors are there."""
        absent: dict[bytes, list[DeviceId]] = defaultdict(list)
        for device in devices:
            holder = self._roster.leases.holder(device)
            if device not in self._roster.connected and holder is not None:
                absent[holder].append(device)
        for holder, some in absent.items():
            for start in range(0, len(some), MOST_DEVICES):
                self._send(holder, Wake(devices=tuple(some[start : start + MOST_DEVICES])))

    def look(self, exchange: Exchange | None, untold: Container[DeviceId], now: float) -> None:
        """To be called a few times a second. The outcomes of ``untold`` devices have not been sent yet."""
        if now >= self._woken + self._again:
            self._woken = now
            for peer in self._roster.resting:  # a device that has not heard it would neither sleep nor be woken
                self._send(peer, Sleep())
            if exchange is not None:
                self.opened(exchange, now)
        idle = [
            device
            for device in self._roster.connected
            if device not in untold and (exchange is None or not exchange.machine.pending(device))
        ]
        for device in idle:
            self._send(self._roster.rest(device), Sleep())
