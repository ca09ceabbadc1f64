"""The pictures of a comparison: every experiment in one plot, its seeds as a mean and a band of one deviation.

Each takes the comparison, and is None if that lacks its data. The figures that are named are those of Aljahdali et al.,
"Understanding and Mitigating Forgetting in Federated Learning".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from fedemu.ops.compare.compare import Comparison
from fedemu.ops.compare.curves import MOVED, Curve, class_table, curve
from fedemu.ops.compare.entry import Entry
from fedemu.ops.figures import readable_bytes, time_unit
from fedemu.ops.pages.style import (
    GREY,
    INK,
    bare_figure,
    class_map,
    legend_below,
    legend_columns,
    line_look,
    marker,
    new_figure,
    numbers,
    round_ticks,
)

_WIDTH = 6.6
_SMOOTH_FROM = 20
"""A jagged curve of this number of rounds or more is drawn as a running mean."""


def accuracy(comparison: Comparison) -> Figure | None:
    """Accuracy by round, with the target accuracy as a line."""
    figure, axes = new_figure("Accuracy", height=_height(comparison))
    if comparison.target is not None:
        axes.axhline(comparison.target, color=GREY, linewidth=1.0, linestyle=":")
        axes.annotate(
            f"target {comparison.target:.1%}",
            (0, comparison.target),
            xycoords=("axes fraction", "data"),
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=8,
            color=GREY,
        )
    for entry, look in _looks(comparison):
        _draw(axes, curve(entry, "accuracy"), look)
    _scale_accuracy(axes, comparison)
    return legend_below(figure, axes)


def accuracy_by_bytes(comparison: Comparison) -> Figure | None:
    """Accuracy by the bytes that all devices together sent and received, as a real fleet would have moved them."""
    figure, axes = new_figure("Accuracy by traffic", height=_height(comparison))
    _draw_accuracy_against(axes, comparison, MOVED, 1.0)
    axes.set_xlabel("bytes down and up, emulated")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: readable_bytes(value)))
    return legend_below(figure, axes)


def accuracy_by_time(comparison: Comparison) -> Figure | None:
    """Accuracy by the experiment's clock, which depends on the emulated speed of the devices."""
    figure, axes = new_figure("Accuracy by time", height=_height(comparison))
    spans = [value for entry in comparison.entries for value in entry.figures["virtual_time"].known]
    divisor, unit = time_unit(max(spans, default=0.0))
    _draw_accuracy_against(axes, comparison, "virtual_time", divisor)
    axes.set_xlabel(f"time of the experiment [{unit}]")
    return legend_below(figure, axes)


def forgetting_and_accuracy(comparison: Comparison) -> Figure | None:
    """Two bars for each experiment: its final accuracy, and its forgetting."""
    figure = bare_figure(_WIDTH, float(np.clip(1.4 + 0.42 * len(comparison.entries), 2.4, 9.0)))
    places = np.arange(len(comparison.entries))
    colours = [look["color"] for _, look in _looks(comparison)]
    drawn = False
    for axes, key, title, written in zip(
        figure.subplots(1, 2, sharey=True),
        ("final_accuracy", "forgetting"),
        ("Final accuracy", "Forgetting"),
        ("{:.1%}", "{:.3f}"),
        strict=True,
    ):
        figures = [entry.figures[key] for entry in comparison.entries]
        means = numbers([figure.mean for figure in figures])
        spread = numbers([figure.deviation or 0.0 for figure in figures])
        known = ~np.isnan(means)
        drawn = drawn or bool(known.any())
        bars = axes.barh(
            places[known],
            means[known],
            xerr=np.where(spread > 0, spread, np.nan)[known],
            color=np.array(colours)[known],
            error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
        )
        axes.bar_label(bars, [written.format(mean) for mean in means[known]], padding=3, fontsize=8)
        axes.margins(x=0.24)
        axes.set_title(title)
        axes.xaxis.set_major_locator(round_ticks(5))
        if key == "final_accuracy":
            axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(False, axis="y")
    if not drawn:
        return None
    figure.axes[0].set_yticks(places, [_wrapped(entry.label) for entry in comparison.entries], fontsize=8)
    figure.axes[0].set_ylim(len(places) - 0.4, -0.6)
    return figure


def round_forgetting_ecdf(comparison: Comparison) -> Figure | None:
    """The share of rounds, over all seeds, that forgot at most the amount on the horizontal axis.

    Aljahdali et al., figure 4.
    """
    figure, axes = new_figure("Distribution of round forgetting (ECDF)", height=_height(comparison))
    for entry, look in _looks(comparison):
        values = [row.round_forgetting for run in entry.runs for row in run.rows if row.round_forgetting is not None]
        if values:
            axes.ecdf(values, linewidth=1.8, **look)
    axes.xaxis.set_major_locator(round_ticks())
    axes.set_xlim(left=0)
    axes.set_xlabel("round forgetting")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("rounds")
    return legend_below(figure, axes)


def round_forgetting(comparison: Comparison) -> Figure | None:
    """Round forgetting by round (Aljahdali et al., figure 14)."""
    curves = [(curve(entry, "round_forgetting"), look) for entry, look in _looks(comparison)]
    longest = max(len(drawn.rounds) for drawn, _ in curves)
    window = 1 if longest < _SMOOTH_FROM else max(3, longest // 20)
    title = "Round forgetting" if window == 1 else f"Round forgetting, running mean of {window}"
    figure, axes = new_figure(title, height=_height(comparison))
    for drawn, look in curves:
        if len(drawn.rounds) >= window:
            kernel = np.ones(window) / window
            smooth = Curve(*(np.convolve(values, kernel, mode="valid") for values in drawn))
            axes.plot(smooth.rounds, smooth.mean, linewidth=1.6, marker=marker(len(smooth.rounds)), **look)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("accuracy lost, mean over classes")
    return legend_below(figure, axes)


def class_accuracy(comparison: Comparison) -> Figure | None:
    """One heat map per experiment, the mean over its seeds, all with the same scale (Aljahdali et al., figure 1b)."""
    maps = [(entry.label, *class_table(entry)) for entry in comparison.entries]
    maps = [(label, rounds, table) for label, rounds, table in maps if rounds]
    if not maps:
        return None
    across = min(3, len(maps))
    down = -(-len(maps) // across)
    figure = bare_figure(max(_WIDTH, 3.9 * across), 0.6 + 2.5 * down)
    cells = figure.subplots(down, across, sharex=True, squeeze=False)
    for axes in cells.flat[len(maps) :]:
        axes.set_visible(False)
    for axes, (label, rounds, table) in zip(cells.flat, maps, strict=False):
        image = class_map(axes, rounds, table)
        axes.set_title(_wrapped(label), fontsize=9)
        axes.xaxis.set_major_locator(round_ticks(6, integer=True))
        axes.tick_params(labelbottom=True)
    figure.supxlabel("round", fontsize=9.5)
    figure.supylabel("class", fontsize=9.5)
    figure.colorbar(image, ax=cells, format=PercentFormatter(1.0), pad=0.02, aspect=20 * down)
    return figure


COMPARISON_PLOTS: Mapping[str, Callable[[Comparison], Figure | None]] = {
    "accuracy": accuracy,
    "forgetting_and_accuracy": forgetting_and_accuracy,
    "round_forgetting": round_forgetting,
    "round_forgetting_ecdf": round_forgetting_ecdf,
    "accuracy_by_bytes": accuracy_by_bytes,
    "accuracy_by_time": accuracy_by_time,
}
WIDE_COMPARISON_PLOTS: Mapping[str, Callable[[Comparison], Figure | None]] = {"class_accuracy": class_accuracy}


def _looks(comparison: Comparison) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """Every entry with the colour, line style and name of its line."""
    for place, entry in enumerate(comparison.entries):
        yield entry, {**line_look(place), "label": entry.label}


def _draw(axes: Any, drawn: Curve, look: dict[str, Any]) -> None:
    """Draw a curve as its mean and a band of one deviation."""
    if len(drawn.rounds):
        axes.plot(drawn.rounds, drawn.mean, linewidth=1.8, marker=marker(len(drawn.rounds)), **look)
        low, high = drawn.mean - drawn.deviation, drawn.mean + drawn.deviation
        axes.fill_between(drawn.rounds, low, high, color=look["color"], alpha=0.16, linewidth=0)


def _draw_accuracy_against(axes: Any, comparison: Comparison, key: str, divisor: float) -> None:
    """Draw accuracy by the column ``key``, divided by ``divisor``, in the rounds that have both."""
    for entry, look in _looks(comparison):
        spent, reached = curve(entry, key), curve(entry, "accuracy")
        both, of_spent, of_reached = np.intersect1d(spent.rounds, reached.rounds, return_indices=True)
        if len(both):
            axes.plot(spent.mean[of_spent] / divisor, reached.mean[of_reached], linewidth=1.8, **look)
    axes.xaxis.set_major_locator(round_ticks(6))
    axes.set_xlim(left=0)
    _scale_accuracy(axes, comparison)


def _scale_accuracy(axes: Any, comparison: Comparison) -> None:
    """Scale the vertical axis from 0 to a little above the best accuracy, so that close curves can be told apart."""
    best = [value for entry in comparison.entries for value in entry.figures["best_accuracy"].known]
    axes.set_ylim(0, min(1.02, 1.12 * max([*best, comparison.target or 0.0, 0.05])))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("test accuracy")


def _height(comparison: Comparison) -> float:
    """The height of a figure in inches, with room for the plot and for the legend below it."""
    named = [entry.label for entry in comparison.entries]
    return 3.7 + 0.21 * -(-len(named) // legend_columns(named))


def _wrapped(label: str) -> str:
    """The label, broken into short lines after its commas."""
    lines = [""]
    for word in label.split(", "):
        if lines[-1] and len(lines[-1]) + len(word) > 28:
            lines.append(word)
        else:
            lines[-1] += f", {word}" if lines[-1] else word
    return ",\n".join(lines)
