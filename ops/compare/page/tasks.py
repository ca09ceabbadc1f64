"""The picture of class-incremental streams: accuracy over the classes so far, by the number of tasks observed.

As in figure 5 of Babakniya et al., "A Data-Free Approach to Mitigate Catastrophic Forgetting", 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fedemu.ops.compare.tasks import Method, TaskStudy
from fedemu.ops.pages.style import MARKERS, bare_figure, legend_columns, line_look, round_ticks

Studies = Sequence[TaskStudy]

_MOST_ACROSS = 3
_APART = 0.02
"""The distance between points of neighbouring methods, in tasks, so that none hides another."""


def accuracy_by_task(studies: Studies) -> Figure | None:
    """A panel for each data set and a line for each method. Its seeds are a mean and a band of one deviation.

    None if there are no studies.
    """
    if not studies:
        return None
    names = list(dict.fromkeys(method.label for study in studies for method in study.methods))
    across = min(_MOST_ACROSS, len(studies))
    down = -(-len(studies) // across)
    columns = legend_columns(names) + across
    panel = 4.6 if across == 1 else 3.4
    figure = bare_figure(max(9.0, 4.6 * across), 0.5 + panel * down + 0.21 * -(-len(names) // columns))
    cells = figure.subplots(down, across, squeeze=False)
    for axes in cells.flat[len(studies) :]:
        axes.set_visible(False)
    drawn: dict[str, Any] = {}
    for axes, study in zip(cells.flat, studies, strict=False):
        for method in study.methods:
            place = names.index(method.label)
            drawn[method.label] = _draw(axes, method, place, _APART * (place - (len(names) - 1) / 2))
        _scale(axes, study)
    figure.legend(
        [drawn[name] for name in names],
        names,
        loc="outside lower center",
        ncols=columns,
        fontsize=8.5,
        handlelength=3,
    )
    return figure


WIDE_TASK_PLOTS: Mapping[str, Callable[[Studies], Figure | None]] = {"tasks_accuracy": accuracy_by_task}


def _draw(axes: Any, method: Method, place: int, apart: float) -> Any:
    """Draw a method's line and band, and return the line. A task shows the runs that have reached it."""
    reached = ~np.isnan(method.seen)
    tasks = np.flatnonzero(reached.any(axis=0))
    values = [method.seen[reached[:, task], task] for task in tasks]
    mean = np.array([column.mean() for column in values])
    deviation = np.array([column.std(ddof=1) if len(column) > 1 else 0.0 for column in values])
    look = line_look(place)
    # A colour that is used again gets another marker.
    marker = MARKERS[(place + 3 * (place // len(MARKERS))) % len(MARKERS)]
    (line,) = axes.plot(tasks + 1 + apart, mean, marker=marker, markersize=4.5, linewidth=1.6, **look)
    axes.fill_between(
        tasks + 1 + apart, mean - deviation, mean + deviation, color=look["color"], alpha=0.12, linewidth=0
    )
    return line


def _scale(axes: Any, study: TaskStudy) -> None:
    """Name the panel and scale its axes, the vertical one from 0 to a little above the best accuracy."""
    axes.set_title(study.dataset)
    axes.set_xlabel("tasks observed")
    axes.xaxis.set_major_locator(round_ticks(20, integer=True))
    axes.set_ylabel("accuracy over the classes so far")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, min(1.02, 1.05 * max(float(np.nanmax(method.seen)) for method in study.methods)))
