"""The parts that pages are made of: pictures and tables. The macros of ``templates/parts.html`` show them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from fedemu.ops.pages.style import rendered

Kind = Literal["words", "number", "code"]
"""What a column holds. The kind is also the CSS class of the column's cells."""


@dataclass(frozen=True)
class Picture:
    """A PNG with the name of its plot."""

    name: str
    png: bytes

    @property
    def source(self) -> str:
        """The picture as a data URI."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


@dataclass(frozen=True)
class Table:
    """``columns`` are titles with kinds, from left to right. Each row has one text per column."""

    columns: Sequence[tuple[str, Kind]]
    rows: Sequence[Sequence[str]]


def numbers_by_name(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column holds words, the names of its rows, and whose other columns hold numbers."""
    first, *others = titles
    return Table([(first, "words"), *((title, "number") for title in others)], rows)


def draw_all(plots: Mapping[str, Callable[[Any], Figure | None]], data: Any, folder: Path) -> list[Picture]:
    """Draw every plot for which there is data, and keep each as ``folder/<name>.png``."""
    drawn = {name: rendered(draw, data) for name, draw in plots.items()}
    pictures = [Picture(name, png) for name, png in drawn.items() if png is not None]
    for picture in pictures:
        (folder / f"{picture.name}.png").write_bytes(picture.png)
    return pictures
