"""The colours of pages and pictures. Each has a name, by which ``style.css`` gives it a tone for dark pages.

The colours of lines are those of Okabe and Ito, which people with any kind of colour vision can tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

INK, AXIS, GRID, PAPER = "#22303c", "#c4ccd2", "#e8ecef", "#fefefe"
"""Text, the lines of axes, the lines of grids, and what lies below them."""
BLUE, ORANGE, GREEN, RED, PURPLE = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7"
SKY, GREY, SLATE = "#56b4e9", "#8b969e", "#5b6770"
ON_BRIGHT: Final = "#101820"
"""Text on a bright cell of a map. It is the same on a dark page."""

NAMED: Final[Mapping[str, str]] = {
    INK: "ink",
    AXIS: "axis",
    GRID: "grid",
    PAPER: "card",
    BLUE: "blue",
    ORANGE: "orange",
    GREEN: "green",
    RED: "red",
    PURPLE: "purple",
    SKY: "sky",
    GREY: "grey",
    SLATE: "slate",
}
"""The names of the colours that follow the page."""


def on_page(colour: str) -> str:
    """A colour as CSS: that of the page, which is another one if the page is dark, or else the colour itself."""
    return f"var(--{NAMED[colour]})" if colour in NAMED else colour
