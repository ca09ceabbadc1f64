"""The times of arrival within a period. Each function returns the same arrivals at other times."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.protocol.errors import ConfigurationError


def poisson(arrivals: Arrivals, period_seconds: float, *, generator: np.random.Generator) -> Arrivals:
    """Samples arrive as in a Poisson process on ``[0, period_seconds)``, given the number of arrivals.

    Under this condition the times are independent uniform draws, sorted for each device and period. The order of the
    samples stays the same.
    """
    _check_length(period_seconds)
    draws = generator.uniform(0.0, period_seconds, size=len(arrivals.indices))
    return arrivals.with_seconds(draws[np.lexsort((draws, arrivals.periods, arrivals.owners()))])


def own_times(arrivals: Arrivals, times: NDArray[Any], period_seconds: float, *, per_device: bool = False) -> Arrivals:
    """Samples arrive at their own times, scaled so that a period's first is at 0 and its last at ``period_seconds``.

    ``times [training samples]`` are numbers in any unit. By default a period has one scale for all devices, so that
    devices keep their times relative to each other. With ``per_device`` each device has its own scale, which fits
    periods that were cut per device. Samples arrive in the order of their times, equal times in the order in which the
    samples were. Samples without a time (NaN, infinite) arrive last, together with the latest. If all times of a
    period are equal, or none is known, all of its samples arrive at 0.
    """
    _check_length(period_seconds)
    if times.dtype.kind not in "iuf":
        raise ConfigurationError(f"the times are of type {times.dtype}; times of arrival need numbers")
    own = times[arrivals.indices]
    if own.dtype.kind in "iu" and len(own):
        # A float64 cannot hold all large numbers exactly, such as nanoseconds since 1970. uint64 holds all differences.
        own = own.astype(np.uint64) - own.min().astype(np.uint64)
    own = own.astype(np.float64)
    known = np.isfinite(own)
    group = arrivals.periods + (arrivals.owners() * arrivals.period_count if per_device else 0)
    cells = arrivals.period_count * (len(arrivals) if per_device else 1)
    earliest, latest = np.full(cells, np.inf), np.full(cells, -np.inf)
    np.minimum.at(earliest, group[known], own[known])
    np.maximum.at(latest, group[known], own[known])
    since, span = own - earliest[group], (latest - earliest)[group]
    share = np.divide(np.where(known, since, span), span, out=np.zeros_like(own), where=span > 0.0)
    return arrivals.with_seconds(period_seconds * share)


def _check_length(period_seconds: float) -> None:
    if not 0.0 < period_seconds < math.inf:
        raise ConfigurationError(f"a period lasts {period_seconds} seconds; its length must be positive and finite")
