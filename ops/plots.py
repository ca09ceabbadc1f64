"""The plots of one run, drawn from the rows of ``metrics.jsonl``; a plot is None for want of data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

matplotlib.use("Agg")

Row = Mapping[str, Any]
Rows = Sequence[Row]

INK = "#22303c"
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f6fb2", "#e08a1e", "#3c9d5f", "#c8443f", "#7a5fa8", "#9aa5ae"
OUTCOME_COLOURS = {
    "accepted": GREEN,
    "cancelled": GREY,
    "late": ORANGE,
    "dropped": BLUE,
    "failed": RED,
    "rejected": PURPLE,
}
STYLE: Any = {
    "font.size": 9.5,
    "axes.edgecolor": "#c4ccd2",
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e8ecef",
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def _figure(title: str, *, height: float = 3.4) -> tuple[Figure, Any]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.6, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(title)
        axes.set_xlabel("round")
        axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Rounds and values of the rows that have the key."""
    pairs = [(int(row["round"]), float(row[key])) for row in rows if row.get(key) is not None]
    return [round for round, _ in pairs], [value for _, value in pairs]


def accuracy_and_loss(rows: Rows) -> Figure | None:
    rounds, accuracy = _series(rows, "accuracy")
    if not rounds:
        return None
    figure, axes = _figure("Accuracy and loss")
    marker = "o" if len(rounds) < 15 else ""
    axes.plot(rounds, accuracy, color=BLUE, linewidth=2, marker=marker, label="accuracy")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("test accuracy", color=BLUE)
    best = int(np.argmax(accuracy))
    axes.annotate(
        f"best {accuracy[best]:.1%}",
        (rounds[best], accuracy[best]),
        xytext=(-6, -16),
        textcoords="offset points",
        ha="right",
        color=BLUE,
        arrowprops={"arrowstyle": "-", "color": BLUE, "linewidth": 0.8},
    )
    rounds, loss = _series(rows, "loss")
    if rounds:
        other = axes.twinx()
        other.grid(False)
        other.plot(rounds, loss, color=ORANGE, linewidth=1.6, linestyle="--", marker=marker, label="loss")
        other.set_ylabel("test loss", color=ORANGE)
        other.set_ylim(bottom=0)
        other.spines[["top"]].set_visible(False)
    return figure


def class_accuracy(rows: Rows) -> Figure | None:
    """A heat map: classes upwards, rounds to the right."""
    rows = [row for row in rows if row.get("class_accuracy")]
    if not rows:
        return None
    table = np.array([[np.nan if v is None else v for v in row["class_accuracy"]] for row in rows], dtype=float).T
    figure, axes = _figure("Accuracy by class", height=min(6.0, 2.2 + 0.13 * max(table.shape[0], 9)))
    axes.grid(False)
    first, last = int(rows[0]["round"]), int(rows[-1]["round"])
    image = axes.imshow(
        table,
        aspect="auto",
        origin="lower",
        cmap="viridis",
        vmin=0,
        vmax=1,
        interpolation="nearest",
        extent=(first - 0.5, last + 0.5, -0.5, table.shape[0] - 0.5),
    )
    axes.set_ylabel("class")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    figure.colorbar(image, ax=axes, format=PercentFormatter(1.0), pad=0.02)
    return figure


def round_forgetting(rows: Rows) -> Figure | None:
    rounds, values = _series(rows, "round_forgetting")
    if not rounds:
        return None
    figure, axes = _figure("Round forgetting")
    axes.bar(rounds, values, width=0.85, color=RED, alpha=0.55)
    mean = float(np.mean(values))
    axes.axhline(mean, color=RED, linewidth=1.3, linestyle="--")
    axes.text(rounds[-1], mean, f" mean {mean:.3f}", color=RED, va="bottom", ha="right")
    axes.set_ylabel("accuracy lost, mean over classes")
    return figure


def outcomes(rows: Rows) -> Figure | None:
    rows = [row for row in rows if row.get("selected")]
    if not rows:
        return None
    figure, axes = _figure("Outcomes of the selected devices")
    rounds = [int(row["round"]) for row in rows]
    base = np.zeros(len(rows))
    for outcome, colour in OUTCOME_COLOURS.items():
        counts = np.array([float(row.get(outcome) or 0) for row in rows])
        if counts.any():
            axes.bar(rounds, counts, bottom=base, width=1.0, color=colour, label=outcome, linewidth=0)
        base += counts
    axes.set_ylabel("devices")
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, -0.42))
    return figure


def fleet_online(rows: Rows) -> Figure | None:
    """Devices on-line when a round began, against the experiment's clock."""
    points = [(float(r["virtual_time"]), float(r["online"])) for r in rows if r.get("online") is not None]
    if not points:
        return None
    times, online = np.array(points).T
    divisor, unit = time_unit(float(times[-1]))
    figure, axes = _figure("Fleet on-line")
    axes.xaxis.set_major_locator(MaxNLocator())
    axes.step(times / divisor, online, where="post", color=GREEN, linewidth=1.8)
    axes.fill_between(times / divisor, online, step="post", color=GREEN, alpha=0.15)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"time of the experiment [{unit}]")
    axes.set_ylabel("devices")
    return figure


def traffic(rows: Rows) -> Figure | None:
    figure, axes = _figure("Bytes, cumulative")
    drawn = False
    for key, label, colour, style in (
        ("bytes_down", "down, emulated", BLUE, "-"),
        ("bytes_up", "up, emulated", ORANGE, "-"),
        ("wire_bytes_down", "down, on the wire", BLUE, ":"),
        ("wire_bytes_up", "up, on the wire", ORANGE, ":"),
    ):
        rounds, values = _series(rows, key)
        if rounds:
            axes.plot(rounds, np.cumsum(values), color=colour, linestyle=style, linewidth=1.8, label=label)
            drawn = True
    if not drawn:
        return None
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: readable_bytes(value)))
    axes.legend()
    return figure


def duration(rows: Rows) -> Figure | None:
    rounds, values = _series(rows, "round_seconds")
    if not rounds:
        return None
    figure, axes = _figure("Real time per round")
    axes.plot(rounds, np.array(values) * 1000, color=PURPLE, linewidth=1.6)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("milliseconds")
    return figure


PLOTS: Mapping[str, Callable[[Rows], Figure | None]] = {
    "accuracy": accuracy_and_loss,
    "class_accuracy": class_accuracy,
    "round_forgetting": round_forgetting,
    "outcomes": outcomes,
    "fleet": fleet_online,
    "bytes": traffic,
    "duration": duration,
}


def readable_bytes(size: float) -> str:
    """``12.3 MB``, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def time_unit(seconds: float) -> tuple[float, str]:
    """A divisor and the unit in which a span reads well."""
    for divisor, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 3 * divisor:
            return divisor, unit
    return 1.0, "seconds"
