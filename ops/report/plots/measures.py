"""What a method's own programs and remarks measure, drawn from the columns ``device_metrics`` and ``remarks``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from matplotlib.figure import Figure

from fedemu.ops.pages.colours import ORANGE, PURPLE
from fedemu.ops.pages.style import WIDTH, Rows, bare_figure, marker, round_ticks, wrapped
from fedemu.ops.results.own_measures import first_measures, own_measures


def measures(rows: Rows) -> Figure | None:
    """What devices measured in training (orange, the mean over accepted ones), and what the method remarked (purple).

    None if there are no numbers of this kind.
    """
    chosen = first_measures(rows)
    if not chosen:
        return None
    told = [(row.round, own_measures(row)) for row in rows]
    figure = bare_figure(WIDTH, 0.7 + 1.5 * len(chosen))
    for axes, measure in zip(figure.subplots(len(chosen), sharex=True, squeeze=False).flat, chosen, strict=True):
        points = [(round, values[measure]) for round, values in told if measure in values]
        colour = ORANGE if measure.teller == "devices" else PURPLE
        axes.plot(
            *zip(*points, strict=True), color=colour, linewidth=1.6, marker=marker(len(points)), label=measure.name
        )
        axes.set_title(wrapped(measure.name, 60))
        if len(chosen) == 1:  # figures for papers have no title, which would name the axis
            axes.set_ylabel(wrapped(measure.name, 30))
        axes.xaxis.set_major_locator(round_ticks(integer=True))
    figure.supxlabel("round", fontsize=9.5)
    return figure


MEASURES: Mapping[str, Callable[[Rows], Figure | None]] = {"measures": measures}
