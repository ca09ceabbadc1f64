"""The papers' pictures of what training and aggregation forget, drawn from the lines of ``diagnosis.jsonl``.

Each takes the lines of the diagnosed rounds, and is None if they lack its data. The papers: Aljahdali et al.,
"Understanding and Mitigating Forgetting in Federated Learning"; Lee et al., "Preservation of the Global Knowledge by
Not-True Distillation in Federated Learning"; Legate et al., "Re-Weighted Softmax Cross-Entropy to Control Forgetting in
Federated Learning".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedemu.coordinator.record.run import Line
from fedemu.ops.pages.axes import SHARES, fit_shares
from fedemu.ops.pages.colours import BLUE, GREY, ORANGE, PURPLE, RED
from fedemu.ops.pages.style import (
    WIDTH,
    Floats,
    bare_figure,
    legend_below,
    marker,
    new_figure,
    numbers,
    over_rounds,
    plain_log_axis,
)
from fedemu.ops.report.plots.one_round import (
    Lines,
    local_forgetting_of_last_round,
    local_forgetting_of_worst_round,
    models_of_last_round,
    models_of_worst_round,
)

_LOCALS = "_local models, mean and spread"
"""The name of a band, which is in no legend. The line in its middle has the same name without the first letter."""
_BAND: Mapping[str, Any] = {"color": ORANGE, "alpha": 0.18, "linewidth": 0}


def forgetting_by_stage(lines: Lines) -> Figure | None:
    """The accuracy that local training lost, that aggregation lost, and that the whole round lost."""
    figure, axes = new_figure("Forgetting: local, aggregation, round", height=3.9)
    for key, label, colour in (
        ("local_forgetting", "local: old global → local models", ORANGE),
        ("aggregation_forgetting", "aggregation: local models → new global", PURPLE),
        ("round_forgetting", "round: old global → new global", RED),
    ):
        known = [line for line in lines if line.get(key) is not None]
        rounds, values = [int(line["round"]) for line in known], [float(line[key]) for line in known]
        if rounds:
            axes.plot(rounds, values, color=colour, linewidth=1.8, marker=marker(len(rounds)), label=label)
    if not axes.lines:
        return None
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(SHARES)
    axes.set_ylabel("accuracy lost, mean over classes")
    return legend_below(figure, axes, 1)


def loss_transition(lines: Lines) -> Figure | None:
    """A path over the rounds: the loss of the global model, the local models' mean, that of the next global model.

    Aljahdali et al., figure 5.
    """
    path: list[tuple[float, float]] = []
    local_points, global_points = [], []
    last = None
    for line in lines:
        round, before, after = int(line["round"]), _loss(line.get("before")), _loss(line.get("after"))
        between = mean_over_devices(line, "loss")
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
        plain_log_axis(axes, "y")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("test loss")
    return legend_below(figure, axes, 2)


def in_and_out_local(lines: Lines) -> Figure | None:
    """Accuracy on the devices' own classes, and on the others, before and after training (Lee et al., figure 7)."""
    figure = bare_figure(WIDTH, 3.4)
    shown: list[float] = []
    for axes, part, title in zip(
        figure.subplots(1, 2, sharey=True), ("in_local", "out_local"), ("In-local", "Out-local"), strict=True
    ):
        axes.set_title(f"{title} accuracy")
        over_rounds(axes)
        rounds = [int(line["round"]) for line in lines]
        locals_ = [numbers((line.get("locals") or {}).get(part) or [None]) for line in lines]
        means, spread = _means(locals_), _deviations(locals_)
        axes.fill_between(rounds, means - spread, means + spread, label=_LOCALS, **_BAND)
        for label, values, colour, style in (
            ("old global model", _means([numbers(line.get(f"before_{part}") or [None]) for line in lines]), GREY, "--"),
            (_LOCALS.removeprefix("_"), means, ORANGE, "-"),
            ("new global model", _means([numbers(line.get(f"after_{part}") or [None]) for line in lines]), BLUE, "-"),
        ):
            if not np.isnan(values).all():
                axes.plot(rounds, values, style, color=colour, linewidth=1.6, marker=marker(len(rounds)), label=label)
        shown += [values for line in axes.lines for values in line.get_ydata()] + [*(means - spread), *(means + spread)]
    drawn = [axes for axes in figure.axes if axes.lines]
    if not drawn:
        return None
    fit_shares(figure.axes[0], shown, "accuracy, mean over devices")
    return legend_below(figure, drawn[0], 2)


def weight_alignment(lines: Lines) -> Figure | None:
    """The share of neurons that prefer the same class as in the old global model (Lee et al., table 2).

    There is a panel for each of the last two layers. It shows the local models and the new global model.
    """
    known = [line for line in lines if line.get("alignment")]
    if not known:
        return None
    figure = bare_figure(WIDTH, 3.4)
    rounds = [int(line["round"]) for line in known]
    shown: list[float] = []
    panels = figure.subplots(1, 2, sharey=True)
    for axes, layer, title in zip(
        panels, ("features", "logits"), ("Input of the last layer", "Last layer"), strict=True
    ):
        axes.set_title(title)
        over_rounds(axes)
        found = [line["alignment"].get(layer) or {} for line in known]
        locals_ = [numbers(each.get("locals") or [None]) for each in found]
        means, spread = _means(locals_), _deviations(locals_)
        after = numbers([each.get("after") for each in found])
        dots = marker(len(rounds))
        axes.fill_between(rounds, means - spread, means + spread, label=_LOCALS, **_BAND)
        axes.plot(rounds, means, color=ORANGE, linewidth=1.6, marker=dots, label=_LOCALS.removeprefix("_"))
        axes.plot(rounds, after, color=BLUE, linewidth=1.6, marker=dots, label="new global model")
        shown += [values for line in axes.lines for values in line.get_ydata()] + [*(means - spread), *(means + spread)]
    fit_shares(figure.axes[0], shown, "neurons as in old model")
    return legend_below(figure, figure.axes[0], 2)


DIAGNOSIS_PLOTS: Mapping[str, Callable[[Lines], Figure | None]] = {
    "forgetting_by_stage": forgetting_by_stage,
    "loss_transition": loss_transition,
    "in_and_out_local": in_and_out_local,
    "weight_alignment": weight_alignment,
    "rows_worst_round": models_of_worst_round,
    "rows_last_round": models_of_last_round,
    "local_forgetting_worst_round": local_forgetting_of_worst_round,
    "local_forgetting_last_round": local_forgetting_of_last_round,
}


def of_rounds(lines: Lines) -> Lines:
    """The lines that tell their round. No other line can be drawn."""
    return [line for line in lines if line.get("round") is not None]


def mean_over_devices(line: Line, key: str) -> float:
    """The mean of one figure over the local models of a round. NaN if no device has the figure."""
    return float(_means([numbers((line.get("locals") or {}).get(key) or [None])])[0])


def _loss(model: Mapping[str, Any] | None) -> float | None:
    loss = (model or {}).get("loss")
    return None if loss is None else float(loss)


def _means(values: list[Floats]) -> Floats:
    """The mean of each array, without its NaN. NaN for an array that holds nothing else."""
    return np.array([np.mean(each[~np.isnan(each)]) if not np.isnan(each).all() else np.nan for each in values])


def _deviations(values: list[Floats]) -> Floats:
    """The standard deviation of each array, without its NaN. NaN for an array that holds nothing else."""
    return np.array([np.std(each[~np.isnan(each)]) if not np.isnan(each).all() else np.nan for each in values])
