"""The progress of a run, gathered from what the coordinator tells. ``display.py`` shows it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedemu.coordinator.observer import Absence, Observers
from fedemu.coordinator.record.row import Row, updates_per_second
from fedemu.ops.figures import decimal, span
from fedemu.protocol.wording import counted

WINDOW = 10
"""The number of last rounds whose pace tells the time that is left."""


@dataclass
class JobProgress:
    """A server job that runs since ``began``, by the clock of the progress. ``step`` of at most ``steps`` are done."""

    name: str
    round: int
    steps: int
    began: float
    step: int = 0

    def __post_init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._told = self.began

    def stepped(self, step: int, now: float) -> None:
        """The job has done ``step`` steps at ``now``."""
        self.step, self._told = step, now
        if self._first is None and step:
            self._first = now, step

    @property
    def share(self) -> float:
        """The share of the steps that is done."""
        return self.step / self.steps if self.steps else 1.0

    def seconds_left(self, now: float) -> float | None:
        """The real seconds that are left, at the pace since the first step that this process was told.

        An earlier process may have reached that step, so it need not be step 1. None if the pace is not known yet,
        or if the job takes longer than the pace promised.
        """
        if self._first is None:
            return None
        began, first = self._first
        if self.step == first:
            return None
        pace = (self._told - began) / (self.step - first)
        left = pace * (self.steps - self.step) - (now - self._told)
        return left if left >= 0 else None


@dataclass
class Progress(Observers):
    """How far a run is, by what it is told as an observer.

    ``clock`` gives real seconds, monotonic. ``virtual`` says whether the experiment has a clock of its own.
    """

    name: str
    rounds: int
    devices: int
    clock: Callable[[], float]
    round: int = 0
    running: bool = False
    accuracy: float | None = None
    best: float | None = None
    loss: float | None = None
    perplexity: float | None = None
    """The last known perplexity, None unless the data are language."""
    period: int = 0
    periods: int = 1
    """The number of periods of the stream, 1 until an evaluated row tells more."""
    virtual_time: float = 0.0
    job: JobProgress | None = None
    states: dict[str, int] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    last_row: Row | None = None
    resumed_at: int | None = None
    """The first round of this part of the run. None for a run that has begun with its first round."""
    round_seconds: float = 0.0
    """The real time of all finished rounds, those before a resume included."""
    virtual: bool = True
    bring: str = ""
    """The command that brings devices, empty if somebody else starts them."""

    def __post_init__(self) -> None:
        super().__init__()
        self.began = self.clock()
        self._spent_before = 0.0
        self._finished: deque[float] = deque(maxlen=WINDOW + 1)
        self._absence: tuple[Absence, float] | None = None

    def begin(self) -> None:
        """The wait for the fleet begins now."""
        self.began = self.clock()

    def resumed(self, rows: Sequence[Row], spent: float) -> None:
        for row in rows:
            self._count(row)
        self.resumed_at = self.round + 1
        self._spent_before = spent

    def waiting(self, absence: Absence | None) -> None:
        self._absence = None if absence is None else (absence, self.clock())

    def round_started(self, round: int, attempt: int, virtual_time: float, selected: int) -> None:
        self.running = True
        self.virtual_time = virtual_time

    def server_job(self, name: str, round: int, step: int, steps: int) -> None:
        self.running = True
        if self.job is None or (self.job.name, self.job.round) != (name, round) or step < self.job.step:
            self.job = JobProgress(name, round, steps, self.clock())
        self.job.stepped(step, self.clock())

    def event(self, name: str, **fields: Any) -> None:
        if name == "server_job":  # the job has ended
            self.job = None

    def round_finished(self, row: Row) -> None:
        self._count(row)
        self._absence = None
        self._finished.append(self.clock())

    def _count(self, row: Row) -> None:
        self.round = row.round
        # The next round may have begun.
        self.virtual_time = max(self.virtual_time, row.virtual_time or 0.0)
        if row.accuracy is not None:  # otherwise it was not evaluated
            self.accuracy, self.loss, self.perplexity = row.accuracy, row.loss, row.perplexity
            self.best = max(self.best or 0.0, row.accuracy)
        self.period = row.task or 0
        self.periods = max(self.periods, len(row.period_accuracy or ()))
        self.outcomes.update(row.outcomes)
        self.round_seconds += row.round_seconds or 0.0
        self.last_row = row

    def fleet(self, counts: Mapping[str, int]) -> None:
        self.states = dict(counts)

    @property
    def place(self) -> str | None:
        """The last round's period, in words. None if there is only one."""
        return f"period {self.period + 1}/{self.periods}" if self.periods > 1 else None

    @property
    def cost(self) -> str | None:
        """The last known loss in words, as perplexity if the data are language. None if it is not known."""
        if self.perplexity is not None:
            return f"perplexity {decimal(self.perplexity, 2)}"
        return None if self.loss is None else f"loss {decimal(self.loss, 4)}"

    @property
    def elapsed(self) -> float:
        """The real seconds since the run began to wait for the fleet, those before a resume included."""
        return self._spent_before + self.clock() - self.began

    @property
    def updates_per_second(self) -> float | None:
        """The device updates that were accepted per real second of rounds, over the whole run so far."""
        return updates_per_second(self.outcomes["accepted"], self.round_seconds)

    @property
    def absence(self) -> str | None:
        """The devices that the coordinator lacks and how long it waits for them, in words. None if it lacks none."""
        if self._absence is None:
            return None
        absence, told = self._absence
        who = (
            f"{counted(absence.devices, 'device')} without a connection"
            if absence.connected
            else "no device is connected"
        )
        if absence.away:
            who += f" (away: {absence.away})"
        bring = f"; to bring devices: {self.bring}" if self.bring and not absence.connected else ""
        if absence.seconds is None:
            return who + bring
        left = max(0.0, absence.seconds - (self.clock() - told))
        return f"{who}; {span(left) if left >= 60 else f'{left:.0f} s'} until {absence.then}{bring}"

    @property
    def seconds_left(self) -> float | None:
        """The real seconds that are left, at the pace of the last rounds.

        None if there are too few rounds, if devices are away for which the run waits, or if this round already takes
        longer than all that was left, as with a long server job.
        """
        if len(self._finished) < 2 or self._absence is not None:
            return None
        start, end = self._finished[0], self._finished[-1]
        pace = (end - start) / (len(self._finished) - 1)
        left = pace * (self.rounds - self.round) - (self.clock() - end)
        return left if left >= 0 else None

    @property
    def job_line(self) -> str | None:
        """The server job that runs and how far it is, in words. None if none runs."""
        if self.job is None:
            return None
        left = self.job.seconds_left(self.clock())
        words = f"round {self.job.round} · {self.job.name} {self.job.share:.0%}"
        return words if left is None else f"{words}  {span(left)} left"
