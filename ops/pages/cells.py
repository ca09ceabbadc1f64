"""The numbers in the cells of maps are made as small as their cells."""

from __future__ import annotations

from typing import Any, Final

_ROOM: Final = 0.85
"""The share of a cell that its number may take, in its width and in its height."""
_BESIDE_DOT: Final = 0.75
"""The same where a dot stands beside the number."""
_UPRIGHT: Final = 5.0
"""Numbers are turned before they become smaller than this number of points."""
_LEAST: Final = 4.0
"""Numbers that would be smaller than this number of points, which nobody can read, are left out."""


def fit_cells(axes: Any) -> None:
    """Make the numbers in the cells of a map so small that they fit, all alike, after the figure was drawn.

    They are turned if they would be too small otherwise, and left out if that is not enough.
    """
    numbers = [text for text in axes.texts if text.get_ha() == text.get_va() == "center"]
    table = next((image.get_array() for image in axes.images), None)
    if not numbers or table is None:
        return
    for text in numbers:
        text.set_rotation(0)
    panel, room = axes.get_window_extent(), _BESIDE_DOT if axes.lines else _ROOM
    wide, high = room * panel.width / table.shape[1], room * panel.height / table.shape[0]
    boxes = [text.get_window_extent() for text in numbers]
    longest, tallest = max(box.width for box in boxes), max(box.height for box in boxes)
    size = float(numbers[0].get_fontsize())
    upright = size * min(1.0, wide / longest, high / tallest)
    turned = size * min(1.0, wide / tallest, high / longest)
    now = upright if upright >= min(_UPRIGHT, size) else max(upright, turned)
    for text in numbers:
        text.set(fontsize=now, rotation=90 if now > upright else 0, visible=now >= _LEAST)
