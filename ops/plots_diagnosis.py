"""The papers' pictures of what training and aggregation forget, drawn from the rows of ``diagnosis.jsonl``.

Each takes the diagnosed rounds and is None for want of data. The papers: Aljahdali et al., "Understanding and
Mitigating Forgetting in Federated Learning"; Lee et al., "Preservation of the Global Knowledge by Not-True Distillation
in Federated Learning"; Legate et al., "Re-Weighted Softmax Cross-Entropy to Control Forgetting in Federated Learning".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fedemu.ops.plot_style import (
    ACCURACY_COLOURS,
    BLUE,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    Floats,
    Row,
    Rows,
    bare_figure,
    marker,
    new_figure,
    numbers,
    over_rounds,
    round_ticks,
    series,
)

_READABLE_CLASSES, _READABLE_MODELS = 12, 20
"""Up to so many classes and models a heat map has room for numbers in its cells."""


def forgetting_by_stage(rows: Rows) -> Figure | None:
    """What local training lost, what aggregation lost, and what the round lost in the end."""
    figure, axes = new_figure("Forgetting: local, aggregation, round", height=3.9)
    for key, label, colour in (
        ("local_forgetting", "local: old global → local models", ORANGE),
        ("aggregation_forgetting", "aggregation: local models → new global", PURPLE),
        ("round_forgetting", "round: old global → new global", RED),
    ):
        rounds, values = series(rows, key)
        if rounds:
            axes.plot(rounds, values, color=colour, linewidth=1.8, marker=marker(len(rounds)), label=label)
    if not axes.lines:
        return None
    axes.set_ylim(bottom=0)
    axes.set_ylabel("accuracy lost, mean over classes")
    _legend_below(axes, 1)
    return figure


def loss_transition(rows: Rows) -> Figure | None:
    """The global model's loss, the local models' mean loss, the next global model's (Aljahdali et al., figure 5)."""
    path: list[tuple[float, float]] = []
    local_points, global_points = [], []
    last = None
    for row in rows:
        round, before, after = int(row["round"]), _loss(row["before"]), _loss(row["after"])
        between = mean_over_devices(row, "loss")
        if round - 1 != last and before is not None:
            path.append((round - 1, np.nan))  # rounds between the two were not diagnosed
            global_points.append((round - 1, before))
            path.append(global_points[-1])
        if not np.isnan(between):
            local_points.append((round - 0.5, between))
            path.append(local_points[-1])
        if after is not None:
            global_points.append((round, after))
            path.append(global_points[-1])
        last = round
    if not local_points or not global_points:
        return None
    figure, axes = new_figure("Loss: from the local models to the global model")
    axes.plot(*np.array(path).T, color=GREY, linewidth=1.0)
    size = float(np.clip(240 / len(local_points), 2, 5))
    for points, colour, label in (
        (local_points, ORANGE, "local models, mean"),
        (global_points, BLUE, "global model"),
    ):
        axes.plot(*np.array(points).T, "o", color=colour, markersize=size, label=label)
    losses = [loss for _, loss in (*local_points, *global_points)]
    if min(losses) > 0 and max(losses) / min(losses) > 30:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("test loss")
    _legend_below(axes, 2)
    return figure


def in_and_out_local(rows: Rows) -> Figure | None:
    """Accuracy on the devices' own classes, and on the others, before and after training (Lee et al., figure 7)."""
    figure = bare_figure(6.6, 3.6)
    for axes, part, title in zip(
        figure.subplots(1, 2, sharey=True), ("in_local", "out_local"), ("In-local", "Out-local"), strict=True
    ):
        axes.set_title(f"{title} accuracy")
        over_rounds(axes)
        rounds = [int(row["round"]) for row in rows]
        locals_ = [numbers((row.get("locals") or {}).get(part) or [None]) for row in rows]
        means, spread = _means(locals_), _deviations(locals_)
        axes.fill_between(rounds, means - spread, means + spread, color=ORANGE, alpha=0.18, linewidth=0)
        for label, values, colour, style in (
            ("old global model", _means([numbers(row.get(f"before_{part}") or [None]) for row in rows]), GREY, "--"),
            ("local models, ± deviation", means, ORANGE, "-"),
            ("new global model", _means([numbers(row.get(f"after_{part}") or [None]) for row in rows]), BLUE, "-"),
        ):
            if not np.isnan(values).all():
                axes.plot(rounds, values, style, color=colour, linewidth=1.6, marker=marker(len(rounds)), label=label)
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    drawn = [axes for axes in figure.axes if axes.lines]
    if not drawn:
        return None
    figure.axes[0].set_ylabel("mean over the round's devices")
    figure.legend(*drawn[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def rows_of_worst_round(rows: Rows) -> Figure | None:
    known = [row for row in _with_classes(rows) if row.get("round_forgetting") is not None]
    if not known:
        return None
    return _rows_of(max(known, key=lambda row: float(row["round_forgetting"])), "most forgotten")


def rows_of_last_round(rows: Rows) -> Figure | None:
    known = _with_classes(rows)
    return _rows_of(known[-1], "last diagnosed") if known else None


def local_forgetting_matrix(rows: Rows) -> Figure | None:
    """What each device's training lost on each other device's validation data (Legate et al., figure 3)."""
    known = [row for row in rows if (row.get("validation") or {}).get("forgetting")]
    if not known:
        return None
    table = numbers(known[-1]["validation"]["forgetting"])
    devices = len(table)
    side = float(np.clip(1.6 + 0.3 * devices, 3.6, 6.0))
    figure, axes = new_figure(
        f"Local forgetting, round {known[-1]['round']} (last diagnosed)", width=side + 1.8, height=side + 0.4
    )
    limit = max(float(np.nanmax(np.abs(table), initial=0.0)), 0.05)
    colours = matplotlib.colormaps["RdBu_r"].with_extremes(bad="#e8ecef")
    image = axes.imshow(table, cmap=colours, vmin=-limit, vmax=limit, interpolation="nearest")
    axes.grid(False)
    axes.set_xlabel("validation data of device")
    axes.set_ylabel("local model of device")
    names = [str(device) for device in known[-1]["devices"]]
    _name_ticks(axes.xaxis, names, rotation=90 if max(map(len, names)) > 2 else 0)
    _name_ticks(axes.yaxis, names)
    if devices <= _READABLE_CLASSES:
        _write_into_cells(axes, table, "{:+.2f}", light=np.abs(table) > 0.6 * limit)
    figure.colorbar(image, ax=axes, pad=0.02, label="accuracy lost")
    return figure


DIAGNOSIS_PLOTS: Mapping[str, Callable[[Rows], Figure | None]] = {
    "forgetting_by_stage": forgetting_by_stage,
    "loss_transition": loss_transition,
    "in_and_out_local": in_and_out_local,
    "local_forgetting": local_forgetting_matrix,
    "rows_worst_round": rows_of_worst_round,
    "rows_last_round": rows_of_last_round,
}


def mean_over_devices(row: Row, key: str) -> float:
    """Of one figure of the local models of a round; NaN where no device has it."""
    return float(_means([numbers((row.get("locals") or {}).get(key) or [None])])[0])


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


_DOT: Mapping[str, Any] = {"markersize": 3.4, "markeredgecolor": INK, "markeredgewidth": 0.6}


def _with_classes(rows: Rows) -> Rows:
    """The rounds that have the accuracy by class of every model."""
    return [
        row
        for row in rows
        if (row.get("locals") or {}).get("class_accuracy")
        and all((row.get(which) or {}).get("class_accuracy") for which in ("before", "after"))
    ]


def _loss(model: Mapping[str, Any] | None) -> float | None:
    loss = (model or {}).get("loss")
    return None if loss is None else float(loss)


def _means(values: list[Floats]) -> Floats:
    """Each array's mean over what it holds; NaN where that is nothing."""
    return np.array([np.mean(row[~np.isnan(row)]) if not np.isnan(row).all() else np.nan for row in values])


def _deviations(values: list[Floats]) -> Floats:
    return np.array([np.std(row[~np.isnan(row)]) if not np.isnan(row).all() else np.nan for row in values])


def _name_ticks(axis: Any, names: list[str], rotation: int = 0) -> None:
    """Every name, or as many as there is room for."""
    step = 1 + (len(names) - 1) // 40
    axis.set_ticks(range(0, len(names), step), names[::step], fontsize=8 if len(names) <= 24 else 6, rotation=rotation)


def _write_into_cells(axes: Any, table: Floats, form: str, light: Any) -> None:
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            colour = "white" if light[row, column] else INK
            axes.text(column, row, form.format(value), ha="center", va="center", fontsize=7, color=colour)


def _legend_below(axes: Any, columns: int) -> None:
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns)
