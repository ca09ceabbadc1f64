"""The experiment's clock and the real one: virtual time moves by decisions, wall time by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal


class Timeline:
    """``time`` is seconds of the experiment; ``now()`` real seconds, monotonic; ``spent`` real seconds of the run.

    ``began`` and ``spent_before`` are what an earlier life of the coordinator had reached of the first and the last.
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
        return self._virtual if self._kind == "virtual" else self._began + (self.now() - self._origin)

    @property
    def spent(self) -> float:
        return self._spent_before + (self.now() - self._origin)

    def advance(self, time: float) -> None:
        """An ask ended at ``time``, or nothing can happen before it: nobody is on-line, no data are there. The virtual
        clock never goes back; wall time goes by itself."""
        self._virtual = max(self._virtual, time)
