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

    def online(self, time: float) -> bool:
        """Whether the device is on-line at ``time``."""
        place = bisect_right(self._starts, time) - 1
        return place >= 0 and time < self._ends[place]

    def arrival(self, time: float) -> float | None:
        """The first time from ``time`` on at which the device is on-line, None if none is known."""
        place = bisect_right(self._starts, time) - 1
        if place >= 0 and time < self._ends[place]:
            return time
        return self._starts[place + 1] if place + 1 < len(self._starts) else None


class AnnouncedTimes:
    """The on-line times of all devices, as far as they announced them."""

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._times: dict[int, OnlineTimes] = {}

    def announce(self, device: int, times: OnlineTimes) -> bool:
        """A device announces its on-line times. Returns whether they reach at least as far as those before."""
        known = self._times.get(device)
        if known is not None and times.until < known.until:
            return False
        self._times[device] = times
        return True

    def of(self, device: int) -> OnlineTimes | None:
        """What a device announced last, None before it did."""
        return self._times.get(device)

    def lacking(self, until: float) -> list[int]:
        """The devices whose on-line times do not reach ``until``."""
        return [d for d in range(self._devices) if (times := self._times.get(d)) is None or times.until < until]

    def used_up(self, time: float) -> list[int]:
        """The devices that announced on-line times, of which nothing is known from ``time`` on."""
        return [device for device, times in self._times.items() if times.until <= time]

    def online(self, time: float) -> NDArray[np.bool_]:
        """Whether each device is on-line at ``time``."""
        online = np.zeros(self._devices, bool)
        online[[device for device, times in self._times.items() if times.online(time)]] = True
        return online

    def next_arrival(self, devices: Iterable[int], since: Iterable[float]) -> float | None:
        """The first time at which one of these devices is on-line, each from its time ``since`` on. None: unknown."""
        arrivals = (
            times.arrival(moment)
            for device, moment in zip(devices, since, strict=True)
            if (times := self._times.get(device)) is not None
        )
        return min((arrival for arrival in arrivals if arrival is not None and arrival < math.inf), default=None)


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
