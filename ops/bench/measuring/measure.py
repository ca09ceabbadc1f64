"""Measuring in pairs: ours, floor, floor, ours, and so on, so that other load of the machine affects both alike.

A ratio is taken pair by pair, and its median is reported with the extremes. Wall time and CPU time are kept apart,
because on a busy machine only CPU time means much.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Tell = Callable[[str], None]
"""A function that shows a line of progress to people."""


@dataclass(frozen=True)
class Sample:
    """One measured run: ``work`` units in ``wall`` seconds of real time, and ``cpu`` seconds of all processes."""

    work: float
    wall: float
    cpu: float


def timed(work: Callable[[], float]) -> Callable[[], Sample]:
    """A measurement of ``work``, which this process does alone. ``work`` returns how much it has done."""

    def measure() -> Sample:
        cpu, wall = time.process_time(), time.perf_counter()
        done = work()
        return Sample(done, time.perf_counter() - wall, time.process_time() - cpu)

    return measure


Pair = tuple[Sample, Sample]
"""Ours and the floor, measured one after the other."""


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    One sample does ``scale`` times its usual work. A figure gets ``pairs`` pairs, and no new one after ``seconds`` of
    real time. With ``large`` the fleets of 1,000 devices are measured too.
    """

    pairs: int = 5
    scale: float = 1.0
    seconds: float = 25.0
    large: bool = False

    def count(self, whole: int, multiple: int = 1) -> int:
        """``whole`` at this scale, rounded to a multiple of ``multiple`` that is not 0."""
        return max(1, round(whole * self.scale / multiple)) * multiple


QUICK = Effort(pairs=2, scale=0.1, seconds=8.0)
"""This is enough to see that everything works, and too little to trust the figures."""


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements, and their extremes."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of some values, at least one."""
        known = list(values)
        return cls(statistics.median(known), min(known), max(known))


@dataclass(frozen=True)
class Figure:
    """A measured figure, in ``unit``. ``ratio`` is ours over the floor by wall time, ``cpu_ratio`` that by CPU time.

    ``reach`` is the least ratio that is wanted, ``limit`` the greatest value of ours that is wanted.
    """

    subject: str
    name: str
    unit: str
    ours: Spread
    floor: Spread | None = None
    ratio: Spread | None = None
    cpu_ratio: Spread | None = None
    reach: float | None = None
    limit: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the figure is as good as wanted. None if nothing is wanted of it."""
        if self.limit is not None:
            return self.ours.median <= self.limit
        if self.reach is not None and self.ratio is not None:
            return self.ratio.median >= self.reach
        return None

    def table(self) -> dict[str, Any]:
        """The figure for JSON."""
        return asdict(self) | {"met": self.met}


def paired(ours: Callable[[], Sample], floor: Callable[[], Sample], effort: Effort) -> list[Pair]:
    """Run both once without measuring, then measure in turns: two pairs at least, even if they take too long."""
    ours(), floor()
    return list(_pairs(ours, floor, effort))


def _pairs(ours: Callable[[], Sample], floor: Callable[[], Sample], effort: Effort) -> Iterator[Pair]:
    end = time.monotonic() + effort.seconds
    for number in range(effort.pairs):
        if number >= 2 and time.monotonic() > end:
            return
        if number % 2:
            second = floor()
            yield ours(), second
        else:
            yield ours(), floor()


def rate(subject: str, name: str, unit: str, pairs: Sequence[Pair], reach: float | None = None) -> Figure:
    """A figure of work per second. A ratio above 1 means that ours is faster than the floor."""
    return Figure(
        subject,
        name,
        unit,
        ours=Spread.of(ours.work / ours.wall for ours, _ in pairs),
        floor=Spread.of(floor.work / floor.wall for _, floor in pairs),
        ratio=Spread.of((ours.work / ours.wall) / (floor.work / floor.wall) for ours, floor in pairs),
        cpu_ratio=Spread.of((ours.work / ours.cpu) / (floor.work / floor.cpu) for ours, floor in pairs),
        reach=reach,
    )


def cost(
    subject: str,
    name: str,
    unit: str,
    ours: Sequence[float],
    floor: Sequence[float] = (),
    limit: float | None = None,
) -> Figure:
    """A figure that should be small. A ratio of 2 means twice the floor. ``ours[i]`` and ``floor[i]`` are a pair."""
    return Figure(
        subject,
        name,
        unit,
        ours=Spread.of(ours),
        floor=Spread.of(floor) if floor else None,
        ratio=Spread.of(mine / least for mine, least in zip(ours, floor, strict=False)) if floor else None,
        limit=limit,
    )
