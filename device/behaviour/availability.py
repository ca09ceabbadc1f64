"""When a device is on-line: sources of intervals, and the timetable that the rest of a device asks.

Every source is an iterator of ascending, disjoint intervals [start, end) in seconds. It may be endless. The same
generator gives the same intervals. Nothing here uses sockets or the real clock.
"""

from __future__ import annotations

import bisect
import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from numpy.random import Generator

Interval = tuple[float, float]
DAY_HOURS = 24.0
HOUR_SECONDS = 3600.0
LATEST = 1e15
"""The time in seconds from which on spells of random length last for ever, and no trace is repeated: 30 million years.

There a float64 tells tenths of a second apart. Much later, spells would be lost in rounding, and all others be joined.
"""
MOST_INTERVALS = 1_000_000
"""The number of intervals that a timetable holds at most."""
MOST_OVER = 100_000_000
"""The number of intervals before the time of a question that a timetable reads past at most.

A life of a device that began late reads all that was over before it.
"""
KEPT_INTERVALS = 256
"""A timetable forgets what is over when it holds more such intervals than these."""


class TooFarAhead(ValueError):
    """A time so late that nobody reads a timetable so far."""


def always() -> Iterator[Interval]:
    """One interval from time 0 on, without an end."""
    yield (0.0, math.inf)


def exponential(generator: Generator, mean_online: float, mean_offline: float) -> Iterator[Interval]:
    """On-line intervals of a device whose spells on-line and off-line have exponential lengths, with means in seconds.

    The process is in its stationary state at time 0. The device starts on-line with probability mean_online /
    (mean_online + mean_offline). The rest of the first spell has the same distribution as a whole spell, because an
    exponential distribution has no memory.
    """
    online = generator.random() < mean_online / (mean_online + mean_offline)
    first = generator.exponential(mean_online if online else mean_offline)
    return _alternate(
        online, first, lambda: generator.exponential(mean_online), lambda: generator.exponential(mean_offline)
    )


def weibull(generator: Generator, shape: float, scale_online: float, scale_offline: float) -> Iterator[Interval]:
    """On-line intervals of a device whose spells have Weibull(shape, scale) lengths, with scales in seconds.

    The process is in its stationary state at time 0. The mean of a spell is scale · Γ(1 + 1/shape). So the device
    starts on-line with probability scale_online / (scale_online + scale_offline). Long spells are more likely to cover
    time 0: the length of the spell that covers it is distributed as scale · Gamma(1 + 1/shape)^(1/shape), and time 0
    lies at a uniformly random place in it.
    """
    online = generator.random() < scale_online / (scale_online + scale_offline)
    whole = (scale_online if online else scale_offline) * generator.gamma(1 + 1 / shape) ** (1 / shape)
    first = generator.random() * whole
    return _alternate(
        online, first, lambda: scale_online * generator.weibull(shape), lambda: scale_offline * generator.weibull(shape)
    )


def _alternate(
    online: bool, first: float, draw_online: Callable[[], float], draw_offline: Callable[[], float]
) -> Iterator[Interval]:
    def spells() -> Iterator[Interval]:
        now, state, left = 0.0, online, first
        while now < LATEST:
            end = _cut(now + left)
            if state:
                yield (now, end)
            now = end
            state = not state
            left = draw_online() if state else draw_offline()

    return joined(spells())


def _cut(end: float) -> float:
    """The end of a spell; infinity from ``LATEST`` on."""
    return end if end < LATEST else math.inf


def diurnal(
    generator: Generator, mean: float, amplitude: float, peak_hour: float, spread_hours: float, spell: float
) -> Iterator[Interval]:
    """On-line intervals with a daily rhythm: at any time t, in seconds, the device is on-line with probability close to

        p(t) = mean + amplitude · cos(2π (t/3600 - peak_hour - offset) / 24),

    which must lie from 0 to 1.
    Each device has its own offset in hours, drawn from a normal distribution with the deviation ``spread_hours``. The
    device decides anew at the points of a Poisson process, every ``spell`` seconds on average. From then on it is
    on-line with probability p(t), whether it was on-line before or not. So it goes on-line at the rate p(t)/spell and
    off-line at the rate (1 - p(t))/spell, and follows p(t) with a lag of ``spell``.
    """
    offset = peak_hour + spread_hours * generator.standard_normal()

    def share(time: float) -> float:
        angle = 2 * math.pi * (time / HOUR_SECONDS - offset) / DAY_HOURS
        return mean + amplitude * math.cos(angle)

    most, least = mean + amplitude, mean - amplitude

    def next_change(time: float, ceiling: float, chance: Callable[[float], float]) -> float:
        # Thinning: candidates come at the highest rate. Each is kept with the probability (rate there / highest rate).
        if ceiling <= 0.0:
            return math.inf
        while True:
            time = _cut(time + generator.exponential(spell / ceiling))
            if time == math.inf or generator.random() * ceiling < chance(time):
                return time

    # The state at time 0 was decided at the last point before it.
    online = generator.random() < share(-generator.exponential(spell))
    now = 0.0
    while now < math.inf:
        if online:
            end = next_change(now, 1.0 - least, lambda time: 1.0 - share(time))
            yield (now, end)
            now = end
        else:
            now = next_change(now, most, share)
        online = not online


def recorded(flat: Sequence[float], period: float | None, shift: float = 0.0) -> Iterator[Interval]:
    """The intervals of a trace. ``flat`` is start, end, start, end, ... in seconds, ascending.

    The last end is missing if the device was still on-line when the trace ended. With a ``period`` in seconds the trace
    is repeated, and moved later by ``shift`` seconds; the part that is moved beyond the end of the period comes first.
    Without a period the trace is played once, and a device that was still on-line stays on-line for ever.
    """
    closed = [*flat, math.inf] if len(flat) % 2 else flat
    intervals = zip(closed[::2], closed[1::2], strict=True)
    if period is None:
        return joined(intervals)
    one_turn = list(joined((start, min(end, period)) for start, end in intervals))
    if one_turn == [(0.0, period)]:
        return always()
    return joined(_turns(one_turn, period, shift % period)) if one_turn else iter(())


def _turns(one_turn: Sequence[Interval], period: float, shift: float) -> Iterator[Interval]:
    for turn in itertools.count(-1):
        # These are products, because a sum over the turns would add up rounding errors. What lasts until the end of a
        # turn ends where the next turn begins, to the bit: rounded otherwise, there might be a gap between them.
        begin, following = turn * period + shift, (turn + 1) * period + shift
        if begin >= LATEST:
            return
        for start, end in one_turn:
            stop = following if end == period else end + begin
            if stop > 0.0:
                yield (max(0.0, start + begin), stop)


def joined(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """The same on-line times, in intervals that are not empty and do not touch each other.

    ``intervals`` must ascend by their starts.
    """
    held: Interval | None = None
    for start, end in intervals:
        if start >= end:
            continue
        if held is not None and start <= held[1]:
            held = (held[0], max(held[1], end))
        else:
            if held is not None:
                yield held
            held = (start, end)
    if held is not None:
        yield held


class Timetable:
    """When one device is on-line and off-line, by intervals that ``begin`` gives from the first on, at each call.

    It reads them only as far as it is asked, and forgets what was over at the time of a question. A question about an
    earlier time, as after a coordinator that went back to its checkpoint, has all of them read anew.
    """

    def __init__(self, begin: Callable[[], Iterator[Interval]]) -> None:
        self._begin = begin
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._source = self._begin()
        self._starts = array("d")
        self._ends = array("d")
        self._forgotten = -math.inf
        """The end of the last interval that was forgotten."""

    def __len__(self) -> int:
        """The number of intervals that it holds."""
        return len(self._starts)

    def until(self, time: float, since: float = 0.0) -> tuple[Interval, ...]:
        """All intervals that start before ``time`` and end after ``since``, not cut at these times.

        The answer for an earlier time is a prefix of this. Raises TooFarAhead, as all questions do, if it takes more
        than ``MOST_INTERVALS``, or ``MOST_OVER``, as in an endless source if ``time`` is infinite.
        """
        self._read_past(time, since)
        count = bisect.bisect_left(self._starts, time)
        first = bisect.bisect_right(self._ends, since, hi=count)
        return tuple(zip(self._starts[first:count], self._ends[first:count], strict=True))

    def end_at(self, time: float) -> float | None:
        """The end of the interval that holds ``time``; None if the device is off-line then."""
        self._read_past(time, time)
        place = bisect.bisect_right(self._starts, time) - 1
        return self._ends[place] if place >= 0 and time < self._ends[place] else None

    def next_start(self, time: float) -> float:
        """The first start of an interval after ``time``; infinity if there is none."""
        self._read_past(time, time, forgets=False)
        place = bisect.bisect_right(self._starts, time)
        return self._starts[place] if place < len(self._starts) else math.inf

    def _read_past(self, time: float, since: float, *, forgets: bool = True) -> None:
        """Read until a start lies after ``time``. Intervals that end by ``since`` are not needed for the answer.

        A question about what comes next ``forgets`` them only if there are too many, since one about now may follow.
        """
        if since < self._forgotten:
            self._begin_anew()
        if forgets and len(self._ends) > KEPT_INTERVALS and self._ends[KEPT_INTERVALS] <= since:
            self._forget(since)
        over = 0
        while not self._starts or self._starts[-1] <= time:
            if len(self._starts) >= MOST_INTERVALS:
                over += self._forget(since)
            if len(self._starts) >= MOST_INTERVALS or over >= MOST_OVER:
                most = MOST_OVER if over >= MOST_OVER else MOST_INTERVALS
                raise TooFarAhead(
                    f"a device's timetable until {time:g} s takes more than {most:,} intervals; ask for an earlier time"
                )
            interval = next(self._source, None)
            if interval is None:
                return
            if forgets and interval[1] <= since and not self._starts:
                self._forgotten = interval[1]
                over += 1
            else:
                self._starts.append(interval[0])
                self._ends.append(interval[1])

    def _forget(self, since: float) -> int:
        """Forget the intervals that end by ``since``. Returns their number."""
        count = bisect.bisect_right(self._ends, since)
        if count:
            self._forgotten = self._ends[count - 1]
            del self._starts[:count], self._ends[:count]
        return count
