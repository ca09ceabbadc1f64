"""The heat maps of one diagnosed round, drawn from its row of ``diagnosis.jsonl``: of the worst round, and of the last.

The papers: Aljahdali et al., "Understanding and Mitigating Forgetting in Federated Learning"; Legate et al.,
"Re-Weighted Softmax Cross-Entropy to Control Forgetting in Federated Learning".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fedemu.ops.pages.style import ACCURACY_COLOURS, INK, Floats, Row, Rows, new_figure, numbers, round_ticks

_READABLE_CLASSES, _READABLE_MODELS = 12, 20
"""Up to so many classes and models a heat map has room for numbers in its cells."""
_DOT: Mapping[str, Any] = {"markersize": 3.4, "markeredgecolor": INK, "markeredgewidth": 0.6}


def rows_of_worst_round(rows: Rows) -> Figure | None:
    known = [row for row in _with_classes(rows) if row.get("round_forgetting") is not None]
    if not known:
        return None
    return _rows_of(max(known, key=lambda row: float(row["round_forgetting"])), "most forgotten")


def rows_of_last_round(rows: Rows) -> Figure | None:
    known = _with_classes(rows)
    return _rows_of(known[-1], "last diagnosed") if known else None


def local_forgetting_of_worst_round(rows: Rows) -> Figure | None:
    known = [row for row in _with_matrix(rows) if row["validation"].get("mean_forgetting") is not None]
    if not known:
        return None
    return _local_forgetting(max(known, key=lambda row: float(row["validation"]["mean_forgetting"])), "most forgotten")


def local_forgetting_of_last_round(rows: Rows) -> Figure | None:
    known = _with_matrix(rows)
    return _local_forgetting(known[-1], "last diagnosed") if known else None


def _rows_of(row: Row, why: str) -> Figure:
    """Accuracies by class of the old global model, the local ones, the new one (Aljahdali et al., figure 2)."""
    table = numbers([row["before"]["class_accuracy"], *row["locals"]["class_accuracy"], row["after"]["class_accuracy"]])
    models, classes = table.shape
    figure, axes = new_figure(
        f"Round {row['round']}, model by model ({why})", height=float(np.clip(1.5 + 0.26 * models, 3.4, 8.0))
    )
    image = axes.imshow(table, aspect="auto", cmap=ACCURACY_COLOURS, vmin=0, vmax=1, interpolation="nearest")
    axes.grid(False)
    axes.hlines([0.5, models - 1.5], -0.5, classes - 0.5, color="white", linewidth=4)
    axes.set_xlim(-0.5, classes - 0.5)
    axes.xaxis.set_major_locator(round_ticks(20, integer=True))
    axes.set_xlabel("class")
    _name_ticks(axes.yaxis, ["old global", *(f"device {device}" for device in row["devices"]), "new global"])
    counts = row.get("label_counts")
    if counts:
        axes.set_xlabel("class (a dot: the device holds samples of it)")
        device, held = np.nonzero(numbers(counts) > 0)
        axes.plot(held - 0.4 * (classes <= _READABLE_CLASSES), device + 1, "o", color="white", **_DOT)
    if classes <= _READABLE_CLASSES and models <= _READABLE_MODELS + 2:
        _write_into_cells(axes, 100 * table, "{:.0f}", light=table < 0.6)
    figure.colorbar(image, ax=axes, format=PercentFormatter(1.0), pad=0.02)
    return figure


def _local_forgetting(row: Row, why: str) -> Figure:
    """What each device's training lost on each other device's validation data (Legate et al., figure 3)."""
    table = numbers(row["validation"]["forgetting"])
    devices = len(table)
    side = float(np.clip(1.6 + 0.3 * devices, 3.6, 6.0))
    figure, axes = new_figure(f"Local forgetting, round {row['round']} ({why})", width=side + 1.8, height=side + 0.4)
    limit = max(float(np.nanmax(np.abs(table), initial=0.0)), 0.05)
    colours = matplotlib.colormaps["RdBu_r"].with_extremes(bad="#e8ecef")
    image = axes.imshow(table, cmap=colours, vmin=-limit, vmax=limit, interpolation="nearest")
    axes.grid(False)
    axes.set_xlabel("validation data of device")
    axes.set_ylabel("local model of device")
    names = [str(device) for device in row["devices"]]
    _name_ticks(axes.xaxis, names, rotation=90 if max(map(len, names)) > 2 else 0)
    _name_ticks(axes.yaxis, names)
    if devices <= _READABLE_CLASSES:
        _write_into_cells(axes, table, "{:+.2f}", light=np.abs(table) > 0.6 * limit)
    figure.colorbar(image, ax=axes, pad=0.02, label="accuracy lost")
    return figure


def _with_classes(rows: Rows) -> Rows:
    """The rounds that have their devices and the accuracy by class of every model."""
    return [
        row
        for row in rows
        if row.get("devices")
        and (row.get("locals") or {}).get("class_accuracy")
        and all((row.get(which) or {}).get("class_accuracy") for which in ("before", "after"))
    ]


def _with_matrix(rows: Rows) -> Rows:
    """The rounds that have their devices, which had validation data."""
    return [row for row in rows if row.get("devices") and (row.get("validation") or {}).get("forgetting")]


def _name_ticks(axis: Any, names: list[str], rotation: int = 0) -> None:
    """Every name, or as many as there is room for."""
    step = 1 + (len(names) - 1) // 40
    axis.set_ticks(range(0, len(names), step), names[::step], fontsize=8 if len(names) <= 24 else 6, rotation=rotation)


def _write_into_cells(axes: Any, table: Floats, form: str, light: Any) -> None:
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            colour = "white" if light[row, column] else INK
            axes.text(column, row, form.format(value), ha="center", va="center", fontsize=7, color=colour)
