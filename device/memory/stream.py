"""Which samples a device holds at a given time, as far as its stream goes.

A stream only names samples; where they lie, and what a replay buffer keeps of them, is told elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedemu.algorithms.data.partition import Indices
from fedemu.algorithms.streams.plan import StreamPlan


@dataclass(frozen=True)
class DeviceStream:
    """One device's part of the fleet's stream, a pure function of the experiment; indices are of the training split.

    Of periods that are over it names nothing, but what is sealed, or where the stream is cumulative.
    """

    plan: StreamPlan
    device: int

    @property
    def budget(self) -> int:
        """How many samples the device's replay buffer keeps; 0 where there is none."""
        return self.plan.budget

    def period(self, round: int) -> int:
        """The period, from 0, of a round, which counts from 1."""
        return self.plan.period_of(round)

    def arrived(self, time: float, round: int) -> Indices:
        """X_t: what of the round's period has arrived by ``time``, seconds of the experiment, in its order (a view)."""
        return self.plan.held(self.device, round, time)

    def sealed(self, period: int) -> Indices:
        """All that arrived in a period that is over, to be selected from and then dropped (a view)."""
        return self.plan.sealed(self.device, period)
