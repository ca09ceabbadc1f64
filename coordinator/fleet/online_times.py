"""The on-line times of devices under the virtual clock, as the devices announced them."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fedemu.protocol.errors import MalformedMessage

DAY = 86_400.0
FARTHEST = 3_650 * DAY
"""Ten years in seconds. If no device announces a time on-line within the next ones, no device is expected any more."""
FARTHEST_STEP = 8 * DAY
"""The horizon moves on by so much at most, so that what is known of the future stays small in a long run."""


class OnlineTimes:
    """The on-line intervals [start, end) of one device, known up to ``until``. Times are seconds of the experiment.

    Intervals that end by ``since`` are not kept. Nobody asks for a time before it.
    """

    __slots__ = ("_ends", "_starts", "until")

    def __init__(self, until: float, intervals: Sequence[tuple[float, float]], since: float = 0.0) -> None:
        """Raises MalformedMessage unless the intervals are ascending, disjoint and not empty."""
        before = -math.inf
        for start, end in intervals:
            if not before <= start < end:
                raise MalformedMessage("presence", f"on-line interval [{start}, {end}) is empty or out of order")
            before = end
        self.until = until
        self._starts = array("d", [start for start, end in intervals if end > since])
        self._ends = array("d", [end for _, end in intervals if end > since])

    def spell(self, time: float) -> tuple[bool, float, float]:
        """Whether the device is on-line at ``time``, and since when and until when it is so: [start, end)."""
        place = bisect_right(self._starts, time)
        if place and time < self._ends[place - 1]:
            return True, self._starts[place - 1], self._ends[place - 1]
        start = self._ends[place - 1] if place else -math.inf
        return False, start, self._starts[place] if place < len(self._starts) else math.inf

    def arrival(self, time: float) -> float | None:
        """The first time from ``time`` on at which the device is on-line, None if none is known."""
        online, _, end = self.spell(time)
        if online:
            return time
        return end if end < math.inf else None


class AnnouncedTimes:
    """The on-line times of all devices, as far as they announced them.

    Of each device it keeps the spell that it looked up last, on-line or not. Most spells last for several rounds.
    """

    def __init__(self, devices: int) -> None:
        self._times: dict[int, OnlineTimes] = {}
        self._until = np.full(devices, -math.inf)
        """The time up to which the on-line times of each device are known."""
        self._online = np.zeros(devices, bool)
        self._start = np.full(devices, -math.inf)
        self._end = np.full(devices, math.inf)

    def announce(self, device: int, times: OnlineTimes) -> bool:
        """A device announces its on-line times. Returns whether they reach at least as far as those before."""
        if times.until < self._until[device]:
            return False
        self._times[device], self._until[device] = times, times.until
        self._end[device] = -math.inf  # no time is in this spell, so the next look finds another
        return True

    def of(self, device: int) -> OnlineTimes | None:
        """What a device announced last, None before it did."""
        return self._times.get(device)

    def lacking(self, until: float) -> list[int]:
        """The devices whose on-line times do not reach ``until``."""
        found: list[int] = np.flatnonzero(self._until < until).tolist()
        return found

    def used_up(self, time: float) -> list[int]:
        """The devices that announced on-line times, of which nothing is known from ``time`` on."""
        return [device for device in np.flatnonzero(self._until <= time).tolist() if device in self._times]

    def online(self, time: float) -> NDArray[np.bool_]:
        """Whether each device is on-line at ``time``."""
        for device in np.flatnonzero((time < self._start) | (time >= self._end)).tolist():
            self._online[device], self._start[device], self._end[device] = self._times[device].spell(time)
        return self._online.copy()

    def next_arrival(self, devices: Iterable[int], since: Iterable[float]) -> float | None:
        """The first time at which one of these devices is on-line, each from its time ``since`` on. None: unknown."""
        arrivals = (
            times.arrival(moment)
            for device, moment in zip(devices, since, strict=True)
            if (times := self._times.get(device)) is not None
        )
        return min((arrival for arrival in arrivals if arrival is not None), default=None)


def horizon(time: float, seconds: float) -> float:
    """The time up to which devices announce their on-line times, to cover the next ``seconds``, ten years at most.

    It is 1, 2, 4, 8, 16, 24 days ... of the experiment.
    """
    wanted = time + min(seconds, FARTHEST)
    if wanted > FARTHEST_STEP:
        return math.ceil(wanted / FARTHEST_STEP) * FARTHEST_STEP
    reached = DAY
    while reached < wanted:
        reached *= 2
    return reached


def horizon_of_ask(time: float, deadline: float) -> float:
    """The horizon with which an ask begins. It covers the ask if its ``deadline`` is no longer than 8 days.

    Of a longer ask it covers the beginning: which devices are on-line later is asked when it is needed.
    """
    return horizon(time, min(deadline, FARTHEST_STEP))
