"""The experiment's clock and the real clock. Virtual time moves by decisions, wall time by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal


class Timeline:
    """The times of one run, in seconds.

    ``time`` is the experiment's time, ``now()`` the real time of a monotonic clock, ``spent`` the real time that the
    run has taken. An earlier life of the coordinator had reached ``began`` of ``time`` and ``spent_before`` of
    ``spent``.
    """

    def __init__(
        self,
        kind: Literal["virtual", "wall"],
        began: float = 0.0,
        spent_before: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now = clock
        self._kind = kind
        self._origin = clock()
        self._began = began
        self._spent_before = spent_before
        self._virtual = began

    @property
    def time(self) -> float:
        """Seconds of the experiment."""
        return self._virtual if self._kind == "virtual" else self._began + (self.now() - self._origin)

    @property
    def spent(self) -> float:
        """Real seconds that the run has taken, those before a resume included."""
        return self._spent_before + (self.now() - self._origin)

    def advance(self, time: float) -> None:
        """Move the virtual clock forward to ``time``. It never goes back. Wall time moves by itself.

        This is called when an ask has ended at ``time``, or when nothing can happen before it because nobody is on-line
        or no data have arrived.
        """
        self._virtual = max(self._virtual, time)
