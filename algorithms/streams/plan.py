"""What every device is told of the fleet's stream: who receives which sample when, and how rounds make periods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.partition import Indices
from fedemu.algorithms.streams.schedule import Schedule
from fedemu.protocol.errors import DataError

_RULES = "rules"


@dataclass(frozen=True)
class StreamPlan:
    """Period t takes the rounds ``t · rounds_per_period + 1`` to ``(t + 1) · rounds_per_period``; the last goes on.

    Its samples arrive from ``t · period_seconds`` of the experiment's clock on. ``budget`` is how many samples a
    device's replay buffer keeps, 0 where there is none. With ``cumulative``, devices hold all that ever arrived.
    """

    schedule: Schedule
    rounds_per_period: int = 1
    period_seconds: float = 0.0
    cumulative: bool = False
    budget: int = 0

    def __len__(self) -> int:
        """The number of devices."""
        return len(self.schedule)

    def period_of(self, round: int) -> int:
        """The period, from 0, of a round, which counts from 1."""
        return min(max(round - 1, 0) // self.rounds_per_period, self.schedule.period_count - 1)

    def begins(self, period: int) -> float:
        """When the period's first samples may arrive, in seconds of the experiment."""
        return period * self.period_seconds

    def held(self, device: int, round: int, time: float) -> Indices:
        """X_t: what a device holds of its stream in a round, at a time of the experiment, in order of arrival (a view).

        That is what has arrived of the round's period. Of earlier periods there is nothing, unless ``cumulative``.
        """
        period = self.period_of(round)
        seconds = time - self.begins(period)
        reach = self.schedule.everything if self.cumulative else self.schedule.arrived
        return reach(device, period, seconds)

    def arrivals(self, device: int) -> Iterator[tuple[float, Indices]]:
        """A device's stream: what arrives together, and when, in seconds of the experiment; in order of time."""
        first, stop = self.schedule.offsets[device], self.schedule.offsets[device + 1]
        periods = self.schedule.periods[first:stop]
        times = periods * self.period_seconds + self.schedule.seconds[first:stop]
        ends = np.flatnonzero((np.diff(times) != 0) | (np.diff(periods) != 0)) + 1
        for part in np.split(np.arange(first, stop), ends):
            if len(part):
                yield float(times[part[0] - first]), self.schedule.indices[part]

    def sealed(self, device: int, period: int) -> Indices:
        """All that arrived in a period that is over, for a device that has yet to select from it (a view)."""
        return self.schedule.arrived(device, period, np.inf)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        rules = [self.rounds_per_period, self.period_seconds, self.cumulative, self.budget]
        return {**self.schedule.to_arrays(), _RULES: np.array(rules, dtype=np.float64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> StreamPlan:
        """The inverse of ``to_arrays``; raises DataError on anything that is no plan."""
        rules = np.asarray(arrays.get(_RULES, ()))
        if rules.dtype != np.float64 or rules.shape != (4,) or not np.isfinite(rules).all():
            raise DataError("the stream's rules are not four finite numbers")
        rounds, seconds, cumulative, budget = rules.tolist()
        if rounds < 1 or seconds < 0 or budget < 0 or cumulative not in (0.0, 1.0):
            raise DataError(f"the stream's rules make no sense: {rules.tolist()}")
        return cls(Schedule.from_arrays(arrays), int(rounds), seconds, bool(cumulative), int(budget))
