"""The on-line times of devices where the experiment plans them: columns that the coordinator computes by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Intervals = Callable[[int], Iterator[tuple[float, float]]]
"""The on-line intervals [start, end) of a device, ascending and disjoint. Each call begins anew."""


class PlannedTimes:
    """Whether each of ``devices`` devices is on-line, and until when it stays so. Nothing else is kept of a device.

    ``intervals`` is None if all devices are always on-line. ``reach`` follows a device whose spell is over again from
    time 0, which costs much for many devices: it may be called in a thread, while others ask what was reached before.
    """

    def __init__(self, devices: int, intervals: Intervals | None) -> None:
        self._intervals: Intervals = intervals or _always
        self._online = np.full(devices, intervals is None)
        self._until = np.full(devices, math.inf if intervals is None else 0.0)
        self._reached = -math.inf

    def reach(self, time: float) -> None:
        """Compute who is on-line at ``time``, which does not go back."""
        if time == self._reached:
            return
        assert time > self._reached, f"{time} lies before {self._reached}"
        online, until = self._online.copy(), self._until.copy()
        for device in np.flatnonzero(until <= time).tolist():
            online[device], until[device] = _spell(self._intervals(device), time)
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


def _spell(intervals: Iterator[tuple[float, float]], time: float) -> tuple[bool, float]:
    """Whether a device is on-line at ``time``, and until when it stays so."""
    for start, end in intervals:
        if time < start:
            return False, start
        if time < end:
            return True, end
    return False, math.inf


def _arrival(intervals: Iterator[tuple[float, float]], time: float) -> float:
    """The first time from ``time`` on at which a device is on-line, infinity if there is none."""
    return next((max(start, time) for start, end in intervals if time < end), math.inf)
