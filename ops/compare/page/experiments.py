"""The pictures of a comparison: every experiment in one plot, its seeds as a mean and a band of one deviation.

Each takes the comparison, and is None if that lacks its data. The figures that are named are those of Aljahdali et al.,
"Understanding and Mitigating Forgetting in Federated Learning".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from fedemu.ops.compare.compare import Comparison
from fedemu.ops.compare.curves import MOVED, Curve, class_table, curve, draws_class_order, spent
from fedemu.ops.compare.entry import Entry
from fedemu.ops.compare.page.lines import draw_curve, looks
from fedemu.ops.figures import percent, readable_bytes, time_unit
from fedemu.ops.pages.axes import SHARES, fit_shares
from fedemu.ops.pages.colours import GREY, INK, PAPER
from fedemu.ops.pages.style import (
    WIDTH,
    accuracy_bar,
    bare_figure,
    can_name,
    class_map,
    legend_below,
    legend_columns,
    markers,
    name_classes,
    new_figure,
    round_ticks,
    wrapped,
)

_FEW_ROUNDS = 4
"""A curve of fewer evaluated rounds is shown once, and not its second half again."""
_MOST_NAMED = 14
"""Maps of more classes than this number them: a small map has no room for more names."""
_AT_EDGE = 0.12
"""A number above a dot is not centred if the dot is so close to the edge of its panel, as a share of its width."""
_SMOOTH_FROM = 20
"""A jagged curve of this number of rounds or more is drawn as a running mean."""


def accuracy(comparison: Comparison) -> Figure | None:
    """Accuracy by round, over all rounds. The dotted line is the target accuracy.

    With several seeds a line is their mean, and the band around it is one deviation. Where a seed has ended before the
    others, both are over those that go on.
    """
    figure, axes = new_figure("Accuracy", height=_height(comparison))
    shown = _draw_accuracy(axes, comparison, 0)
    if comparison.target is not None:
        axes.axhline(comparison.target, color=GREY, linewidth=1.0, linestyle=":")
        axes.annotate(
            f"target {percent(comparison.target)}",
            (0, comparison.target),
            xycoords=("axes fraction", "data"),
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=8,
            color=INK,
        )
        shown.append(comparison.target)
    fit_shares(axes, shown, "test accuracy")
    return _with_legend(figure, axes, comparison)


def accuracy_late(comparison: Comparison) -> Figure | None:
    """Accuracy in the second half of the rounds, on an axis of its own, so that close curves can be told apart.

    With several seeds a line is their mean, and the band around it is one deviation. None if that half has fewer than
    two evaluated rounds.
    """
    rounds = [curve(entry, "accuracy").rounds for entry in comparison.entries]
    known = np.concatenate(rounds)
    middle = (known.min() + known.max()) / 2 if len(known) else 0
    if len(np.unique(known[known >= middle])) < 2 or len(np.unique(known)) < _FEW_ROUNDS:
        return None
    figure, axes = new_figure("Accuracy, second half of the rounds", height=_height(comparison))
    fit_shares(axes, _draw_accuracy(axes, comparison, middle), "test accuracy")
    return _with_legend(figure, axes, comparison)


def accuracy_by_bytes(comparison: Comparison) -> Figure | None:
    """Accuracy by the bytes that all devices together sent and received, as a real fleet would have moved them."""
    figure, axes = new_figure("Accuracy by traffic", height=_height(comparison))
    _draw_accuracy_against(axes, comparison, MOVED, 1.0)
    axes.set_xlabel("bytes down and up, emulated")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: readable_bytes(value)))
    return _with_legend(figure, axes, comparison)


def accuracy_by_time(comparison: Comparison) -> Figure | None:
    """Accuracy by the experiment's clock, which depends on the emulated speed of the devices."""
    figure, axes = new_figure("Accuracy by time", height=_height(comparison))
    spans = [value for entry in comparison.entries for value in entry.figures["virtual_time"].known]
    divisor, unit = time_unit(max(spans, default=0.0))
    _draw_accuracy_against(axes, comparison, "virtual_time", divisor)
    axes.set_xlabel(f"time of the experiment [{unit}]")
    return _with_legend(figure, axes, comparison)


def forgetting_and_accuracy(comparison: Comparison) -> Figure | None:
    """The final accuracy and the forgetting of each experiment. The axes begin where the values begin.

    With several seeds a dot is their mean, the bar is one deviation, and a small circle is one seed.
    """
    figure = bare_figure(WIDTH, float(np.clip(1.3 + 0.42 * len(comparison.entries), 2.2, 20.0)))
    drawn = False
    for axes, key, title in zip(
        figure.subplots(1, 2, sharey=True),
        ("final_accuracy", "forgetting"),
        ("Final accuracy", "Forgetting"),
        strict=True,
    ):
        shown: list[float] = []
        for place, (entry, look) in enumerate(looks(comparison)):
            known, mean, spread = _of(entry, key)
            if mean is None:
                continue
            shown += [*known, mean - spread, mean + spread]
            if len(known) > 1:
                ring = {"color": look["color"], "markerfacecolor": "none", "markersize": 4}
                axes.plot(known, [place] * len(known), "o", label=f"_{entry.label}, a seed", **ring)
            dot = {"color": look["color"], "markeredgecolor": PAPER, "markersize": 9}
            bar = {"xerr": spread or None, "elinewidth": 1.6, "capsize": 3}
            axes.errorbar(mean, place, fmt="o", label=f"_{entry.label}, mean", **dot, **bar)
        drawn = drawn or bool(shown)
        fit_shares(axes, _widened(shown), "", "x", lowest=0.0 if key == "final_accuracy" else -1.0)
        _write_means(axes, comparison, key)
        axes.xaxis.set_major_locator(round_ticks(3))
        axes.set_title(title)
        axes.grid(False, axis="y")
    if not drawn:
        return None
    places = range(len(comparison.entries))
    figure.axes[0].set_yticks(places, [wrapped(entry.label, 22) for entry in comparison.entries], fontsize=8)
    figure.axes[0].set_ylim(len(places) - 0.5, -0.7)
    return figure


def round_forgetting_ecdf(comparison: Comparison) -> Figure | None:
    """The share of rounds, over all seeds, that forgot at most the amount on the horizontal axis.

    Aljahdali et al., figure 4.
    """
    figure, axes = new_figure("Distribution of round forgetting (ECDF)", height=_height(comparison))
    for entry, look in looks(comparison):
        values = [row.round_forgetting for run in entry.runs for row in run.rows if row.round_forgetting is not None]
        if values:
            axes.ecdf(values, linewidth=1.8, **markers(entry.place, len(values)), **look)
    axes.xaxis.set_major_locator(round_ticks(6))
    axes.xaxis.set_major_formatter(SHARES)
    axes.set(xlim=(0, None), ylim=(0, 1.02))  # so that a line at 100 % is seen whole
    axes.set_xlabel("round forgetting of at most")
    axes.yaxis.set_major_formatter(SHARES)
    axes.set_ylabel("rounds")
    return _with_legend(figure, axes, comparison)


def round_forgetting(comparison: Comparison) -> Figure | None:
    """The accuracy that classes lost in each round (Aljahdali et al., figure 14). Jagged curves are running means.

    A curve of fewer rounds than such a mean takes is one point, the mean over all of them.
    """
    curves = [(curve(entry, "round_forgetting"), entry.place, look) for entry, look in looks(comparison)]
    longest = max(len(drawn.rounds) for drawn, _, _ in curves)
    window = 1 if longest < _SMOOTH_FROM else max(3, longest // 20)
    title = "Round forgetting" if window == 1 else f"Round forgetting, running mean of {window}"
    figure, axes = new_figure(title, height=_height(comparison))
    for drawn, place, look in curves:
        if width := min(window, len(drawn.rounds)):
            kernel = np.ones(width) / width
            smooth = Curve(*(np.convolve(values, kernel, mode="valid") for values in drawn))
            axes.plot(smooth.rounds, smooth.mean, linewidth=1.6, **markers(place, len(smooth.rounds)), **look)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(SHARES)
    axes.set_ylabel("accuracy lost, mean over classes")
    return _with_legend(figure, axes, comparison)


def class_accuracy(comparison: Comparison) -> Figure | None:
    """One heat map per experiment, the mean over its seeds, all with the same scale (Aljahdali et al., figure 1b).

    It is that of one seed, which its title names, where each seed draws the order in which the classes come.
    """
    maps = [(_label_of_map(entry), *class_table(entry)) for entry in comparison.entries]
    maps = [(label, rounds, table) for label, rounds, table in maps if rounds]
    if not maps:
        return None
    across = min(3, len(maps))
    down = -(-len(maps) // across)
    figure = bare_figure(max(WIDTH, 3.9 * across), 0.6 + 2.5 * down)
    classes = [len(table) for _, _, table in maps]
    names = _names_of_classes(comparison) if max(classes) <= _MOST_NAMED else ()
    named = can_name(names) and {*classes} == {len(names)}
    cells = figure.subplots(down, across, sharex=True, sharey=named, squeeze=False)
    for axes in cells.flat[len(maps) :]:
        axes.set_visible(False)
    for axes, (label, rounds, table) in zip(cells.flat, maps, strict=False):
        image = class_map(axes, rounds, table)
        if named:
            name_classes(axes.yaxis, names, len(table))
        axes.set_title(wrapped(label, 30), fontsize=9)
        axes.xaxis.set_major_locator(round_ticks(6, integer=True))
        axes.tick_params(labelbottom=True)
    # Every picture has set the common axis to its own rounds.
    cells[0, 0].set_xlim(min(rounds[0] for _, rounds, _ in maps) - 0.5, max(rounds[-1] for _, rounds, _ in maps) + 0.5)
    figure.supxlabel("round", fontsize=9.5)
    figure.supylabel("class", fontsize=9.5)
    accuracy_bar(figure, image, cells.flat[: len(maps)], aspect=20 * down)
    return figure


def _label_of_map(entry: Entry) -> str:
    return f"{entry.label}, seed {entry.seeds[0]}" if draws_class_order(entry) and len(entry.runs) > 1 else entry.label


def _names_of_classes(comparison: Comparison) -> tuple[str, ...]:
    """The names of the classes of all runs. Empty if they differ, or if some runs don't tell them."""
    told = {run.class_names for entry in comparison.entries for run in entry.runs}
    return next(iter(told)) if len(told) == 1 else ()


COMPARISON_PLOTS: Mapping[str, Callable[[Comparison], Figure | None]] = {
    "accuracy": accuracy,
    "accuracy_late": accuracy_late,
    "forgetting_and_accuracy": forgetting_and_accuracy,
    "round_forgetting": round_forgetting,
    "round_forgetting_ecdf": round_forgetting_ecdf,
    "accuracy_by_bytes": accuracy_by_bytes,
    "accuracy_by_time": accuracy_by_time,
}
WIDE_COMPARISON_PLOTS: Mapping[str, Callable[[Comparison], Figure | None]] = {"class_accuracy": class_accuracy}


def _with_legend(figure: Figure, axes: Any, comparison: Comparison) -> Figure | None:
    """The figure with its legend, which also names experiments that have no values here. None if none has any."""
    drawn = {line.get_label() for line in axes.lines}
    lacking = [look for _, look in looks(comparison) if look["label"] not in drawn]
    if len(lacking) == len(comparison.entries):
        return None
    for look in lacking:
        axes.plot([], [], **{**look, "label": f"{look['label']} (no values)"})
    return legend_below(figure, axes)


def _draw_accuracy(axes: Any, comparison: Comparison, since: float) -> list[float]:
    """Draw the accuracies from round ``since`` on, as mean and band. Returns what the axis has to show."""
    shown: list[float] = []
    for entry, look in looks(comparison):
        whole = curve(entry, "accuracy")
        late = whole.rounds >= since
        shown += draw_curve(axes, entry, look, Curve(*(values[late] for values in whole)))
    return shown


def _draw_accuracy_against(axes: Any, comparison: Comparison, key: str, divisor: float) -> None:
    """Draw accuracy by what ``spent`` gives for ``key``, divided by ``divisor``, in the rounds that have both."""
    shown: list[float] = []
    for entry, look in looks(comparison):
        (rounds, so_far), reached = spent(entry, key), curve(entry, "accuracy")
        both, of_spent, of_reached = np.intersect1d(rounds, reached.rounds, return_indices=True)
        if len(both):
            dots = markers(entry.place, len(both))
            axes.plot(so_far[of_spent] / divisor, reached.mean[of_reached], linewidth=1.8, **dots, **look)
            shown += [*reached.mean[of_reached]]
    axes.xaxis.set_major_locator(round_ticks(6))
    axes.set_xlim(left=0)
    fit_shares(axes, shown, "test accuracy")


def _of(entry: Entry, key: str) -> tuple[list[float], float | None, float]:
    """A figure of an entry: the values that are known, their mean, and their deviation."""
    figure = entry.figures[key]
    return figure.known, figure.mean, figure.deviation or 0.0


def _write_means(axes: Any, comparison: Comparison, key: str) -> None:
    """Write each mean above its dot, and inside the panel also at its edges."""
    low, high = axes.get_xlim()
    for place, entry in enumerate(comparison.entries):
        _, mean, _ = _of(entry, key)
        if mean is not None:
            at = (mean - low) / (high - low)
            beside = "left" if at < _AT_EDGE else "right" if at > 1 - _AT_EDGE else "center"
            axes.annotate(percent(mean), (mean, place), (0, 7), textcoords="offset points", ha=beside, fontsize=8)


def _widened(values: list[float]) -> list[float]:
    """The values with room at both sides, where a number is written above the outermost dots."""
    room = 0.2 * (max(values) - min(values)) if values else 0.0
    return [*values, min(values) - room, max(values) + room] if values else []


def _height(comparison: Comparison) -> float:
    """The height of a figure in inches, with room for the plot and for the legend below it."""
    named = [entry.label for entry in comparison.entries]
    return 3.2 + 0.2 * -(-len(named) // legend_columns(named))
