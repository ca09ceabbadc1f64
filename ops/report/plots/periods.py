"""The plots of a run on a stream of periods: the model on each period's test set, in each round and after each period.

Each takes the results that ``period_results`` finds. The matrix is that of Lopez-Paz and Ranzato, "Gradient Episodic
Memory for Continual Learning".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from fedemu.ops.pages.axes import POINTS, SHARES, fit_shares, say_cut
from fedemu.ops.pages.cells import fit_cells
from fedemu.ops.pages.colours import BLUE, GREEN, GREY, INK, ON_BRIGHT, RED
from fedemu.ops.pages.style import (
    ACCURACY_COLOURS,
    WIDTH,
    Floats,
    bare_figure,
    cell_map,
    evenly_spaced,
    legend_below,
    marker,
    new_figure,
    number_periods,
    numbers,
    period_bar,
    plain_log_axis,
    round_ticks,
    sequence_colours,
    series,
)
from fedemu.ops.results.periods import PeriodResults, perplexity_of

_MOST_NUMBERED = 16
"""With more periods than this, the cells of the matrix have no room for numbers."""
_ROOMY = 8
"""Up to this number of periods, a cell of the matrix has room for every number."""


def period_curves(results: PeriodResults) -> Figure | None:
    """One line per period, thin before the period begins, and lines over the periods so far and over all periods.

    Vertical lines stand between the periods. With own orders of tasks there is one line per task, thin before some
    device meets it.
    """
    figure, axes = new_figure(f"{_measure(results).capitalize()} by period", height=4.2)
    rounds = np.array([row.round for row in results.rows])
    tasks = np.array([row.task or 0 for row in results.rows])
    dots = marker(len(rounds))
    for period, (colour, values) in enumerate(zip(sequence_colours(results.periods), _by_period(results), strict=True)):
        begun = tasks >= results.since[period]
        axes.plot(rounds, values, color=colour, linewidth=0.8, alpha=0.35, label=f"_period {period + 1}, all rounds")
        axes.plot(
            rounds[begun],
            values[begun],
            color=colour,
            linewidth=1.6,
            marker=dots,
            markersize=3,
            label=f"_period {period + 1}",
        )
    for end in results.rounds[:-1]:
        axes.axvline(end + 0.5, color=GREY, linewidth=0.8, linestyle=":", zorder=0)
    for key, label, style in (("", "all periods together", "-"), ("seen_", "periods so far", "--")):
        known, values = series(results.rows, f"{key}{'loss' if results.language else 'accuracy'}")
        if known:
            drawn = perplexity_of(numbers(values)) if results.language else values
            axes.plot(known, drawn, color=INK, linewidth=2.2, linestyle=style, label=label)
    _scale(axes, results)
    period_bar(figure, axes, results.periods, _tested_on(results))
    return legend_below(figure, axes)


def period_matrix(results: PeriodResults) -> Figure | None:
    """A matrix of the model after each period on each period's test set, and beside it measures of each model."""
    reached, periods = len(results.rounds), results.periods
    figure = bare_figure(WIDTH, float(np.clip(1.7 + 0.3 * reached, 3.2, 6.6)))
    matrix, level, change = figure.subplots(1, 3, sharey=True, width_ratios=[3.6, 1.5, 1.6])
    table = results.perplexity if results.language else results.accuracy
    image = cell_map(matrix, table, **_colours(results, table))
    if max(reached, periods) <= _MOST_NUMBERED:
        _number_cells(matrix, image, table, results.language)
    matrix.set_title(f"{_measure(results).capitalize()} on each period")
    matrix.set_xlabel(_tested_on(results))
    matrix.set_ylabel("model after period")
    number_periods(matrix.xaxis, evenly_spaced(periods, 10))
    number_periods(matrix.yaxis, evenly_spaced(reached, 20))
    matrix.grid(False)
    models = np.arange(reached)
    titles = ("perplexity", "rise") if results.language else ("accuracy", "points")
    for axes, title, lines in zip((level, change), titles, _beside(results), strict=True):
        for label, values, colour in lines:
            if not np.isnan(values).all():
                axes.plot(values, models, "o-", color=colour, markersize=4, linewidth=1.4, label=label)
        axes.set_xlabel(title)
        axes.xaxis.set_major_locator(round_ticks(2))
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=7)
        axes.grid(False, axis="y")
        axes.margins(x=0.15)
    if results.language:
        change.xaxis.set_major_formatter(SHARES)
    else:
        fit_shares(level, results.after_each("average_accuracy"), "accuracy", "x")
        level.set_xlabel(level.get_xlabel().replace(" (", "\n("))
        level.xaxis.label.set_fontsize(7.5)
        level.xaxis.set_major_locator(round_ticks(2))
        change.xaxis.set_major_formatter(POINTS)
    change.axvline(0, color=GREY, linewidth=1)
    change.set_visible(bool(change.get_legend_handles_labels()[0]))
    handles = [line for axes in (level, change) for line in axes.get_legend_handles_labels()[0]]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    if periods > _ROOMY:
        figure.draw_without_rendering()
        fit_cells(matrix)
    return figure


PERIOD_PLOTS: Mapping[str, Callable[[PeriodResults], Figure | None]] = {
    "period_curves": period_curves,
    "period_matrix": period_matrix,
}


def _tested_on(results: PeriodResults) -> str:
    return f"tested on {'task' if results.own_orders else 'period'}"


def _measure(results: PeriodResults) -> str:
    return "perplexity" if results.language else "accuracy"


def _by_period(results: PeriodResults) -> Floats:
    """Accuracies or perplexities ``[periods, evaluated rounds]``, NaN if a period has no value in a round."""
    if not results.language:
        return numbers([row.period_accuracy for row in results.rows]).T
    unknown = [None] * results.periods
    return perplexity_of(numbers([row.period_loss or unknown for row in results.rows])).T


def _beside(results: PeriodResults) -> tuple[list[tuple[str, Floats, str]], list[tuple[str, Floats, str]]]:
    """The lines beside the matrix, by model: those of levels, and those of changes.

    Each line has a label, values ``[models]`` and a colour.
    """
    if results.language:
        return (
            [("over all periods", perplexity_of(results.all_period_loss), BLUE)],
            [("relative forgetting, mean", results.relative_forgetting_after_each(), RED)],
        )
    return (
        [("average accuracy", results.after_each("average_accuracy"), BLUE)],
        [
            ("average forgetting", results.after_each("average_forgetting"), RED),
            ("backward transfer", results.after_each("backward_transfer"), GREEN),
        ],
    )


def _colours(results: PeriodResults, table: Floats) -> dict[str, Any]:
    """The colours of the matrix: accuracies from 0 to 1, or logarithms of perplexities. A better value is brighter."""
    known = table[~np.isnan(table)]
    if not results.language or not len(known):
        return {"cmap": ACCURACY_COLOURS, "norm": Normalize(0, 1)}
    return {"cmap": ACCURACY_COLOURS.reversed(), "norm": LogNorm(known.min(), max(known.max(), 1.01 * known.min()))}


def _number_cells(axes: Any, image: Any, table: Floats, language: bool) -> None:
    """Write accuracies as whole percentages, perplexities with three digits; the text is dark on bright cells."""
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
            text = _three_digits(value) if language else f"{100 * value:.0f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=ON_BRIGHT if dark else "white")


def _three_digits(value: float) -> str:
    """A perplexity with three digits, or as a power of ten from 10,000 on."""
    if value >= 10_000:
        return f"{value:.0e}".replace("e+0", "e")
    return f"{value:.{max(0, 2 - int(np.floor(np.log10(max(value, 1.0)))))}f}"


def _scale(axes: Any, results: PeriodResults) -> None:
    """Scale the vertical axis. Perplexities that differ much get a logarithmic one."""
    if not results.language:
        shown = [value for line in axes.lines if line.get_linewidth() > 1 for value in line.get_ydata()]
        fit_shares(axes, shown, "test accuracy")
        return
    axes.set_ylabel("test perplexity")
    known = _by_period(results)
    known = known[~np.isnan(known)]
    if len(known) and known.max() > 5 * known.min():
        plain_log_axis(axes, "y")
    say_cut(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
