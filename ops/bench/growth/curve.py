"""A curve: what a round costs at several sizes, and how fast that grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

WANTED: Final = 1.1
"""The largest slope that is wanted: cost may grow a little faster than what it is measured against."""


@dataclass(frozen=True)
class Point:
    """The cost of a round at one size, in seconds."""

    size: int
    wall: float
    cpu: float


@dataclass(frozen=True)
class Curve:
    """The cost of a round against one quantity."""

    title: str
    labels: tuple[str, ...]
    points: tuple[Point, ...]

    @property
    def slope(self) -> float:
        """The slope of a line through the CPU seconds of all points, both axes logarithmic."""
        return _slope(self.points)

    @property
    def last_slope(self) -> float:
        """The slope between the last two points, where what grows costs more than what does not."""
        return _slope(self.points[-2:])

    @property
    def met(self) -> bool:
        """Whether both slopes are as small as wanted."""
        return max(self.slope, self.last_slope) <= WANTED


def _slope(points: Sequence[Point]) -> float:
    """The slope of the CPU seconds over the sizes, both logarithmic, by least squares."""
    return float(
        np.polyfit([math.log(each.size) for each in points], [math.log(max(each.cpu, 1e-9)) for each in points], 1)[0]
    )
