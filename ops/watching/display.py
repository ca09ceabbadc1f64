"""The display of a run while it goes on: a live picture on a terminal, plain lines elsewhere, always on stderr.

Both are observers of the coordinator. They show what ``progress.py`` has gathered and decide nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedemu.coordinator.observer import Absence, Observers
from fedemu.coordinator.record.row import Row
from fedemu.ops.figures import per_second, percent, span
from fedemu.ops.terminal import can_redraw
from fedemu.ops.watching.progress import Progress
from fedemu.protocol.messages import OUTCOMES
from fedemu.protocol.wording import counted, is_milestone

LINE_SECONDS = 2.0
"""The least time between two plain lines. The lines of the first and the last round always come."""
JOB_LINE_SECONDS = 10.0
"""A plain line tells how far a server job is after this time without any other line."""
ABSENCE_LINE_SECONDS = 10.0
"""The time between two plain lines that tell of devices that are away."""
MOST_FAILURES = 5
"""The number of different reasons of failed devices that are told. The log has all of them."""
_OF_VERSIONS = ("version", "type", "field")
"""The reasons for which messages of another version of fedemu are refused."""
REFRESHES_PER_SECOND = 5
BAR_WIDTH = 40
JOB_BAR_WIDTH = 20


def console_of_stderr() -> Console:
    """The console on which people see a run. A file is no terminal, whatever ``FORCE_COLOR`` says: nothing is redrawn.

    Jobs of continuous integration set this variable so that their logs have colours.
    """
    forced = None if can_redraw(sys.stderr) else False
    return Console(stderr=True, force_terminal=forced, force_interactive=forced)


def open_display(progress: Progress, console: Console) -> Display:
    """The display that suits the console: live on a terminal that can redraw it, plain elsewhere."""
    return LiveDisplay(progress, console) if console.is_interactive else PlainDisplay(progress, console)


class Display(Observers):
    """A display that lives as long as the run. Entering shows it, leaving restores the terminal.

    What it is told goes on to ``progress``. Of that it tells by lines what people have to know at once.
    """

    def __init__(self, progress: Progress, console: Console) -> None:
        super().__init__([progress])
        self.progress = progress
        self._console = console
        self._failures: set[str] = set()
        self._given_up: str | None = None

    def __enter__(self) -> Self:
        """The wait for the fleet begins now. Tell people if the run goes on where an earlier part ended."""
        progress = self.progress
        progress.begin()
        if progress.resumed_at is not None:
            before = f"{counted(progress.round, 'round')} in {span(progress.elapsed)}"
            self._print(f"resumed at round {progress.resumed_at} of {progress.rounds}, after {before}")
        return self

    def __exit__(self, *raised: object) -> None: ...

    def round_started(self, round: int, attempt: int, virtual_time: float, selected: int) -> None:
        super().round_started(round, attempt, virtual_time, selected)
        if attempt:
            self._print(f"round {round}: too few replies, try {attempt + 1} with devices drawn anew")

    def event(self, name: str, **fields: Any) -> None:
        super().event(name, **fields)
        if name == "failure":
            self._tell_failure(fields["device"], fields["detail"] or fields["reason"])
        if name == "pictures_failed":
            self._print(f"task {fields['task'] + 1}: no pictures of what is generated ({fields['detail']})")
        if name in ("damage", "arithmetic"):
            self._print(f"{fields['detail']}; the run goes on after round {fields['round']}")
        if name == "server_job_died":
            self._print(f"round {fields['round']}: the process of {fields['job']} ended by {fields['cause']}")
        if name == "given_up":
            self._tell_given_up(**fields)
        if name == "unable":
            self._print(f"the machine {fields['host']} has left: {fields['detail']}")
        if name == "refusal" and fields["reason"] in _OF_VERSIONS and is_milestone(fields["count"]):
            self._tell_unread(**fields)
        if name == "kept_outside":
            self._print(
                f"round {fields['round']}: the method has changed {fields['what']!r}, which is no part of its state; a "
                "run that is resumed would go on without the change, and perhaps to another model"
            )
        if name == "state_changed":
            self._print(
                f"round {fields['round']}: the method has changed its state in place ({fields['what']}); a round that "
                "is tried again would begin with the change, so make a new tensor or collection instead"
            )
        if name == "fleet_incomplete":
            self._print(f"{counted(fields['missing'], 'device')} did not come; the run goes on without them")
        if name == "own_states_lost":
            self._print(f"{counted(fields['devices'], 'device')} lost their own states and begin anew")

    def _tell_failure(self, device: int, reason: str) -> None:
        """Say why a device failed, once for each of the first few reasons."""
        sentence = reason.splitlines()[0]
        if sentence not in self._failures and len(self._failures) < MOST_FAILURES:
            self._failures.add(sentence)
            self._print(f"device {device} failed: {sentence}")

    def _tell_unread(self, reason: str, count: int) -> None:
        """Say that messages cannot be read. Nothing that a stranger has written is shown."""
        what = "a message that came" if count == 1 else f"{count:,} messages that came"
        self._print(
            f"{what} cannot be read here ({reason}); if a machine does not join, install the same version of fedemu "
            "there, which fedemu --version tells"
        )

    def _tell_given_up(self, device: int, lacked: str, waited: float, limit: str, among: int, ask: str = "") -> None:
        """Say for what devices were waited, once for each ask."""
        if ask != self._given_up:
            self._given_up = ask
            round = f"round {ask.partition('.')[0]}: " if ask else ""
            # Others may have been waited for in other ways. The events tell of each.
            others = "" if among == 1 else f", as {counted(among - 1, 'other device')} that had to be given up"
            then = "failed" if ask else "lost"
            self._print(f"{round}device {device} {lacked} for {span(waited)} ({limit}) and counts as {then}{others}")

    def _print(self, line: str) -> None:
        # A line may quote what came over the network, and a terminal obeys control characters.
        shown = "".join(sign if sign.isprintable() else " " for sign in line)
        self._console.print(shown, highlight=False, markup=False, soft_wrap=True)


class PlainDisplay(Display):
    """Writes a line now and then, for logs and pipes."""

    def __init__(self, progress: Progress, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(progress, console)
        self._clock = clock
        self._last_line = float("-inf")
        self._enrolled = -1
        self._absence_told: float | None = None

    def waiting(self, absence: Absence | None) -> None:
        super().waiting(absence)
        line, told = self.progress.absence, self._absence_told
        if line is None:
            self._absence_told = None
            connected = self.progress.states.get("connected", 0)
            if told is not None and connected:
                self._print(f"{counted(connected, 'device')} connected now")
        elif told is None or self._clock() - told >= ABSENCE_LINE_SECONDS:
            self._absence_told = self._last_line = self._clock()
            self._print(line)

    def round_finished(self, row: Row) -> None:
        super().round_finished(row)
        first = self.progress.round == (self.progress.resumed_at or 1)
        last = self.progress.round >= self.progress.rounds
        if first or last or self._clock() - self._last_line >= LINE_SECONDS:
            self._last_line = self._clock()
            self._print(round_line(self.progress))

    def fleet(self, counts: Mapping[str, int]) -> None:
        super().fleet(counts)
        enrolled = counts.get("enrolled", 0)
        if (
            not self.progress.running
            and enrolled != self._enrolled
            and (enrolled >= self.progress.devices or self._clock() - self._last_line >= LINE_SECONDS)
        ):
            self._enrolled = enrolled
            self._last_line = self._clock()
            self._print(f"devices enrolled {enrolled}/{self.progress.devices}")

    def server_job(self, name: str, round: int, step: int, steps: int) -> None:
        super().server_job(name, round, step, steps)
        job, line = self.progress.job, self.progress.job_line
        if job and line and self._clock() - max(job.began, self._last_line) >= JOB_LINE_SECONDS:
            self._last_line = self._clock()
            self._print(line)


class LiveDisplay(Display):
    """Draws a picture in place, a few times a second. The last picture stays."""

    def __init__(self, progress: Progress, console: Console) -> None:
        super().__init__(progress, console)
        self._live = Live(
            console=console,
            get_renderable=lambda: draw(self.progress),
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        super().__enter__()
        self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()


def round_line(progress: Progress) -> str:
    """The last round in one line."""
    outcomes = {} if progress.last_row is None else progress.last_row.outcomes
    parts = [f"round {progress.round:>{len(str(progress.rounds))}}/{progress.rounds}"]
    if progress.place is not None:
        parts.append(progress.place)
    if progress.accuracy is not None:
        parts.append(f"accuracy {percent(progress.accuracy)}")
    if progress.cost is not None:
        parts.append(progress.cost)
    counts = [f"{count} {outcome}" for outcome, count in outcomes.items() if count]
    parts.append(", ".join(counts) or "nobody replied")
    if progress.updates_per_second is not None:
        parts.append(f"{per_second(progress.updates_per_second)} updates/s")
    if progress.virtual:
        parts.append(f"virtual {span(progress.virtual_time)}")
    if progress.seconds_left is not None and progress.round < progress.rounds:
        parts.append(f"{span(progress.seconds_left)} left")
    return "  ".join(parts)


def draw(progress: Progress) -> RenderableType:
    """The live picture: how far the run is, how good the model is, and what the fleet does."""
    head = Table.grid(padding=(0, 2))
    left, absence = progress.seconds_left, progress.absence
    begun = progress.running or progress.round > 0
    where = [f"round {progress.round}/{progress.rounds}"] if begun else []
    where += [progress.place] if progress.place else []
    where += [] if progress.running else ["waiting for devices"]
    head.add_row(
        Text(progress.name, style="bold"),
        Text("   ".join(where)),
        ProgressBar(total=progress.rounds, completed=progress.round, width=BAR_WIDTH)
        if begun
        else ProgressBar(total=progress.devices, completed=progress.states.get("enrolled", 0), width=BAR_WIDTH),
        Text(f"{span(left)} left" if left is not None and progress.round < progress.rounds else span(progress.elapsed)),
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    if absence is not None:
        facts.add_row("waiting", Text(absence, style="yellow"))
    if progress.accuracy is not None:
        cost = "" if progress.cost is None else f"   {progress.cost}"
        facts.add_row(
            "model", Text(f"accuracy {percent(progress.accuracy)}   best {percent(progress.best or 0.0)}{cost}")
        )
    if progress.states:
        facts.add_row("fleet", _counted(progress.states))
    if progress.outcomes.total():
        facts.add_row("updates", _counted({outcome: progress.outcomes[outcome] for outcome in OUTCOMES}))
    if progress.job is not None:
        bar = ProgressBar(total=progress.job.steps, completed=progress.job.step, width=JOB_BAR_WIDTH)
        facts.add_row("server", _side_by_side(bar, Text(progress.job_line or "")))
    rate = progress.updates_per_second
    if begun:
        speed = "" if rate is None else f"   {per_second(rate)} device updates/s"
        virtual = f"virtual {span(progress.virtual_time)}   " if progress.virtual else ""
        facts.add_row("time", Text(f"{virtual}real {span(progress.elapsed)}{speed}"))
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
