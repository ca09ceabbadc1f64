"""A soak as people see it: a line a minute, a table of slopes, and a plot of everything that was sampled."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from fedemu.ops.figures import span
from fedemu.ops.pages.colours import BLUE, RED
from fedemu.ops.pages.style import WIDTH, bare_figure, drawn, saved
from fedemu.ops.stress.soak.play import (
    DEVICES,
    LEAST_MINUTES,
    QUANTITIES,
    WARM_UP_SECONDS,
    Sample,
    SoakResult,
    counts_from,
    soak,
    write_samples,
)
from fedemu.ops.stress.soak.slopes import Slope
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import write_for_people
from fedemu.protocol.wording import counted

_COLUMNS = 2
_LINE_SECONDS = 60.0


def play_soak(folder: Path, seed: int, *, minutes: float, kept: bool) -> SoakResult:
    """Play a soak, and tell people on stderr how it goes and how it ended.

    If the folder is ``kept``, it gets the samples as ``soak.csv`` and the plot as ``soak.svg`` and ``soak.png``.
    The samples before an interruption are shown and kept, too; the result says that it was interrupted.
    Raises ConfigurationError if the soak would be too short to tell whether anything grows.
    """
    if minutes < LEAST_MINUTES:
        raise ConfigurationError(
            f"--minutes is {minutes:g}; a soak needs {LEAST_MINUTES} or more to tell whether anything grows, because "
            f"its first {span(WARM_UP_SECONDS)} do not count"
        )
    console = Console(stderr=True, highlight=False)
    console.print(f"{counted(DEVICES, 'device')} under churn for {span(60 * minutes)} ...")
    next_line = _LINE_SECONDS

    def told(seconds: float, sample: Sample) -> None:
        nonlocal next_line
        if seconds >= next_line:
            next_line += _LINE_SECONDS
            console.print(
                f"{span(seconds)}: coordinator {sample['memory of coordinator']:.1f} MiB, "
                f"supervisor {sample['memory of supervisor']:.1f} MiB, {sample['processes']:.0f} processes"
            )

    result = soak(folder, minutes, seed, told=told)
    show(console, result)
    if kept and result.samples:
        write_samples(result, folder / "soak.csv")
        if (figure := drawn(draw, result)) is not None:
            write_for_people(folder / "soak.svg", saved(figure, "svg"))
            write_for_people(folder / "soak.png", saved(figure, "png"))
        console.print(f"samples and plot: {folder}/soak.csv, soak.svg, soak.png", markup=False, soft_wrap=True)
    return result


def show(console: Console, result: SoakResult) -> None:
    """Print the slopes, and what was wrong."""
    table = Table(box=None, pad_edge=False)
    table.add_column("quantity", no_wrap=True)
    for column in ("median", "an hour", "95 %", "limit"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, slope in result.slopes.items():
        quantity = QUANTITIES[name]
        table.add_row(
            name,
            f"{slope.middle:.3g} {quantity.unit}".strip(),
            _bound(slope.slope),
            f"{_bound(slope.low)} to {_bound(slope.high)}" if not math.isinf(slope.low) else "",
            f"{quantity.limit:g}",
            verdict(slope, quantity.limit),
            style="bold red" if slope.exceeds(quantity.limit) else "",
        )
    console.print(table)
    ends = ", ".join(f"{number:,} {what}" for what, number in result.ended.items())
    seconds = result.seconds[-1] if result.seconds else 0.0
    console.print(f"{counted(result.rounds, 'round')} in {span(seconds)}; ended: {ends}")
    for complaint in result.complaints:
        console.print(complaint, markup=False, soft_wrap=True)
    if result.interrupted:
        console.print(f"interrupted; the table covers {counted(len(result.samples), 'sample')} before that")
    else:
        console.print("passed: nothing grows beyond its limit" if result.passed else "FAILED")


def verdict(slope: Slope, limit: float) -> str:
    """One or two words for a slope."""
    if slope.exceeds(limit):
        return "GROWS"
    if math.isinf(slope.low):
        return "unknown"
    return "flat" if slope.flat else "falls" if slope.high < 0 else "within"


def draw(result: SoakResult) -> Figure | None:
    """Every quantity over time, with its slope after the warm-up. None if there are no samples."""
    if len(result.samples) < 2:
        return None
    rows = math.ceil(len(QUANTITIES) / _COLUMNS)
    figure = bare_figure(WIDTH * _COLUMNS, 1.5 * rows)
    minutes = np.array(result.seconds) / 60
    counted_from = min(counts_from(result.seconds) / 60, minutes[-1])
    for place, (name, quantity) in enumerate(QUANTITIES.items(), 1):
        axes = figure.add_subplot(rows, _COLUMNS, place)
        values = np.array([sample[name] for sample in result.samples])
        axes.plot(minutes, values, ".", markersize=2.5, color=BLUE)
        slope, after = result.slopes[name], minutes >= counted_from
        if not math.isinf(slope.low):
            x = minutes[after]
            axes.plot(x, slope.middle + slope.slope * (x - np.median(x)) / 60, color=RED, linewidth=1.2)
        axes.axvspan(0, counted_from, alpha=0.08, color=BLUE, linewidth=0)
        axes.set_title(f"{name} ({quantity.unit})" if quantity.unit else name)
        low, high = values.min(), values.max()
        margin = max(0.1 * (high - low), 0.02 * high, 0.5)
        axes.set_ylim(max(0.0, low - margin), high + margin)
        if place > len(QUANTITIES) - _COLUMNS:
            axes.set_xlabel("minutes; the first part is the warm-up")
    return figure


def _bound(value: float) -> str:
    return f"{value:+.1f}" if abs(value) < 1000 else f"{value:+.0e}"
