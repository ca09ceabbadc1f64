"""When samples arrive within their period. Each function returns the schedule with other times."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.streams.schedule import Schedule
from fedemu.protocol.errors import ConfigurationError


def poisson(schedule: Schedule, period_seconds: float, *, generator: np.random.Generator) -> Schedule:
    """The arrivals of a Poisson process on ``[0, period_seconds)``, of which it is known how many there are.

    So they are independent uniform draws in ascending order, for each device and period. The samples' order stays.
    """
    _check_length(period_seconds)
    draws = generator.uniform(0.0, period_seconds, size=len(schedule.indices))
    return schedule.with_seconds(draws[np.lexsort((draws, schedule.periods, schedule.owners()))])


def own_times(schedule: Schedule, times: NDArray[Any], period_seconds: float, *, per_device: bool = False) -> Schedule:
    """The samples' own times, scaled such that a period's earliest is at 0 and its latest at ``period_seconds``.

    ``times [training samples]`` are numbers in any unit. The scale of a period is that of all devices, so that devices
    keep their times relative to each other, or with ``per_device`` the device's own, which fits periods that were cut
    per device. Samples arrive in the order of their times, equal ones in the order in which they were; those without a
    time (NaN, infinite) arrive last, with the latest. Where a period's times are all the same, or none is known, all is
    at 0.
    """
    _check_length(period_seconds)
    if times.dtype.kind not in "iuf":
        raise ConfigurationError(f"the times are of type {times.dtype}; times of arrival need numbers")
    own = times[schedule.indices]
    if own.dtype.kind in "iu" and len(own):
        own = own - own.min()  # which a float64 may be too small for, as for nanoseconds since 1970
    own = own.astype(np.float64)
    known = np.isfinite(own)
    group = schedule.periods + (schedule.owners() * schedule.period_count if per_device else 0)
    cells = schedule.period_count * (len(schedule) if per_device else 1)
    earliest, latest = np.full(cells, np.inf), np.full(cells, -np.inf)
    np.minimum.at(earliest, group[known], own[known])
    np.maximum.at(latest, group[known], own[known])
    since, span = own - earliest[group], (latest - earliest)[group]
    share = np.divide(np.where(known, since, span), span, out=np.zeros_like(own), where=span > 0.0)
    return schedule.with_seconds(period_seconds * share)


def _check_length(period_seconds: float) -> None:
    if not 0.0 < period_seconds < math.inf:
        raise ConfigurationError(f"a period lasts {period_seconds} seconds; its length must be positive and finite")
