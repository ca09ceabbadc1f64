"""Shows a run while it goes on: a live display on a terminal, plain lines elsewhere. Everything goes to stderr.

Both are observers of the coordinator. They draw what ``progress_state.py`` has gathered and decide nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedemu.coordinator.observer import Direction, RunObserver
from fedemu.coordinator.record.row import Row
from fedemu.ops.figures import span
from fedemu.ops.watching.progress import Progress
from fedemu.protocol.messages import OUTCOMES

LINE_SECONDS = 2.0
"""Plain lines come at most this often, but for the first and the last round."""
JOB_LINE_SECONDS = 10.0
"""Of a server job, without any other plain line, until one tells how far it is."""
REFRESHES_PER_SECOND = 5
BAR_WIDTH = 40
JOB_BAR_WIDTH = 20


class Display(RunObserver, Protocol):
    """A display that lives as long as the run; entering shows it, leaving restores the terminal."""

    state: Progress

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_display(state: Progress, console: Console) -> Display:
    """The display that fits where stderr goes."""
    return LiveDisplay(state, console) if console.is_terminal else PlainDisplay(state, console)


class PlainDisplay:
    """A line now and then, for logs and pipes."""

    def __init__(self, state: Progress, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = state
        self._console = console
        self._clock = clock
        self._last_line = float("-inf")
        self._enrolled = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def round_started(self, round: int, attempt: int, virtual_time: float, selected: int) -> None:
        self.state.round_started(round, attempt, virtual_time, selected)
        if attempt:
            self._print(f"round {round}: too few replies, try {attempt + 1} with other devices")

    def round_finished(self, row: Row) -> None:
        self.state.round_finished(row)
        first, last = self.state.round <= 1, self.state.round >= self.state.rounds
        if first or last or self._clock() - self._last_line >= LINE_SECONDS:
            self._last_line = self._clock()
            self._print(round_line(self.state))

    def fleet(self, counts: Mapping[str, int]) -> None:
        self.state.fleet(counts)
        enrolled = counts.get("enrolled", 0)
        if (
            not self.state.running
            and enrolled != self._enrolled
            and (enrolled >= self.state.devices or self._clock() - self._last_line >= LINE_SECONDS)
        ):
            self._enrolled = enrolled
            self._last_line = self._clock()
            self._print(f"devices {enrolled}/{self.state.devices}")

    def server_job(self, name: str, round: int, step: int, steps: int) -> None:
        self.state.server_job(name, round, step, steps)
        job, line = self.state.job, self.state.job_line
        if job and line and self._clock() - max(job.began, self._last_line) >= JOB_LINE_SECONDS:
            self._last_line = self._clock()
            self._print(line)

    def device_result(self, outcome: str) -> None:
        pass

    def rejected(self, reason: str) -> None:
        pass

    def event(self, name: str, **fields: Any) -> None:
        self.state.event(name)
        if name == "pictures_failed":
            self._print(f"task {fields['task']}: no pictures of what is generated ({fields['detail']})")

    def traffic(self, kind: str, direction: Direction, size: int) -> None:
        pass

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class LiveDisplay(PlainDisplay):
    """Redrawn in place, a few times a second, until it is left; the last picture stays."""

    def __init__(self, state: Progress, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(state, console, clock)
        self._live = Live(
            console=console,
            get_renderable=lambda: draw(self.state),
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def round_finished(self, row: Row) -> None:
        self.state.round_finished(row)

    def fleet(self, counts: Mapping[str, int]) -> None:
        self.state.fleet(counts)

    def server_job(self, name: str, round: int, step: int, steps: int) -> None:
        self.state.server_job(name, round, step, steps)


def round_line(state: Progress) -> str:
    """One round in one line."""
    outcomes = {} if state.last_row is None else state.last_row.outcomes
    parts = [f"round {state.round:>{len(str(state.rounds))}}/{state.rounds}"]
    if state.place is not None:
        parts.append(state.place)
    if state.accuracy is not None:
        parts.append(f"accuracy {state.accuracy:.4f}")
    if state.cost is not None:
        parts.append(state.cost)
    counts = [f"{count} {outcome}" for outcome, count in outcomes.items() if count]
    parts.append(", ".join(counts) or "nobody replied")
    if state.updates_per_second is not None:
        parts.append(f"{_rate(state.updates_per_second)} updates/s")
    parts.append(f"virtual {span(state.virtual_time)}")
    if state.seconds_left is not None and state.round < state.rounds:
        parts.append(f"{span(state.seconds_left)} left")
    return "  ".join(parts)


def draw(state: Progress) -> RenderableType:
    """The live picture: where the run is, how good the model is, and what the fleet does."""
    head = Table.grid(padding=(0, 2))
    left = state.seconds_left
    where = [f"round {state.round}/{state.rounds}", *([state.place] if state.place else [])]
    head.add_row(
        Text(state.name, style="bold"),
        Text("   ".join(where)) if state.running else Text("waiting for devices"),
        ProgressBar(total=state.rounds, completed=state.round, width=BAR_WIDTH)
        if state.running
        else ProgressBar(total=state.devices, completed=state.states.get("enrolled", 0), width=BAR_WIDTH),
        Text(f"{span(left)} left" if left is not None and state.round < state.rounds else span(state.elapsed)),
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    if state.accuracy is not None:
        cost = "" if state.cost is None else f"   {state.cost}"
        facts.add_row("model", Text(f"accuracy {state.accuracy:.4f}   best {state.best or 0.0:.4f}{cost}"))
    if state.states:
        facts.add_row("fleet", _counted(state.states))
    if state.outcomes.total():
        facts.add_row("updates", _counted({outcome: state.outcomes[outcome] for outcome in OUTCOMES}))
    if state.job is not None:
        bar = ProgressBar(total=state.job.steps, completed=state.job.step, width=JOB_BAR_WIDTH)
        facts.add_row("server", _side_by_side(bar, Text(state.job_line or "")))
    rate = state.updates_per_second
    if state.running:
        speed = "" if rate is None else f"   {_rate(rate)} device updates/s"
        facts.add_row("time", Text(f"virtual {span(state.virtual_time)}   real {span(state.elapsed)}{speed}"))
    return Group(head, facts)


_STYLES = {
    "online": "green",
    "busy": "cyan",
    "accepted": "green",
    "dropped": "yellow",
    "late": "yellow",
    "failed": "red",
    "rejected": "red",
}


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.1f}"


def _side_by_side(*parts: RenderableType) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_row(*parts)
    return row


def _counted(counts: Mapping[str, int]) -> Text:
    text = Text()
    for name, count in counts.items():
        if count:
            text.append(f"{count:,}", style=_STYLES.get(name, ""))
            text.append(f" {name}   ")
    return text
