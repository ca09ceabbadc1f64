"""Which samples of its stream a device holds at a given time.

A stream only names samples. The corpus has their values, and ``replay_buffer.py`` says what a device keeps of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedemu.algorithms.data.partition import Indices
from fedemu.algorithms.streams.plan import StreamPlan


@dataclass(frozen=True)
class DeviceStream:
    """One device's part of the fleet's stream, a pure function of the experiment.

    All indices point into the training split. ``arrived`` names samples of earlier periods only if the stream is
    cumulative; ``sealed`` names those of a period that is over.
    """

    plan: StreamPlan
    device: int

    @property
    def budget(self) -> int:
        """The number of samples that the device's replay buffer keeps; 0 if the device has none."""
        return self.plan.budget

    def period(self, round: int) -> int:
        """The period of a round. Periods count from 0, rounds from 1."""
        return self.plan.period_of(round)

    def arrived(self, time: float, round: int) -> Indices:
        """X_t: the samples of the round's period that have arrived by ``time``, in order of arrival (a view).

        ``time`` is in seconds of the experiment's clock.
        """
        return self.plan.held(self.device, round, time)

    def sealed(self, period: int) -> Indices:
        """All samples of a period that is over. The device selects from them and drops the rest (a view)."""
        return self.plan.sealed(self.device, period)
