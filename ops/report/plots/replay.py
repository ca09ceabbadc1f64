"""The plots of replay: what the buffers hold after each period, its objective, and how coordination lowers that.

They are drawn from the remarks in the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedemu.coordinator.record.row import Row
from fedemu.ops.pages.colours import BLUE, GREY, RED
from fedemu.ops.pages.style import (
    PALETTE,
    WIDTH,
    Floats,
    Rows,
    bare_figure,
    colour_bar,
    legend_below,
    marker,
    new_figure,
    numbers,
    period_bar,
    plain_log_axis,
    round_ticks,
    sequence_colours,
)
from fedemu.ops.report.plots.rounds import MOST_BARS, draw_steps

_FEW_LABELS = len(PALETTE)
"""Up to this number of labels, each has a colour of its own."""


def buffers(rows: Rows) -> Figure | None:
    """Stacked bars: the samples that devices keep after each period, by the samples' periods and labels.

    They count the devices that answered.
    """
    held = {said["period"]: said for row in rows if (said := _kept(row))}
    if not held:
        return None
    told = [key for key in ("periods", "labels") if any(len(_numbers_of(said, key)) > 1 for said in held.values())]
    figure = bare_figure(WIDTH, 3.4)
    cells = figure.subplots(1, max(1, len(told)), sharey=True, squeeze=False)[0]
    periods = sorted(held)
    after = [period + 1 for period in periods]
    totals = numbers([held[period].get("samples") for period in periods])
    for axes, key in zip(cells, told or ["samples"], strict=True):
        axes.set_title({"periods": "Kept, by period", "labels": "Kept, by label"}.get(key, "Kept"))
        axes.set_xlabel("after period")
        axes.xaxis.set_major_locator(round_ticks(11 if len(after) <= MOST_BARS else 4, integer=True))
        axes.grid(False, axis="x")
        if key == "samples":
            axes.bar(after, totals, color=BLUE, width=0.8)
            continue
        counts = _counts([_numbers_of(held[period], key) for period in periods])
        few = key == "labels" and len(counts) <= _FEW_LABELS
        colours: Any = PALETTE[: len(counts)] if few else sequence_colours(len(counts))
        first = 1 if key == "periods" else 0
        _stack(axes, after, counts, colours, key.removesuffix("s"), first)
        colour_bar(figure, axes, colours, "", first=first)
    for axes in cells:
        for period, total in zip(after, totals, strict=True):
            if len(after) <= 12 and not np.isnan(total):
                axes.annotate(
                    _short(total), (period, total), (0, 2), textcoords="offset points", ha="center", fontsize=6.5
                )
    cells[0].set_ylim(0, 1.08 * max(np.nanmax(totals, initial=0.0), 1.0))
    cells[0].set_ylabel("samples kept for replay")
    return figure


def coordination(rows: Rows) -> Figure | None:
    """A line per period: the coordinated objective after each iteration, relative to its first value."""
    found = {
        row.task or 0: numbers(told)
        for row in rows
        if len(told := _numbers_of(row.about("coordination"), "objective")) > 1
    }
    if not found:
        return None
    figure, axes = new_figure("Coordinated objective")
    periods = max(*(len(row.period_accuracy or ()) for row in rows), max(found) + 1)
    colours = sequence_colours(periods)
    for period, objective in found.items():
        if objective[0] > 0:
            axes.plot(
                np.arange(len(objective)) + 1,
                objective / objective[0],
                color=colours[period],
                linewidth=1.6,
                marker=marker(len(objective)),
                markersize=4,
                label=f"_after period {period + 1}",
            )
    if not axes.lines:
        return None
    axes.set_ylim(bottom=0)
    axes.set_xlabel("iteration")
    axes.set_ylabel("objective relative to the first")
    period_bar(figure, axes, periods, "after period")
    return figure


def objective(rows: Rows) -> Figure | None:
    """The objective of what devices keep after each period, by sample.

    With coordination it stands beside that of the relaxed selections in the first and the last iteration. The dotted
    line at 1 is the objective of samples whose gradients are all at right angles. The axis is logarithmic, because the
    first period's gradients are far more alike than those of later ones.
    """
    measured = [row for row in rows if row.kept_objective is not None and _kept(row)]
    if not measured:
        return None
    figure, axes = new_figure("Objective of the kept samples")
    after = [_kept(row)["period"] + 1 for row in measured]
    relaxed = [_relaxed(row) for row in measured]
    dots = marker(len(after))
    several = any(len(said) > 1 for said in relaxed)
    lines = {
        "kept": numbers([row.kept_objective for row in measured]),
        "relaxed, last iteration" if several else "relaxed": numbers([said[-1] for said in relaxed]),
        "relaxed, first iteration": numbers([said[0] if several else None for said in relaxed]),
    }
    for (label, values), colour in zip(lines.items(), (BLUE, RED, GREY), strict=True):
        if np.isfinite(values).any():
            axes.plot(after, values, label=label, color=colour, linewidth=1.6, marker=dots, markersize=4)
    axes.axhline(1, color=GREY, linewidth=1.0, linestyle=":", label="gradients at right angles")
    plain_log_axis(axes, "y")
    axes.set_xlabel("after period")
    axes.set_ylabel("objective by sample")
    axes.xaxis.set_major_locator(round_ticks(11, integer=True))
    return legend_below(figure, axes)


REPLAY_PLOTS: Mapping[str, Callable[[Rows], Figure | None]] = {
    "buffers": buffers,
    "objective": objective,
    "coordination": coordination,
}


def _kept(row: Row) -> Mapping[str, Any]:
    """What a row tells of the samples that are kept. Empty if it is not in the form of fedemu's own methods."""
    said = row.about("replay", "period", "samples")
    return said if said and isinstance(said["period"], int) and isinstance(said["samples"], int | float) else {}


def _relaxed(row: Row) -> Floats:
    """The objective of the relaxed selections after each iteration, by sample; a single NaN if it is not known.

    It is over the devices that had answered by then, and not over those that selected in the end. Each is taken to have
    as many samples as these keep on average.
    """
    said, kept = row.about("coordination"), _kept(row)
    objectives = numbers(_numbers_of(said, "objective") or [None])
    answered, last, selected = _numbers_of(said, "answered"), said.get("devices"), kept.get("devices")
    if not (isinstance(last, int) and isinstance(selected, int) and selected):
        return np.full(1, np.nan)
    if len(answered) != len(objectives):  # earlier versions told the devices of the last iteration only
        answered = [*[None] * (len(objectives) - 1), last]
    samples = numbers(answered) * kept["samples"] / selected
    by_sample: Floats = np.divide(objectives, samples, out=np.full_like(objectives, np.nan), where=samples > 0)
    return by_sample


def _numbers_of(said: Mapping[str, Any], key: str) -> list[Any]:
    """A list of numbers among remarks. Empty if there is none of this name."""
    found = said.get(key)
    if isinstance(found, list) and all(isinstance(value, int | float | None) for value in found):
        return found
    return []


def _counts(lists: list[list[float]]) -> Floats:
    """Counts ``[kinds, periods]`` of the lists, one for each period. A count that a list lacks is 0."""
    kinds = max(map(len, lists))
    return np.array([[*counts, *[0] * (kinds - len(counts))] for counts in lists], dtype=np.float64).T


def _stack(axes: Any, places: list[int], counts: Floats, colours: Any, noun: str, first: int) -> None:
    """Draw ``counts [kinds, places]`` as bars on top of each other, a colour for each kind.

    The kinds are called ``noun`` and a number from ``first`` upwards. If there are many places, a kind is one shape,
    from the first place that has some of it to the last: bars would be as many as kinds times places.
    """
    base = np.zeros(len(places))
    for kind, (values, colour) in enumerate(zip(counts, colours, strict=True)):
        label = f"_{noun} {kind + first}"
        if len(places) <= MOST_BARS:
            axes.bar(places, values, bottom=base, color=colour, width=0.8, linewidth=0, label=label)
        elif len(held := np.flatnonzero(values)):
            part = slice(held[0], held[-1] + 1)
            draw_steps(axes, places[part], base[part], base[part] + values[part], color=colour, label=label)
        base += values


def _short(total: float) -> str:
    """A number of samples, in thousands from 10,000 on."""
    return f"{total:.0f}" if total < 10_000 else f"{total / 1000:.0f}k"
