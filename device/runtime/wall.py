"""The wall clock of a device: when, in real time, the experiment's moments are, and when its presence changes."""

from __future__ import annotations

import math

from fedemu.device.behaviour.behaviour import Behaviour

DAY = 86_400.0
FOREVER = 1000 * 365 * DAY


class WallClock:
    """Translates between the experiment's seconds and the monotonic clock, and reads the device's timetable."""

    def __init__(self, behaviour: Behaviour, elapsed: float, now: float) -> None:
        self._behaviour = behaviour
        self._offset = now - elapsed
        self._until = -math.inf

    def set(self, elapsed: float, now: float) -> None:
        """The coordinator told the time again."""
        self._offset = now - elapsed

    def real(self, moment: float) -> float:
        """When a moment of the experiment is, on the monotonic clock."""
        return moment + self._offset

    def elapsed(self, now: float) -> float:
        """The experiment's time."""
        return now - self._offset

    @property
    def due(self) -> float:
        """When the presence that was looked up last ends, on the monotonic clock."""
        return self.real(self._until)

    def end_of_presence(self, now: float) -> float:
        """When the device goes off-line next, on the monotonic clock; not after ``now`` if it is off-line."""
        moment = self.elapsed(now)
        if self._until <= moment:
            intervals = self._behaviour.presence(moment + DAY)
            self._until = next((end for start, end in intervals if start <= moment < end), -math.inf)
        return self.due

    def seconds_to_return(self, now: float) -> float:
        """How long until the device is on-line again; infinite if it never is."""
        moment = self.elapsed(now)
        horizon = moment + DAY
        while horizon < FOREVER:
            for start, end in self._behaviour.presence(horizon):
                if end > moment:
                    return max(0.0, start - moment)
            horizon *= 4
        return math.inf
