"""The picture of what methods of one's own measure: a panel for each measure, in which experiments are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from fedemu.coordinator.record.row import Row
from fedemu.ops.compare.compare import Comparison
from fedemu.ops.compare.curves import curve_of
from fedemu.ops.compare.page.lines import draw_curve, looks
from fedemu.ops.pages.style import WIDTH, bare_figure, legend_columns, round_ticks, shortened, wrapped
from fedemu.ops.results.own_measures import OwnMeasure, first_measures, own_measures


def measures(comparison: Comparison) -> Figure | None:
    """What devices measured in training (the mean over accepted ones) and what methods remarked, by round.

    With several seeds a line is their mean, and the band around it is one deviation. None if there are no such numbers.
    """
    chosen = first_measures(row for entry in comparison.entries for run in entry.runs for row in run.rows)
    if not chosen:
        return None
    figure = bare_figure(WIDTH, 1.2 + 1.7 * len(chosen))
    named: dict[str, Any] = {}
    panels = figure.subplots(len(chosen), sharex=True, squeeze=False).flat
    for axes, measure in zip(panels, chosen, strict=True):
        for entry, look in looks(comparison):
            if draw_curve(axes, entry, look, curve_of(entry, partial(_value, measure))):
                named[shortened(entry.label)] = axes.lines[-1]
        axes.set_title(wrapped(measure.name, 60))
        if len(chosen) == 1:  # figures for papers have no title, which would name the axis
            axes.set_ylabel(wrapped(measure.name, 30))
        axes.xaxis.set_major_locator(round_ticks(integer=True))
    panels[-1].set_xlabel("round")
    figure.legend(named.values(), named, loc="outside lower center", ncols=legend_columns([*named]), fontsize=8.5)
    return figure


def _value(measure: OwnMeasure, row: Row) -> float | None:
    return own_measures(row).get(measure)


MEASURE_PLOTS: Mapping[str, Callable[[Comparison], Figure | None]] = {"measures": measures}
