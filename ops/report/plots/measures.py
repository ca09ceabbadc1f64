"""What a method's own programs and remarks measure, drawn from the columns ``device_metrics`` and ``remarks``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from matplotlib.figure import Figure

from fedemu.coordinator.record.row import Row
from fedemu.ops.pages.colours import ORANGE, PURPLE
from fedemu.ops.pages.style import WIDTH, Rows, bare_figure, marker, round_ticks, wrapped

MOST: Final = 8
"""The number of measures that are drawn, in the order of their names."""
_ELSEWHERE: Final = frozenset({"loss", "replay_samples", "replay", "coordination", "generator"})
"""What fedemu itself adds to the metrics of devices, and the topics of its remarks."""


def measures(rows: Rows) -> Figure | None:
    """What devices measured in training (orange, the mean over accepted ones), and what the method remarked (purple).

    None if there are no numbers of this kind.
    """
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        for measure, value in _of_row(row):
            found.setdefault(measure, []).append((row.round, value))
    if not found:
        return None
    chosen = sorted(found)[:MOST]
    figure = bare_figure(WIDTH, 0.7 + 1.5 * len(chosen))
    for axes, (name, colour) in zip(figure.subplots(len(chosen), sharex=True, squeeze=False).flat, chosen, strict=True):
        rounds, values = zip(*found[name, colour], strict=True)
        axes.plot(rounds, values, color=colour, linewidth=1.6, marker=marker(len(rounds)), label=name)
        axes.set_title(wrapped(name, 60))
        axes.xaxis.set_major_locator(round_ticks(integer=True))
    figure.supxlabel("round", fontsize=9.5)
    return figure


def _of_row(row: Row) -> Iterator[tuple[tuple[str, str], float]]:
    """The measures of a round that are numbers: each with its name and its colour."""
    for told, colour in ((row.device_metrics, ORANGE), (row.remarks, PURPLE)):
        for name in told.keys() - _ELSEWHERE:
            value = told[name]
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                yield (name, colour), float(value)


MEASURES: Mapping[str, Callable[[Rows], Figure | None]] = {"measures": measures}
