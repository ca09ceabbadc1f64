"""The waits of a run for its fleet, and what people are told of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from fedemu.coordinator.asks.exchange import Exchange
from fedemu.coordinator.fleet.roster import Roster
from fedemu.coordinator.observer import Absence
from fedemu.coordinator.settings import Settings
from fedemu.coordinator.timeline import Timeline

MOMENT_SECONDS = 5.0
"""Observers are told of devices that are away for longer than this: processes that start again need less."""


@dataclass(frozen=True)
class _Wait:
    """A wait for devices, in real seconds. ``missing`` counts those that are not there, ``then`` is what follows.

    Observers are told after ``moment``.
    """

    began: float
    end: float
    missing: Callable[[], int]
    then: str
    moment: float


class Waits:
    """Waits in real seconds. The time for which this process itself stood still does not count.

    ``changed`` is set when something has happened for which somebody may wait. ``exchange`` tells the open ask.
    """

    def __init__(
        self,
        settings: Settings,
        roster: Roster,
        timeline: Timeline,
        changed: asyncio.Event,
        exchange: Callable[[], Exchange | None],
    ) -> None:
        self._settings = settings
        self._roster = roster
        self._timeline = timeline
        self._changed = changed
        self._exchange = exchange
        self._stalls = 0.0
        """The seconds for which this process stood still, in all."""
        self._wait: _Wait | None = None
        self._deserted: float | None = None
        """Since when no device at all has had a connection."""

    @property
    def for_devices(self) -> bool:
        """Whether something waits for devices to come or to announce their times."""
        return self._wait is not None

    def stalled(self, seconds: float) -> None:
        """This process stood still for so long."""
        self._stalls += seconds

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the condition is true, ``seconds`` (real) at most. Returns whether it is true."""
        end = self._end_in(seconds)
        while not condition():
            left = self._left(end)
            if left <= 0:
                return False
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, 1.0)):
                    await self._changed.wait()
        return True

    @contextmanager
    def told(
        self, seconds: float, missing: Callable[[], int], then: str, moment: float = MOMENT_SECONDS
    ) -> Iterator[Callable[[], float]]:
        """A wait of ``seconds`` at most, of which observers are told after ``moment``, and that ``then`` follows it.

        Gives a function that tells the seconds that are left. ``missing`` counts the devices that are waited for.
        """
        wait = self._wait = _Wait(self._timeline.now(), self._end_in(seconds), missing, then, moment)
        try:
            yield lambda: self._left(wait.end)
        finally:
            self._wait = None

    def absence(self, now: float) -> Absence | None:
        """The devices that the coordinator lacks now. None if it lacks none, or only for a moment so far."""
        connected, exchange = self._roster.reachable(), self._exchange()
        if connected:
            self._deserted = None
        elif self._deserted is None:
            self._deserted = now
        awaited = None if exchange is None else exchange.machine.awaited(now)
        left: float | None
        if awaited is not None and exchange is not None:
            devices, waited, left = awaited
            attempt = exchange.parts.ask.attempt + 1
            then = f"they count as failed (try {attempt} of {self._settings.attempts})"
            moment = MOMENT_SECONDS if connected else 1.0
        elif (wait := self._wait) is not None:
            devices, waited, left = wait.missing(), now - wait.began, max(0.0, wait.end + self._stalls - now)
            then, moment = wait.then, wait.moment
        elif self._deserted is not None:
            devices, waited, left, then, moment = self._settings.devices, now - self._deserted, None, "", MOMENT_SECONDS
        else:
            return None
        absent = devices and waited > moment
        return Absence(devices, connected, left, then, self._roster.leases.away) if absent else None

    def _end_in(self, seconds: float) -> float:
        """The time at which a wait ends, if this process does not stand still from now on."""
        return self._timeline.now() + seconds - self._stalls

    def _left(self, end: float) -> float:
        return end + self._stalls - self._timeline.now()
