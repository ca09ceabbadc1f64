"""The metric ``fedemu_run_state``: whether a run goes on, may end soon, or how it ended.

A monitor sees a coordinator only at its scrapes. When the coordinator is gone, the state that it told last says whether
the run was over or whether the coordinator crashed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import fmean
from typing import Literal

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedemu.coordinator.record.summary import RunOutcome

State = Literal["starting", "running", "ending", RunOutcome]
STATES: tuple[State, ...] = (
    "starting",
    "running",
    "ending",
    "completed",
    "diverged",
    "quorum",
    "interrupted",
    "failed",
)
SCRAPES = 5
"""The number of last scrapes between which the longest gap counts."""
ROUNDS = 10
"""The number of last rounds whose mean length tells when the run will end."""
GAPS = 2
"""A run is ``running`` if the scrapes of this many gaps will still find it there."""


class RunState(Collector):
    """Tells the state of a run, one sample for each of ``STATES``: 1 for the current one, 0 for the others.

    Every collection counts as a scrape, at the time of ``clock`` (seconds, monotonic). A run is ``starting`` until its
    rounds have gone on for ``GAPS`` gaps between scrapes. It is ``ending`` if it may be over within ``GAPS`` gaps, and
    in the second half of its last round, or in all of it if it is the first one since the start. So if a run ends
    between two scrapes, it was not ``running`` at the last one.
    """

    def __init__(self, rounds: int, clock: Callable[[], float]) -> None:
        self._rounds = rounds
        self._clock = clock
        self._scrapes: deque[float] = deque(maxlen=SCRAPES)
        self._finished: deque[float] = deque(maxlen=ROUNDS + 1)
        self._began: float | None = None
        self._left = rounds
        self._ended: RunOutcome | None = None

    def began(self) -> None:
        """Something of a round has begun. Only the first call counts."""
        if self._began is None:
            self._began = self._clock()
            self._finished.append(self._began)

    def resumed(self, round: int) -> None:
        """The run goes on after round ``round``, counted from 1."""
        self._left = self._rounds - round

    def finished(self, round: int) -> None:
        """Round ``round``, counted from 1, is over."""
        self.began()
        self._finished.append(self._clock())
        self._left = self._rounds - round

    def ended(self, outcome: RunOutcome) -> None:
        """The run is over."""
        self._ended = outcome

    def state(self) -> State:
        """The state now, for the scrapes so far."""
        if self._ended is not None:
            return self._ended
        # Copies, because every monitor scrapes in a thread of its own, and rounds end in another one.
        scrapes, finished = [*self._scrapes], [*self._finished]
        gaps = [after - before for before, after in pairwise(scrapes)]
        now = self._clock()
        if self._began is None or not gaps or now - self._began < GAPS * max(gaps):
            return "starting"
        if len(finished) < 2:
            # The first round since the start goes on. If others follow, they will take at least as long.
            return "running" if self._left > 1 else "ending"
        pace = fmean(after - before for before, after in pairwise(finished))
        # However long the present round takes, the rounds after it are still to come.
        left = max(pace * self._left - (now - finished[-1]), pace * (self._left - 1))
        # The last round may be shorter than the others.
        return "running" if left >= max(GAPS * max(gaps), pace / 2) else "ending"

    def describe(self) -> Iterable[Metric]:
        """The metric without samples. A registry asks for it once, and that is no scrape."""
        return [self._family()]

    def collect(self) -> Iterable[Metric]:
        """The metric with its samples, as a scrape gets it."""
        self._scrapes.append(self._clock())
        current = self.state()
        family = self._family()
        for state in STATES:
            family.add_metric([state], float(state == current))
        return [family]

    def _family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily("fedemu_run_state", "1 for the state the run is in, else 0.", labels=["state"])
