"""The parts that pages are made of: pictures and tables. The macros of ``templates/parts.html`` show them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup
from matplotlib.figure import Figure

from fedemu.ops.pages.style import drawn, saved
from fedemu.ops.pages.svg import inline_svg
from fedemu.protocol.host.files import write_for_people

Kind = Literal["words", "number", "date", "code"]
"""What a column holds. The kind is also the CSS class of the column's cells."""
Draw = Callable[[], Figure | None]
"""Draws one figure. None if its data are missing."""

_NOT_FOR_READERS = re.compile(r"(?:^|(?<=\. ))None if [^.]*\.|``task`` [^.]*\.")


@dataclass(frozen=True)
class Picture:
    """A drawn plot: its name, its SVG as a part of a page, and what it shows, in sentences."""

    name: str
    svg: Markup
    about: str = ""


@dataclass(frozen=True)
class Table:
    """``columns`` are titles with kinds, from left to right. Each row has one text per column."""

    columns: Sequence[tuple[str, Kind]]
    rows: Sequence[Sequence[str]]


def numbers_by_name(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column holds words, the names of its rows, and whose other columns hold numbers."""
    first, *others = titles
    return Table([(first, "words"), *((title, "number") for title in others)], rows)


def bound(plots: Mapping[str, Callable[[Any], Figure | None]], data: Any) -> dict[str, Draw]:
    """Plots that draw ``data``, by name."""
    return {name: partial(draw, data) for name, draw in plots.items()}


def draw_all(plots: Mapping[str, Draw], folder: Path, prefix: str = "") -> list[Picture]:
    """Draw every plot for which there is data, and keep each as ``folder/<prefix><name>.png``.

    Pictures of one page that have the same name need different prefixes. Raises FedemuError if the disk refuses one.
    """
    pictures = []
    for name, draw in plots.items():
        figure = drawn(draw)
        if figure is not None:
            write_for_people(folder / f"{prefix}{name}.png", saved(figure, "png"))
            figure.set_layout_engine("none")  # the layout stands, and takes as long as the drawing
            title = name.replace("_", " ").replace("-", " ")
            svg = inline_svg(saved(figure, "svg").decode(), f"{prefix}{name}", title)
            pictures.append(Picture(name, Markup(svg), about(draw)))
    return pictures


def about(draw: Draw) -> str:
    """What a plot shows, in the sentences of its function's docstring."""
    told = inspect.getdoc(draw.func if isinstance(draw, partial) else draw) or ""
    return " ".join(_NOT_FOR_READERS.sub("", " ".join(told.split())).split())
