"""The heat maps of one diagnosed round, the worst or the last, drawn from its line of ``diagnosis.jsonl``.

Each takes the lines of the diagnosed rounds, and is None if they lack its data.

The papers: Aljahdali et al., "Understanding and Mitigating Forgetting in Federated Learning"; Legate et al.,
"Re-Weighted Softmax Cross-Entropy to Control Forgetting in Federated Learning".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.transforms import Affine2D

from fedemu.coordinator.record.run import Line
from fedemu.ops.pages.axes import POINTS
from fedemu.ops.pages.colours import ON_BRIGHT
from fedemu.ops.pages.style import (
    ACCURACY_COLOURS,
    WIDTH,
    Floats,
    accuracy_bar,
    cell_map,
    name_classes,
    new_figure,
    numbers,
    round_ticks,
)

Lines = Sequence[Line]
"""The lines of ``diagnosis.jsonl``, one for each diagnosed round."""

_READABLE_CLASSES, _READABLE_MODELS = 12, 20
"""With more classes or models than this, the cells of a heat map have no room for numbers."""
_MOST_NAMED = 40
"""With more rows or columns than this, only some are named at their axis."""
_LETTERS_ACROSS = 50
"""Names of classes with more letters than this, each as long as the longest, are turned."""
_MODELS = ("before", "locals", "after")
"""The keys of a line that hold the old global model, the local models and the new global model."""
_DOT: Mapping[str, Any] = {"markersize": 3.4, "markeredgecolor": ON_BRIGHT, "markeredgewidth": 0.6}


def models_of_worst_round(lines: Lines, names: Sequence[str] = ()) -> Figure | None:
    """The accuracy by class of every model of the round that forgot most."""
    known = [line for line in _with_classes(lines) if line.get("round_forgetting") is not None]
    if not known:
        return None
    return _models_of(max(known, key=lambda line: float(line["round_forgetting"])), "most forgotten", names)


def models_of_last_round(lines: Lines, names: Sequence[str] = ()) -> Figure | None:
    """The accuracy by class of every model of the last diagnosed round."""
    known = _with_classes(lines)
    return _models_of(known[-1], "last diagnosed", names) if known else None


def local_forgetting_of_worst_round(lines: Lines) -> Figure | None:
    """What the devices' training lost on each other's validation data, in the round that forgot most."""
    known = [line for line in _with_matrix(lines) if line["validation"].get("mean_forgetting") is not None]
    if not known:
        return None
    worst = max(known, key=lambda line: float(line["validation"]["mean_forgetting"]))
    return _local_forgetting(worst, "most forgotten")


def local_forgetting_of_last_round(lines: Lines) -> Figure | None:
    """What the devices' training lost on each other's validation data, in the last diagnosed round."""
    known = _with_matrix(lines)
    return _local_forgetting(known[-1], "last diagnosed") if known else None


def _models_of(line: Line, why: str, names: Sequence[str]) -> Figure:
    """Accuracies by class of the old global model, the local ones, the new one (Aljahdali et al., figure 2)."""
    old, local, new = (line[which]["class_accuracy"] for which in _MODELS)
    table = numbers([old, *local, new])
    models, classes = table.shape
    figure, axes = new_figure(
        f"Round {line['round']}, model by model ({why})", height=float(np.clip(1.5 + 0.26 * models, 3.4, 8.0))
    )
    image = cell_map(axes, table, cmap=ACCURACY_COLOURS, vmin=0, vmax=1)
    axes.grid(False)
    axes.hlines([0.5, models - 1.5], -0.5, classes - 0.5, color="white", linewidth=4)
    axes.set_xlim(-0.5, classes - 0.5)
    axes.xaxis.set_major_locator(round_ticks(20, integer=True))
    if name_classes(axes.xaxis, names, classes) and max(map(len, names)) * classes > _LETTERS_ACROSS:
        axes.tick_params(axis="x", rotation=90)
    axes.set_xlabel("class")
    _name_ticks(axes.yaxis, ["old global", *(f"device {device}" for device in line["devices"]), "new global"])
    counts = line.get("label_counts")
    if counts:
        axes.set_xlabel("class (a dot: the device holds samples of it)")
        device, held = np.nonzero(numbers(counts) > 0)
        beside = Affine2D().translate(-0.4 * (classes <= _READABLE_CLASSES), 0) + axes.transData
        axes.plot(held, device + 1, "o", color="white", transform=beside, label="_holds samples of the class", **_DOT)
    if classes <= _READABLE_CLASSES and models <= _READABLE_MODELS + 2:
        _write_into_cells(axes, 100 * table, "{:.0f}", light=table < 0.6)
    accuracy_bar(figure, image, axes)
    return figure


def _local_forgetting(line: Line, why: str) -> Figure:
    """What each device's training lost on each other device's validation data (Legate et al., figure 3)."""
    table = numbers(line["validation"]["forgetting"])
    devices = len(table)
    side = float(np.clip(1.6 + 0.3 * devices, 3.6, 6.0))
    figure, axes = new_figure(
        f"Local forgetting, round {line['round']} ({why})",
        width=min(side + 1.4, WIDTH),
        height=min(side, WIDTH - 1.4) + 0.6,
    )
    limit = max(float(np.nanmax(np.abs(table), initial=0.0)), 0.05)
    colours = matplotlib.colormaps["RdBu_r"].with_extremes(bad=(0.55, 0.6, 0.64, 0.35))
    image = cell_map(axes, table, cmap=colours, vmin=-limit, vmax=limit, aspect="equal")
    axes.grid(False)
    axes.set_xlabel("validation data of device")
    axes.set_ylabel("local model of device")
    names = [str(device) for device in line["devices"]]
    _name_ticks(axes.xaxis, names, rotation=90 if max(map(len, names)) > 2 else 0)
    _name_ticks(axes.yaxis, names)
    if devices <= _READABLE_CLASSES:
        _write_into_cells(axes, 100 * table, "{:+.0f}", light=np.abs(table) > 0.6 * limit)
    bar = figure.colorbar(image, ax=axes, pad=0.02, label="accuracy lost, percentage points", format=POINTS)
    bar.outline.set_visible(False)
    return figure


def _with_classes(lines: Lines) -> Lines:
    """The lines that have devices and the accuracy by class of every model."""
    return [
        line
        for line in lines
        if line.get("devices") and all((line.get(which) or {}).get("class_accuracy") for which in _MODELS)
    ]


def _with_matrix(lines: Lines) -> Lines:
    """The lines that have devices with validation data."""
    return [line for line in lines if line.get("devices") and (line.get("validation") or {}).get("forgetting")]


def _name_ticks(axis: Any, names: list[str], rotation: int = 0) -> None:
    """Write every name at the axis, or every second, third and so on if there is no room for all.

    The others belong to minor ticks, which are not drawn: the data behind the figure have the names of all.
    """
    step = 1 + (len(names) - 1) // _MOST_NAMED
    axis.set_ticks(range(0, len(names), step), names[::step], fontsize=8 if len(names) <= 24 else 6, rotation=rotation)
    if hidden := [place for place in range(len(names)) if place % step]:
        axis.set_ticks(hidden, [names[place] for place in hidden], minor=True)
        axis.set_tick_params(which="minor", length=0, label1On=False)


def _write_into_cells(axes: Any, table: Floats, form: str, light: Any) -> None:
    """Write the values of ``table`` into its cells, in white where ``light`` is true."""
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            colour = "white" if light[row, column] else ON_BRIGHT
            axes.text(column, row, form.format(value), ha="center", va="center", fontsize=7, color=colour)
