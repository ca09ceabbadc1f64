"""The wall clock of a device: the real time of a moment of the experiment, and the times when the device is on-line."""

from __future__ import annotations

import math

from fedemu.device.behaviour.behaviour import Behaviour

DAY = 86_400.0
FOREVER = 1000 * 365 * DAY


class WallClock:
    """Translates between the experiment's clock and the monotonic clock (both in seconds), and reads the timetable.

    At ``now`` on the monotonic clock, ``elapsed`` seconds of the experiment are over.
    """

    def __init__(self, behaviour: Behaviour, elapsed: float, now: float) -> None:
        self._behaviour = behaviour
        self._offset = now - elapsed
        self._until = -math.inf

    def set(self, elapsed: float, now: float) -> None:
        """The coordinator has told the experiment's time again."""
        self._offset = now - elapsed

    def real(self, moment: float) -> float:
        """The time on the monotonic clock at a ``moment`` of the experiment, both in seconds."""
        return moment + self._offset

    def elapsed(self, now: float) -> float:
        """The time on the experiment's clock at ``now`` on the monotonic clock, both in seconds."""
        return now - self._offset

    @property
    def due(self) -> float:
        """The end, on the monotonic clock, of the on-line time that was looked up last."""
        return self.real(self._until)

    def end_of_presence(self, now: float) -> float:
        """The time on the monotonic clock at which the device goes off-line next.

        If the device is off-line at ``now``, the result is not after ``now``.
        """
        moment = self.elapsed(now)
        if self._until <= moment:
            intervals = self._behaviour.presence(moment + DAY, moment)
            self._until = next((end for start, end in intervals if start <= moment < end), -math.inf)
        return self.due

    def seconds_to_return(self, now: float) -> float:
        """Seconds until the device is on-line; infinity if it never is again."""
        moment = self.elapsed(now)
        horizon = moment + DAY
        while horizon < FOREVER:
            for start, end in self._behaviour.presence(horizon, moment):
                if end > moment:
                    return max(0.0, start - moment)
            horizon *= 4
        return math.inf
