"""The plots of one run, drawn from the rows of ``metrics.jsonl``. A plot is None if the rows lack its data.

The figures that are named are those of Aljahdali et al., "Understanding and Mitigating Forgetting in Federated
Learning".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from fedemu.ops.figures import percent, readable_bytes, time_unit
from fedemu.ops.pages.axes import SHARES, fit_shares, limits, say_cut
from fedemu.ops.pages.colours import BLUE, GREEN, GREY, ORANGE, PAPER, PURPLE, RED, SKY, SLATE
from fedemu.ops.pages.style import (
    Floats,
    Rows,
    accuracy_bar,
    class_map,
    legend_below,
    marker,
    name_classes,
    new_figure,
    numbers,
    round_ticks,
    series,
)
from fedemu.protocol.messages import OUTCOMES

OUTCOME_COLOURS = dict(zip(OUTCOMES, (GREEN, GREY, ORANGE, SKY, RED, SLATE), strict=True))
"""The colour of each outcome, in the order in which bars are stacked, from below."""
MOST_BARS = 100
"""With more rounds than this, bars are drawn as one area."""
MOST_STEPS = 4000
"""With more steps than this, an area is an image, also in a drawing: no screen shows all of them."""


def accuracy_and_loss(rows: Rows) -> Figure | None:
    """Test accuracy and test loss by round. A dot marks the best accuracy."""
    rounds, accuracy = series(rows, "accuracy")
    if not rounds:
        return None
    figure, axes = new_figure("Accuracy and loss")
    dots = marker(len(rounds))
    axes.plot(rounds, accuracy, color=BLUE, linewidth=2, marker=dots, label="accuracy")
    fit_shares(axes, accuracy, "test accuracy")
    axes.yaxis.label.set_color(BLUE)
    best = int(np.argmax(accuracy))
    axes.plot(
        rounds[best],
        accuracy[best],
        "o",
        color=BLUE,
        markeredgecolor=PAPER,
        markersize=8,
        zorder=3,
        label="_best accuracy",
    )
    axes.set_title(f"Accuracy and loss (best {percent(accuracy[best])}, round {rounds[best]})")
    rounds, loss = series(rows, "loss")
    if rounds:
        other = axes.twinx()
        other.grid(False)
        other.plot(rounds, loss, color=ORANGE, linewidth=1.6, linestyle="--", marker=dots, label="loss")
        other.set_ylabel("test loss (dashed)")
        if min(loss) < max(loss) / 2 or len(loss) == 1:  # two single dots in the middle would hide each other
            other.set_ylim(bottom=0)
        say_cut(other)
        other.spines[["top"]].set_visible(False)
    return figure


def class_accuracy(rows: Rows, names: Sequence[str] = ()) -> Figure | None:
    """A heat map of the accuracy by class: classes upwards, rounds to the right (Aljahdali et al., figure 1b)."""
    rows = [row for row in rows if row.class_accuracy]
    if not rows:
        return None
    table = numbers([row.class_accuracy for row in rows]).T
    figure, axes = new_figure("Accuracy by class", height=min(6.0, 2.2 + 0.13 * max(len(table), 9)))
    image = class_map(axes, [row.round for row in rows], table)
    name_classes(axes.yaxis, names, len(table))
    axes.set_ylabel("class")
    accuracy_bar(figure, image, axes)
    return figure


def round_forgetting(rows: Rows) -> Figure | None:
    """A bar for each evaluation: the accuracy that classes lost since the one before. The dashed line is the mean."""
    rounds, values = series(rows, "round_forgetting")
    if not rounds:
        return None
    mean = float(np.mean(values))
    figure, axes = new_figure(f"Round forgetting (mean {percent(mean)})")
    if len(rounds) <= MOST_BARS:
        apart = min(np.diff(rounds), default=1)
        axes.bar(rounds, values, width=0.85 * apart, color=RED, alpha=0.55)
    else:
        axes.plot(rounds, values, color=RED, linewidth=0.6, drawstyle="steps-mid")
        axes.fill_between(rounds, values, step="mid", color=RED, alpha=0.55, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(SHARES)
    axes.axhline(mean, color=RED, linewidth=1.3, linestyle="--")
    axes.set_ylabel("accuracy lost, mean over classes")
    return figure


def round_forgetting_ecdf(rows: Rows) -> Figure | None:
    """The share of rounds that forgot at most the amount on the horizontal axis (Aljahdali et al., figure 4)."""
    _, values = series(rows, "round_forgetting")
    if not values:
        return None
    figure, axes = new_figure("Distribution of round forgetting (ECDF)")
    axes.xaxis.set_major_locator(round_ticks(6))
    axes.ecdf(values, color=RED, linewidth=2)
    axes.set(xlim=(0, None), ylim=(0, 1.02))  # so that a line at 100 % is seen whole
    axes.set_xlabel("round forgetting of at most")
    axes.xaxis.set_major_formatter(SHARES)
    axes.yaxis.set_major_formatter(SHARES)
    axes.set_ylabel("rounds")
    return figure


def consistency(rows: Rows) -> Figure | None:
    """The cosine of the accuracies by class with those of the evaluation before (Lee et al., 2022, figure 2b)."""
    rounds, values = series(rows, "consistency")
    if not rounds:
        return None
    figure, axes = new_figure(f"Consistency of predictions (mean {float(np.mean(values)):.3f})")
    axes.plot(rounds, values, color=PURPLE, linewidth=1.6, marker=marker(len(rounds)))
    low, high = limits(values)
    axes.set_ylim(low, high + 0.02 * (high - low))
    cut = f" (axis: from {low:g})" if low else ""
    axes.set_ylabel(f"cosine{cut}")
    return figure


def outcomes(rows: Rows) -> Figure | None:
    """Stacked bars for each round: how many of the selected devices ended in each outcome."""
    rows = [row for row in rows if row.selected]
    if not rows:
        return None
    figure, axes = new_figure("Outcomes of the selected devices")
    rounds = [row.round for row in rows]
    base = np.zeros(len(rows))
    for outcome, colour in OUTCOME_COLOURS.items():
        counts = np.array([row.outcomes[outcome] for row in rows], dtype=np.float64)
        if counts.any():
            draw_steps(axes, rounds, base, base + counts, color=colour, label=outcome)
        base += counts
    axes.set_ylabel("devices")
    return legend_below(figure, axes)


def fleet_over_time(rows: Rows) -> Figure | None:
    """The devices that had joined, were on-line and were away at the start of each round, by the experiment's clock.

    A line shows how many devices have crashed by the end of each round.
    """
    known = [row for row in rows if row.online is not None and row.virtual_time is not None]
    if not known:
        return None
    times, online, joined, crashed = numbers(
        [(row.virtual_time, row.online, row.joined or row.online, row.crashed or 0) for row in known]
    ).T
    divisor, unit = time_unit(float(times[-1]))
    times = times / divisor
    ends = {row.round: row.virtual_time for row in rows}
    starts = numbers([ends.get(row.round - 1) or 0.0 for row in known]) / divisor
    # The fleet of the last round is shown until its end.
    starts, online, joined = np.append(starts, times[-1]), np.append(online, online[-1]), np.append(joined, joined[-1])
    figure, axes = new_figure("Fleet")
    axes.xaxis.set_major_locator(round_ticks())
    dots = marker(8 * len(times))
    axes.step(starts, joined, where="post", color=SLATE, linewidth=1.8, marker=dots, label="joined")
    area: dict[str, Any] = {"step": "post", "linewidth": 0, "rasterized": is_long(starts)}
    if (joined > online).any():
        axes.fill_between(starts, online, joined, color=GREY, alpha=0.25, label="away", **area)
    axes.step(starts, online, where="post", color=GREEN, linewidth=1.8, marker=dots, label="on-line")
    axes.fill_between(starts, online, color=GREEN, alpha=0.15, **area)
    if crashed.any():
        axes.step(
            times, np.cumsum(crashed), where="post", color=RED, linewidth=1.8, marker=dots, label="crashed so far"
        )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(round_ticks(integer=True))
    axes.set_xlabel(f"time of the experiment [{unit}]")
    axes.set_ylabel("devices")
    return legend_below(figure, axes)


def traffic(rows: Rows) -> Figure | None:
    """All bytes until each round's end: emulated, as real devices would move them, and on the wire of this machine."""
    figure, axes = new_figure("Bytes, cumulative")
    drawn = False
    for key, label, colour, style in (
        ("bytes_down", "down, emulated", BLUE, "-"),
        ("bytes_up", "up, emulated", ORANGE, "-"),
        ("wire_bytes_down", "down, on the wire", BLUE, ":"),
        ("wire_bytes_up", "up, on the wire", ORANGE, ":"),
    ):
        rounds, values = series(rows, key)
        if rounds:
            dots = marker(8 * len(rounds))
            axes.plot(rounds, np.cumsum(values), color=colour, linestyle=style, linewidth=1.8, marker=dots, label=label)
            drawn = True
    if not drawn:
        return None
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: readable_bytes(value)))
    return legend_below(figure, axes, 2)


def duration(rows: Rows) -> Figure | None:
    """The real time that each round took."""
    rounds, values = series(rows, "round_seconds")
    if not rounds:
        return None
    figure, axes = new_figure("Real time per round")
    factor, unit = (1000, "milliseconds") if max(values) < 3 else (1, "seconds")
    axes.plot(rounds, np.array(values) * factor, color=PURPLE, linewidth=1.6, marker=marker(len(rounds)))
    axes.set_ylim(bottom=0)
    axes.set_ylabel(unit)
    return figure


PLOTS: Mapping[str, Callable[[Rows], Figure | None]] = {
    "accuracy": accuracy_and_loss,
    "class_accuracy": class_accuracy,
    "round_forgetting": round_forgetting,
    "round_forgetting_ecdf": round_forgetting_ecdf,
    "consistency": consistency,
    "outcomes": outcomes,
    "fleet": fleet_over_time,
    "bytes": traffic,
    "duration": duration,
}


def draw_steps(axes: Any, rounds: Sequence[int], low: Floats, high: Floats, **look: Any) -> None:
    """Draw an area with a step for each round, which is one shape however many rounds there are."""
    every = np.arange(rounds[0], rounds[-1] + 1)
    known = np.isin(every, rounds)
    below, above = np.zeros(len(every)), np.zeros(len(every))
    below[known], above[known] = low, high
    edges = np.append(every - 0.5, every[-1] + 0.5)
    axes.stairs(above, edges, baseline=below, fill=True, linewidth=0, rasterized=is_long(every), **look)


def is_long(steps: Sized) -> bool:
    """Whether an area with so many steps is drawn as an image: as a shape it takes a hundred bytes for each of them."""
    return len(steps) > MOST_STEPS
