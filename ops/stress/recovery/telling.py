"""Kills and recoveries as people see them: a line a fleet, a table, and a plot of every kill."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from fedemu.ops.figures import span
from fedemu.ops.pages.colours import BLUE, RED
from fedemu.ops.pages.style import WIDTH, bare_figure, drawn, saved
from fedemu.ops.stress.early import shown
from fedemu.ops.stress.recovery.play import DEVICES, FLEETS, VICTIMS, Kill, RecoveryResult, recover
from fedemu.ops.stress.warm import WarmStart
from fedemu.protocol.host.files import write_for_people
from fedemu.protocol.wording import counted

_LINE_SECONDS = 30.0


def play_recovery(folder: Path, seed: int, results: list[RecoveryResult], *, minutes: float, kept: bool) -> None:
    """Play each fleet for an equal part of ``minutes``, and tell people on stderr how it goes and how it ended.

    Each result is appended to ``results`` as its fleet ends, so those before an interruption are known, and shown.
    If the folder is ``kept``, it gets the plot as ``recovery.svg`` and ``recovery.png``.
    """
    console = Console(stderr=True, highlight=False)
    with shown(console, results, lambda: _conclude(console, results, folder if kept else None)), WarmStart() as warm:
        for name in FLEETS:
            console.print(f"{counted(DEVICES, 'device')} behind an edge, {name} ...")
            chance, line = random.Random(f"{seed}/{name}"), _Line(console)
            place = folder / name.replace(" ", "-")
            results.append(recover(name, place, 60 * minutes / len(FLEETS), chance, warm, told=line.told))


def _conclude(console: Console, results: Sequence[RecoveryResult], folder: Path | None) -> None:
    """Show the results, and put their plot into the folder if there is one."""
    show(console, results)
    if folder is not None and (figure := drawn(draw, results)) is not None:
        write_for_people(folder / "recovery.svg", saved(figure, "svg"))
        write_for_people(folder / "recovery.png", saved(figure, "png"))
        console.print(f"plot: {folder}/recovery.svg, recovery.png", markup=False, soft_wrap=True)


class _Line:
    """Tells now and then how many kills there were."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = self._said = time.monotonic()
        self._kills: list[Kill] = []

    def told(self, kill: Kill) -> None:
        self._kills.append(kill)
        if (now := time.monotonic()) >= self._said + _LINE_SECONDS:
            self._said = now
            longest = max(each.seconds for each in self._kills)
            self._console.print(
                f"{span(now - self._began)}: {counted(len(self._kills), 'kill')}, went on after {longest:.1f} s at most"
            )


def show(console: Console, results: Sequence[RecoveryResult]) -> None:
    """Print how soon each fleet went on after each kind of kill, and what was wrong."""
    table = Table(box=None, pad_edge=False)
    table.add_column("fleet", no_wrap=True)
    table.add_column("killed", no_wrap=True)
    for column in ("kills", "median", "90 %", "longest"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        for victim in VICTIMS:
            if seconds := result.seconds_of(victim):
                times = [*np.quantile(seconds, (0.5, 0.9)), seconds[-1]]
                table.add_row(result.fleet, victim, str(len(seconds)), *(f"{each:.2f} s" for each in times))
    console.print(table)
    for result in results:
        for complaint in result.complaints:
            console.print(f"{result.fleet}: {complaint}", markup=False, soft_wrap=True)
    kills, rounds = sum(len(result.kills) for result in results), sum(result.rounds for result in results)
    ended = "passed: all went on, and nothing was lost" if all(result.passed for result in results) else "FAILED"
    console.print(f"{counted(kills, 'kill')} in {counted(rounds, 'round')}; {ended}")


def draw(results: Sequence[RecoveryResult]) -> Figure | None:
    """Every kill as a point, with the median of each kind, in a row for each fleet. None if there are none."""
    rows = [
        (f"{result.fleet}: {victim}", seconds)
        for result in results
        for victim in VICTIMS
        if (seconds := result.seconds_of(victim))
    ]
    if not rows:
        return None
    figure = bare_figure(1.5 * WIDTH, 0.7 + 0.3 * len(rows))
    axes = figure.add_subplot()
    for place, (_, seconds) in enumerate(rows):
        axes.plot(seconds, [place] * len(seconds), ".", markersize=4, alpha=0.5, color=BLUE)
        axes.plot([np.median(seconds)] * 2, [place - 0.35, place + 0.35], color=RED, linewidth=1.5)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds from the kill to the end of the second round after it; the line is the median")
    return figure
