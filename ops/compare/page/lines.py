"""The lines of a comparison's pictures: one for each experiment, the same in all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedemu.ops.compare.compare import Comparison
from fedemu.ops.compare.curves import Curve
from fedemu.ops.compare.entry import Entry
from fedemu.ops.pages.behind import label_of
from fedemu.ops.pages.style import line_look, markers


def looks(comparison: Comparison) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """Every entry with the colour, line style and name of its line, the same in all pictures."""
    for entry in comparison.entries:
        yield entry, {**line_look(entry.place), "label": label_of(entry.label)}


def draw_curve(axes: Any, entry: Entry, look: dict[str, Any], curve: Curve) -> list[float]:
    """Draw a curve by round, as mean and band. Returns the values that the axis has to show."""
    if not len(curve.rounds):
        return []
    low, high = curve.mean - curve.deviation, curve.mean + curve.deviation
    axes.plot(curve.rounds, curve.mean, linewidth=1.8, **markers(entry.place, len(curve.rounds)), **look)
    if curve.deviation.any():
        band = {"color": look["color"], "alpha": 0.16, "linewidth": 0, "label": f"_{entry.label}"}
        axes.fill_between(curve.rounds, low, high, **band)
    return [*low, *high]
