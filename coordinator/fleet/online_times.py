"""The on-line times of a device under the virtual clock, as the device announced them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from fedemu.protocol.errors import MalformedMessage

DAY = 86_400.0
FARTHEST = 3_650 * DAY
"""Ten years in seconds. If no device announces a time on-line within them, no device is expected any more."""


class OnlineTimes:
    """The on-line intervals [start, end) of one device, known up to ``until``. Times are seconds of the experiment."""

    __slots__ = ("_ends", "_starts", "until")

    def __init__(self, until: float, intervals: Sequence[tuple[float, float]]) -> None:
        """Raises MalformedMessage unless the intervals are ascending, disjoint and not empty."""
        before = -math.inf
        for start, end in intervals:
            if not before <= start < end:
                raise MalformedMessage("presence", f"on-line interval [{start}, {end}) is empty or out of order")
            before = end
        self.until = until
        self._starts = [start for start, _ in intervals]
        self._ends = [end for _, end in intervals]

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


def horizon(time: float) -> float:
    """The time up to which devices announce their on-line times, to cover ``time``: one day, two, four, and so on."""
    reached = DAY
    while reached < min(time, FARTHEST):
        reached *= 2
    return reached
