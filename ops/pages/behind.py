"""The data behind a figure: what its lines, bands, bars and maps show, as lines of a CSV file."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.ticker import FixedLocator

_CUT: Final = re.compile(r"\s*\(?(?:axis: |axis not from 0).*$", re.DOTALL)
"""What the label of an axis says of its own limits. It is no part of the name of what is shown."""
_JOINER: Final = "\u2060"
"""A character without width. Before a name that begins with ``_`` it makes matplotlib show the name in legends."""


class Datum(NamedTuple):
    """One point of a figure. Shares are shares of 1, whatever the axis shows.

    ``panel`` is empty if the figure has only one. ``low`` and ``high`` are the ends of a band or of an error bar, empty
    without one.
    """

    panel: str
    series: str
    x: float
    y: float
    low: float | None
    high: float | None
    x_name: str
    y_name: str


def data_behind(figure: Figure) -> list[Datum]:
    """All points that a figure shows, panel by panel. Its titles have to be there still, because they name panels."""
    panels = [axes for axes in figure.axes if axes.get_visible() and axes.get_label() != "<colorbar>"]
    places = {tuple(np.round(axes.get_position().bounds, 6)) for axes in panels}
    return [datum for axes in panels for datum in _of_panel(axes, _title(axes) if len(places) > 1 else "")]


def csv_of(data: list[Datum]) -> str:
    """The points as CSV with a head line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Datum._fields)
    for datum in data:
        writer.writerow([_written(value) for value in datum])
    return text.getvalue()


def label_of(series: str) -> str:
    """The label of an artist that legends show, whatever the series is called. ``series_of`` gives the name back."""
    return f"{_JOINER}{series}" if series.startswith("_") else series


def series_of(artist: Any) -> str:
    """The name of what an artist shows. A label that begins with ``_`` is in no legend. Empty if it has none."""
    label = str(artist.get_label() or "")
    return "" if re.match(r"_(child|container|nolegend)", label) else label.removeprefix("_").removeprefix(_JOINER)


def plain_name(label: str) -> str:
    """The name of an axis or of a panel in one line, without what it says of the limits of the axis."""
    return _CUT.sub("", label).replace("\n", " ").replace(r"\$", "$").strip()


def _of_panel(axes: Any, panel: str) -> Iterator[Datum]:
    beside = (other.get_xlabel() for other in axes.get_shared_x_axes().get_siblings(axes))
    shared = (other.get_ylabel() for other in axes.get_shared_y_axes().get_siblings(axes))
    across = axes.get_xlabel() or next(filter(None, beside), "")
    upwards = axes.get_ylabel() or next(filter(None, shared), "")
    # The names that all panels have in common stand at the edge of the figure.
    names = (
        plain_name(across or axes.figure.get_supxlabel()),
        plain_name(upwards or axes.figure.get_supylabel()),
    )
    rows = _names_of_ticks(axes.yaxis)
    shown: set[Any] = set()
    low: float | None
    high: float | None
    bands = {series_of(each): _band(each) for each in axes.collections if isinstance(each, PolyCollection)}
    for container in axes.containers:
        series = series_of(container)
        if isinstance(container, BarContainer):
            for bar in container:
                base = bar.get_y()
                low, high = (base, base + bar.get_height()) if base else (None, None)
                yield Datum(
                    panel, series or names[1], bar.get_x() + bar.get_width() / 2, bar.get_height(), low, high, *names
                )
        elif isinstance(container, ErrorbarContainer):
            line, caps, bars = container.lines
            shown |= {line, *caps}
            if line is not None:
                of_bars, of_level_bars = _ends(bars, 0), _ends(bars, 1)
                for x, y in zip(*_data_of(line), strict=True):
                    low, high = of_bars.get(x) or of_level_bars.get(y) or (None, None)
                    yield Datum(panel, series or series_of(line), x, y, low, high, *names)
    for line in axes.lines:
        if line in shown or line.get_transform().contains_branch_seperately(axes.transData) != (True, True):
            continue  # it is told already, or it goes across the whole panel and only marks a value
        xs, ys = _data_of(line)
        series = series_of(line)
        band = bands.get(series, {}) if series else {}
        for x, y in zip(xs, ys, strict=True):
            low, high = band.get(x, (None, None))
            row = rows.get(y, "")
            yield Datum(panel, series or row or names[1], x, float(row) if _is_number(row) else y, low, high, *names)
    for patch in axes.patches:
        if isinstance(patch, StepPatch):
            values, edges, base = patch.get_data()
            middles, lows = (edges[:-1] + edges[1:]) / 2, np.broadcast_to(0.0 if base is None else base, values.shape)
            for x, low, high in zip(middles, lows, values, strict=True):
                yield Datum(panel, series_of(patch), x, high - low, low, high, *names)
    for image in axes.images:
        yield from _of_image(axes, image, panel, names, rows)


def _of_image(axes: Any, image: Any, panel: str, names: tuple[str, str], rows: dict[float, str]) -> Iterator[Datum]:
    """The cells of a map: ``series`` is the name or the number of the row, ``y`` the value of the cell."""
    table = np.ma.filled(np.ma.masked_invalid(np.ma.asarray(image.get_array(), dtype=np.float64)), np.nan)
    if table.ndim != 2:
        return  # a photograph, which has no numbers
    left, right, bottom, top = image.get_extent()
    height, width = table.shape
    low, high = (bottom, top) if image.origin == "lower" else (top, bottom)
    xs = left + (np.arange(width) + 0.5) * (right - left) / width
    ys = low + (np.arange(height) + 0.5) * (high - low) / height
    columns = _names_of_ticks(axes.xaxis)
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            at = columns.get(xs[column], "")
            series = rows.get(ys[row]) or f"{ys[row]:g}"
            series = f"{names[1]} {series}".strip() if series.isdigit() else series
            x = float(at) if _is_number(at) else xs[column]
            yield Datum(panel, series, x, value, None, None, names[0], "value")


def _data_of(line: Any) -> tuple[list[float], list[float]]:
    """The points of a line that are known."""
    pairs = [
        (float(x), float(y))
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
        if not np.isnan([float(x), float(y)]).any()
    ]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _band(band: PolyCollection) -> dict[float, tuple[float, float]]:
    """The ends of a band by x. matplotlib walks along one edge and comes back along the other."""
    ends: dict[float, tuple[float, float]] = {}
    for path in band.get_paths():
        corners = np.asarray(path.vertices, dtype=np.float64)
        count = (len(corners) - 3) // 2
        there, back = corners[1 : count + 1], corners[count + 2 : 2 * count + 2][::-1]
        for (x, first), (same, second) in zip(there, back, strict=True):
            if x == same:
                ends[float(x)] = (float(min(first, second)), float(max(first, second)))
    return ends


def _ends(bars: Any, same: int) -> dict[float, tuple[float, float]]:
    """The ends of upright error bars by x (``same`` 0), or of level ones by y (1).

    A point that is not known has a segment without ends.
    """
    segments = [segment for bar in bars if isinstance(bar, LineCollection) for segment in bar.get_segments()]
    return {
        float(segment[0][same]): (float(segment[0][1 - same]), float(segment[1][1 - same]))
        for segment in segments
        if len(segment) == 2 and segment[0][same] == segment[1][same]
    }


def _names_of_ticks(axis: Any) -> dict[float, str]:
    """The names at an axis by their places, if it has names. Names and numbers that have no room there are added.

    Names without room belong to minor ticks, which are not drawn, such as those of many devices.
    """
    found: dict[float, str] = {}
    for locator, formatter in (
        (axis.get_major_locator(), axis.get_major_formatter()),
        (axis.get_minor_locator(), axis.get_minor_formatter()),
    ):
        if isinstance(locator, FixedLocator):
            ticks = [float(place) for place in locator()]
            found |= zip(ticks, formatter.format_ticks(ticks), strict=True)
    named = {place: name.replace("\n", " ").replace(r"\$", "$") for place, name in sorted(found.items())}
    numbers = [int(name) - place for place, name in named.items() if name.isdigit()]
    if len(numbers) == len(named) > 1 and len(set(numbers)) == 1:
        first = numbers[0]
        return {float(place): f"{place + first:g}" for place in range(int(max(named)) + 1000)}
    return named


def _title(axes: Any) -> str:
    return plain_name(next((title for loc in ("left", "center", "right") if (title := axes.get_title(loc=loc))), ""))


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"-?\d+(\.\d+)?", text))


def _written(value: Any) -> Any:
    return "" if value is None else f"{value:.10g}" if isinstance(value, float | np.floating) else value
