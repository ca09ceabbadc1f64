"""Whether a quantity that was sampled over time grows: its slope by a robust regression, with an interval around it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

BINS = 48
"""Samples are summed up into at most this many medians. Neighbouring samples depend on each other, and these less."""
_QUANTILE = 1.96
"""The quantile of the normal distribution for an interval of 95 %."""


@dataclass(frozen=True)
class Slope:
    """A slope by Theil and Sen: the median of the slopes of all pairs of points, and its interval of 95 %.

    All three are per unit of the times. ``middle`` is the median of the values.
    """

    slope: float
    low: float
    high: float
    middle: float

    @property
    def flat(self) -> bool:
        """Whether the slope may be zero."""
        return self.low <= 0.0 <= self.high

    def exceeds(self, limit: float) -> bool:
        """Whether the slope is above the limit, with its whole interval."""
        return self.low > limit


def slope_of(times: ArrayLike, values: ArrayLike) -> Slope:
    """The slope of values over ascending times. With fewer than four points nothing is known: low is minus infinity."""
    x, y = binned(np.asarray(times, np.float64), np.asarray(values, np.float64))
    if len(x) < 4:
        return unknown(y)
    first, second = np.triu_indices(len(x), 1)
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    # Sen (1968): the interval follows from the variance of Kendall's S.
    n, pairs = len(x), len(slopes)
    half = _QUANTILE * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low, high = round((pairs - half) / 2) - 1, round((pairs + half) / 2)
    lowest, highest = float(slopes[max(low, 0)]), float(slopes[min(high, pairs - 1)])
    return Slope(float(np.median(slopes)), lowest, highest, float(np.median(y)))


def unknown(values: ArrayLike) -> Slope:
    """The slope of values that are too few, or lie too near together, to tell one: its interval has no bounds."""
    y = np.asarray(values, np.float64)
    return Slope(0.0, -math.inf, math.inf, float(np.median(y)) if len(y) else math.nan)


def binned(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The medians of at most ``BINS`` successive groups of samples."""
    groups = np.array_split(np.arange(len(x)), min(BINS, len(x))) if len(x) else []
    return (
        np.array([np.median(x[group]) for group in groups]),
        np.array([np.median(y[group]) for group in groups]),
    )
