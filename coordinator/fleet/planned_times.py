"""The on-line times of devices where the experiment plans them: columns that the coordinator computes by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST_FOLLOWED: Final = 10_000
"""The most devices whose place in their intervals is kept. One takes three kilobytes, most of it a random generator."""
Intervals = Callable[[int], Iterator[tuple[float, float]]]
"""The on-line intervals [start, end) of a device, ascending and disjoint. Each call begins anew."""


class PlannedTimes:
    """Whether each of ``devices`` devices is on-line, and until when it stays so.

    ``intervals`` is None if all devices are always on-line. ``reach`` keeps its place in the intervals of the first
    ``MOST_FOLLOWED`` devices. It reads those of any other device from time 0 whenever a spell of the device is over,
    which costs much for many devices. It may be called in a thread, while others ask what was reached before.
    """

    def __init__(self, devices: int, intervals: Intervals | None) -> None:
        self._intervals: Intervals = intervals or _always
        self._online = np.full(devices, intervals is None)
        self._until = np.full(devices, math.inf if intervals is None else 0.0)
        self._reached = -math.inf
        self._places: dict[int, _Place] = {}

    def reach(self, time: float) -> None:
        """Compute who is on-line at ``time``, which does not go back."""
        if time == self._reached:
            return
        assert time > self._reached, f"{time} lies before {self._reached}"
        online, until = self._online.copy(), self._until.copy()
        for device in np.flatnonzero(until <= time).tolist():
            place = self._places.get(device)
            if place is None:
                place = _Place(self._intervals(device))
                if device < MOST_FOLLOWED:
                    self._places[device] = place
            online[device], until[device] = place.spell(time)
        self._online, self._until, self._reached = online, until, time

    def online(self, time: float) -> NDArray[np.bool_]:
        """Whether each device is on-line at the time that was reached, which stands for ``time``."""
        return self._online

    def next_arrival(self, devices: Sequence[int], since: Sequence[float]) -> float | None:
        """The first time at which one of these devices is on-line, each from its time ``since`` on. None: never."""
        chosen, moments = np.array(devices, np.int64), np.array(since)
        online, until = self._online[chosen], self._until[chosen]
        known = np.where(online, moments < until, moments <= until)
        least = np.where(online & known, moments, np.maximum(moments, until))
        first = math.inf
        for place in np.argsort(least, kind="stable").tolist():
            if least[place] >= first:
                break
            arrival = float(least[place]) if known[place] else _arrival(self._intervals(devices[place]), since[place])
            first = min(first, arrival)
        return first if first < math.inf else None


def _always(device: int) -> Iterator[tuple[float, float]]:
    yield (0.0, math.inf)


class _Place:
    """How far the intervals of a device were read: up to the one that holds the time, or comes next."""

    __slots__ = ("_end", "_intervals", "_start")

    def __init__(self, intervals: Iterator[tuple[float, float]]) -> None:
        self._intervals = intervals
        self._start = self._end = -math.inf

    def spell(self, time: float) -> tuple[bool, float]:
        """Whether the device is on-line at ``time``, which does not go back, and until when it stays so."""
        if time >= self._end:
            ahead = ((start, end) for start, end in self._intervals if time < end)
            self._start, self._end = next(ahead, (math.inf, math.inf))
        return (False, self._start) if time < self._start else (True, self._end)


def _arrival(intervals: Iterator[tuple[float, float]], time: float) -> float:
    """The first time from ``time`` on at which a device is on-line, infinity if there is none."""
    return next((max(start, time) for start, end in intervals if time < end), math.inf)
