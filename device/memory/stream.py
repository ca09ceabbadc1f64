"""Which samples of its stream a device holds at a given time.

A stream only names samples. The corpus has their values, and ``replay_buffer.py`` says what a device keeps of them.
"""

from __future__ import annotations

import math

from fedemu.algorithms.data.flat import Indices
from fedemu.algorithms.streams.plan import StreamPlan


class DeviceStream:
    """One device's part of the fleet's stream, a pure function of the experiment.

    All indices point into the training split. ``arrived`` names samples of earlier periods only if the stream is
    cumulative; ``sealed`` names those of a period that is over.
    """

    def __init__(self, plan: StreamPlan, device: int) -> None:
        self.plan = plan
        self.device = device
        self._period = -1
        """The period of which ``_whole`` has all samples. The last one comes ``_complete`` seconds after it begins."""
        self._whole: Indices
        self._complete = math.inf

    @property
    def budget(self) -> int:
        """The largest number of samples that the device's replay buffer keeps; 0 if the device has none."""
        return self.plan.budget

    @property
    def alone(self) -> int:
        """The number of samples that the buffer keeps after a selection by the device alone."""
        return self.budget if self.plan.alone is None else self.plan.alone

    def period(self, round: int) -> int:
        """The period of a round. Periods count from 0, rounds from 1."""
        return self.plan.period_of(round)

    def arrived(self, time: float, round: int) -> Indices:
        """X_t: the samples of the round's period that have arrived by ``time``, in order of arrival (a view).

        ``time`` is in seconds of the experiment's clock.
        """
        period = self.period(round)
        if period != self._period:
            self._period, self._whole = period, self.plan.held(self.device, round, math.inf)
            self._complete = self.plan.arrivals.complete(self.device, period)
        if time - self.plan.begins(period) >= self._complete:
            return self._whole
        return self.plan.held(self.device, round, time)

    def sealed(self, period: int) -> Indices:
        """All samples of a period that is over. The device selects from them and drops the rest (a view)."""
        return self.plan.sealed(self.device, period)
