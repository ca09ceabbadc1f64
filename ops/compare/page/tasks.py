"""The picture of class-incremental streams: accuracy over the classes so far, by the number of tasks observed.

As in figure 5 of Babakniya et al., "A Data-Free Approach to Mitigate Catastrophic Forgetting", 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.transforms import Affine2D

from fedemu.ops.compare.tasks import Method, TaskStudy
from fedemu.ops.pages.axes import fit_shares
from fedemu.ops.pages.style import bare_figure, legend_columns, line_look, literal, markers, round_ticks, shortened

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
    places: dict[str, int] = {}
    for method in (method for study in studies for method in study.methods):
        places.setdefault(method.label, method.entry.place)
    across = min(_MOST_ACROSS, len(studies))
    down = -(-len(studies) // across)
    columns = legend_columns([*places]) + across
    panel = 4.6 if across == 1 else 3.4
    figure = bare_figure(max(9.0, 4.6 * across), 0.5 + panel * down + 0.21 * -(-len(places) // columns))
    cells = figure.subplots(down, across, squeeze=False)
    for axes in cells.flat[len(studies) :]:
        axes.set_visible(False)
    drawn: dict[str, Any] = {}
    for axes, study in zip(cells.flat, studies, strict=False):
        for method in study.methods:
            apart = _APART * ([*places].index(method.label) - (len(places) - 1) / 2)
            drawn[method.label] = _draw(axes, method, places[method.label], apart)
        _scale(axes, study)
    figure.legend(
        [drawn[name] for name in places],
        [shortened(name) for name in places],
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
    look |= {"linewidth": 1.6, **markers(place, len(tasks)), "label": f"_{method.label}"}
    beside = Affine2D().translate(apart, 0) + axes.transData
    (line,) = axes.plot(tasks + 1, mean, transform=beside, **look)
    band = {"color": look["color"], "alpha": 0.12, "linewidth": 0, "label": look["label"]}
    axes.fill_between(tasks + 1, mean - deviation, mean + deviation, transform=beside, **band)
    return line


def _scale(axes: Any, study: TaskStudy) -> None:
    """Name the panel and scale its axes."""
    axes.set_title(literal(study.dataset))
    axes.set_xlabel("tasks observed")
    axes.xaxis.set_major_locator(round_ticks(20, integer=True))
    fit_shares(axes, np.concatenate([method.seen.ravel() for method in study.methods]), "accuracy, classes so far")
