"""What every device knows of the fleet's stream: the arrivals, and the periods that rounds make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.flat import Indices
from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.protocol.errors import DataError

_RULES = "rules"


@dataclass(frozen=True)
class StreamPlan:
    """Period t takes the rounds ``t · rounds_per_period + 1`` to ``(t + 1) · rounds_per_period``. The last never ends.

    The samples of period t arrive from ``t · period_seconds`` of the experiment's clock on. ``budget`` is the largest
    number of samples that a device's replay buffer keeps, 0 if there is no buffer, and ``alone`` the largest number
    after a selection by the device alone; None stands for ``budget``. With ``cumulative``, devices hold everything that
    ever arrived.
    """

    arrivals: Arrivals
    rounds_per_period: int = 1
    period_seconds: float = 0.0
    cumulative: bool = False
    budget: int = 0
    alone: int | None = None

    def __len__(self) -> int:
        """The number of devices."""
        return len(self.arrivals)

    def period_of(self, round: int) -> int:
        """The period of a round. Periods count from 0, rounds from 1."""
        return min(max(round - 1, 0) // self.rounds_per_period, self.arrivals.period_count - 1)

    def begins(self, period: int) -> float:
        """The time from which the period's samples may arrive, in seconds of the experiment's clock."""
        return period * self.period_seconds

    def held(self, device: int, round: int, time: float) -> Indices:
        """X_t: the samples that a device holds of its stream, in order of arrival (a view).

        These are the samples of the round's period that have arrived by ``time``, in seconds of the experiment's
        clock. With ``cumulative``, all samples of earlier periods come before them.
        """
        period = self.period_of(round)
        reach = self.arrivals.everything if self.cumulative else self.arrivals.arrived
        return reach(device, period, time - self.begins(period))

    def sealed(self, device: int, period: int) -> Indices:
        """All samples of a period that is over. The device has not yet selected from them what it keeps (a view)."""
        return self.arrivals.arrived(device, period, np.inf)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The plan as arrays for a blob."""
        alone = self.budget if self.alone is None else self.alone
        rules = [self.rounds_per_period, self.period_seconds, self.cumulative, self.budget, alone]
        return {**self.arrivals.to_arrays(), _RULES: np.array(rules, dtype=np.float64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> StreamPlan:
        """The inverse of ``to_arrays``. Raises DataError if the arrays are no plan."""
        rules = np.asarray(arrays.get(_RULES, ()))
        if rules.dtype != np.float64 or rules.shape != (5,) or not np.isfinite(rules).all():
            raise DataError("the stream's rules are not five finite numbers")
        rounds, seconds, cumulative, budget, alone = rules.tolist()
        if rounds < 1 or seconds < 0 or not 0 <= alone <= budget or cumulative not in (0.0, 1.0):
            raise DataError(f"the stream's rules make no sense: {rules.tolist()}")
        return cls(Arrivals.from_arrays(arrays), int(rounds), seconds, bool(cumulative), int(budget), int(alone))
