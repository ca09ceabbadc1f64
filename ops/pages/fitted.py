"""Figures fitted to a column of a paper: their size, their texts, their legends and their lines."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from fedemu.ops.pages.behind import plain_name, series_of
from fedemu.ops.pages.cells import fit_cells
from fedemu.ops.pages.colours import SLATE
from fedemu.ops.pages.style import LINE_STYLES, MARKERS, STYLE, in_style, shortened

_STYLE: Final[Any] = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "path"}
"""Fonts are embedded in a PDF as TrueType. In an SVG letters are outlines, which look the same everywhere."""
_DRAWN: Final[float] = STYLE["font.size"]
_IN_CELLS: Final = 7.5
"""Texts that were drawn smaller than this stand in cells or above bars. They stay a little smaller."""
_LETTER: Final = 0.53
"""The mean width of a letter, by the size of the font."""
_MARKED: Final = 8
"""A line of many points has a marker at about this number of them."""
_DPI: Final = 300
_FOR_THREE: Final = 4.5
"""In a figure of fewer inches there is no room for three panels beside each other."""
_HIGHEST: Final = 9.0
"""A figure does not grow beyond this number of inches, the height of the text of a page."""
_TITLES: Final = ("left", "center", "right")


def fit(figure: Figure, width: float, font_size: float, titles: bool) -> None:
    """Fit a drawn figure to ``width`` inches, with texts of ``font_size`` points. Its title goes unless it is wanted.

    The titles of panels stay where there are several, because nothing else names them.
    """
    FigureCanvasAgg(figure)
    with in_style({"font.size": font_size}):
        was_wide, was_high = figure.get_size_inches()
        scale = width / was_wide
        rows = sum(-(-len(legend.get_texts()) // legend._ncols) for legend in _legends(figure))
        figure.set_size_inches(width, was_high * min(scale, 1.0))
        panels = [axes for axes in figure.axes if axes.get_visible() and axes.get_label() != "<colorbar>"]
        _regrid(figure, panels, width)
        _retitle(figure, panels, font_size, titles)
        _resize_texts(figure, font_size)
        _tell_apart(panels)
        _thin(figure, font_size / _DRAWN)
        now = sum(_new_legend(figure, legend, font_size) for legend in _legends(figure))
        line = 1.45 * font_size / 72
        if figure.get_layout_engine() is not None:
            taller = now * line - rows * 0.2 * min(scale, 1.0) + (0.0 if titles else -0.15 * scale)
            figure.set_size_inches(width, figure.get_size_inches()[1] + max(taller, -0.2))
            figure.set_layout_engine("constrained", w_pad=0.03, h_pad=0.03)
        else:
            _squeeze(panels)
        for _ in range(2):  # shorter labels leave the panels more room, which may take more ticks
            figure.draw_without_rendering()
            _wrap_labels(figure, panels)
            _part_ticks(figure)
        for axes in panels:
            fit_cells(axes)


def saved_for_paper(figure: Figure, kind: str) -> bytes:
    """The figure as a file. The same figure gives the same bytes, because no date is in it."""
    dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    buffer = io.BytesIO()
    with in_style(_STYLE):
        figure.savefig(buffer, format=kind, dpi=_DPI, transparent=kind != "png", metadata=dates.get(kind))
    return buffer.getvalue()


def _regrid(figure: Figure, panels: list[Any], width: float) -> None:
    """Put two panels beside each other where three or more would be too narrow."""
    grid = panels[0].get_subplotspec().get_gridspec() if panels and panels[0].get_subplotspec() else None
    if grid is None or grid.ncols < 3 or len(set(grid.get_width_ratios())) > 1 or width >= _FOR_THREE:
        return
    wide, high = figure.get_size_inches()
    down = -(-len(panels) // 2)
    figure.set_size_inches(wide, high * (down / 2) / (grid.nrows / grid.ncols))
    new = GridSpec(down, 2, figure=figure)
    for place, axes in enumerate(panels):
        axes.set_subplotspec(new[place // 2, place % 2])
        if axes.get_shared_y_axes().joined(axes, panels[0]):
            axes.tick_params(labelleft=place % 2 == 0)


def _retitle(figure: Figure, panels: list[Any], font_size: float, titles: bool) -> None:
    """Take away the figure's title, and what the names of axes say of their own limits."""
    places = {tuple(round(bound, 6) for bound in axes.get_position().bounds) for axes in panels}
    for text in figure.texts if not panels or figure.get_layout_engine() is None else ():
        if not titles and text.get_fontweight() == "bold":
            text.set_visible(False)
    for axes in panels:
        axes.set(xlabel=plain_name(axes.get_xlabel()), ylabel=plain_name(axes.get_ylabel()))
        for place in _TITLES:
            kept = axes.get_title(loc=place) if titles or len(places) > 1 else ""
            axes.set_title(kept, loc=place, fontweight="normal", fontsize=font_size)


def _legends(figure: Figure) -> list[Any]:
    return list(figure.legends)


def _resize_texts(figure: Figure, font_size: float) -> None:
    for axes in figure.axes:
        axes.tick_params(labelsize=font_size)
    for text in figure.findobj(Text):
        small = float(text.get_fontsize()) < _IN_CELLS
        text.set_fontsize(0.85 * font_size if small else font_size)


def _tell_apart(panels: list[Any]) -> None:
    """Give lines of one panel that differ only in colour other dashes and markers, so that grey prints tell them."""
    shared: dict[tuple[float, ...], list[Any]] = {}
    for axes in panels:
        named = [line for line in axes.lines if series_of(line) and not str(line.get_label()).startswith("_")]
        shared.setdefault(tuple(axes.get_position().bounds), []).extend(named)
    for lines in shared.values():
        looks = [(line.get_linestyle(), line.get_marker()) for line in lines]
        for place, line in enumerate(lines):
            if looks.count(looks[place]) > 1:
                line.set_marker(MARKERS[place % len(MARKERS)])
                if line.get_linestyle() not in ("None", ""):  # the points of dots alone must all be there
                    line.set_linestyle(LINE_STYLES[place % len(LINE_STYLES)])
                    line.set_markevery(max(1, len(line.get_xdata()) // _MARKED))
                line.set_markersize(min(line.get_markersize(), 5.0))


def _thin(figure: Figure, scale: float) -> None:
    """Make lines and markers as thin, beside the texts, as they were drawn."""
    for line in figure.findobj(Line2D):
        line.set_linewidth(max(0.5, line.get_linewidth() * scale))
        line.set_markersize(line.get_markersize() * scale)
    for axes in figure.axes:
        axes.tick_params(width=0.6, length=2.5, grid_linewidth=0.5)
        for spine in axes.spines.values():
            spine.set_linewidth(0.6)
            spine.set_edgecolor(SLATE)


def _new_legend(figure: Figure, old: Any, font_size: float) -> int:
    """Replace a legend by one that fits. Returns the number of lines of its text."""
    names: list[str] = [text.get_text() for text in old.get_texts()]
    lines: dict[str, list[Any]] = {}  # long names may be alike when they are shortened
    for axes in figure.axes:
        for bars in axes.containers:
            if isinstance(bars, ErrorbarContainer) and bars.lines[0] is not None:
                lines.setdefault(shortened(series_of(bars)), []).append(bars.lines[0])
        for line in axes.lines:
            lines.setdefault(shortened(series_of(line)), []).append(line)
    drawn = {name: iter(found) for name, found in lines.items()}
    handles = [next(drawn.get(name, iter(())), handle) for name, handle in zip(names, old.legend_handles, strict=True)]
    old.remove()
    most = 72 * figure.get_size_inches()[0] - 6
    letters = int((most - 4 * font_size) / (_LETTER * font_size))
    names = [textwrap.fill(name, max(letters, 12)) for name in names]
    for columns in range(len(names), 0, -1):
        legend = figure.legend(
            handles,
            names,
            loc="outside lower center",
            ncols=columns,
            fontsize=font_size,
            handlelength=2.4,
            columnspacing=1.2,
            borderpad=0.1,
            labelspacing=0.3,
        )
        if columns == 1 or legend.get_window_extent().width * 72 / figure.dpi <= most:
            break
        legend.remove()
    of_column = -(-len(names) // columns)
    return max(
        sum(name.count("\n") + 1 for name in names[start : start + of_column])
        for start in range(0, len(names), of_column)
    )


def _wrap_labels(figure: Figure, panels: list[Any]) -> None:
    """Break the names of axes and panels that are longer than their axis."""
    for axes in panels:
        box = axes.get_window_extent()
        _break(axes.xaxis.label, box.width)
        _break(axes.yaxis.label, box.height)
        for title in (axes._left_title, axes.title, axes._right_title):
            _break(title, box.width)
    across, up = figure._supxlabel, figure._supylabel  # type: ignore[attr-defined]
    if across is not None:
        _break(across, figure.bbox.width)
    if up is not None:  # it stands beside the panels, above the legend
        below = max((legend.get_window_extent().y1 for legend in _legends(figure)), default=figure.bbox.y0)
        up.set_y((below + figure.bbox.y1) / 2 / figure.bbox.height)
        _break(up, figure.bbox.y1 - below)


def _break(text: Text, room: float) -> None:
    """Break a text into lines if it is longer than ``room`` pixels."""
    words = " ".join(text.get_text().split())
    box = text.get_window_extent()
    length = box.height if text.get_rotation() == 90 else box.width
    if words and length > room:
        longest = max(map(len, text.get_text().split("\n")))
        text.set_text(textwrap.fill(words, max(8, int(0.97 * longest * room / length)), break_long_words=False))


def _squeeze(panels: list[Any]) -> None:
    """Make the texts around images fit: those beside them are turned, and those above them become smaller."""
    for axes in panels:
        column = axes.get_window_extent().width / max(1.0, axes.get_xlim()[1])
        for text in axes.texts:
            box = text.get_window_extent()
            if box.x0 < 0:
                text.set_rotation(90)
            elif text.get_ha() == "center" and box.width > column:
                text.set_fontsize(max(4.0, 0.92 * text.get_fontsize() * column / box.width))


def _part_ticks(figure: Figure) -> None:
    """Take ticks away, or turn their names, or make the figure higher, until no two names touch each other."""
    for axes in figure.axes:
        if not axes.get_visible():
            continue
        for axis, which in ((axes.xaxis, 0), (axes.yaxis, 1)):
            for bins in (8, 6, 5, 4, 3, 2):
                if not _touching(axis, which):
                    break
                locator = axis.get_major_locator()
                if isinstance(locator, MaxNLocator):
                    locator.set_params(nbins=bins)
                elif which == 0 and len(axis.get_ticklabels()) > 1:
                    axis.set_tick_params(rotation=90)
                    figure.draw_without_rendering()
                    if _touching(axis, which):
                        _every_second(axis)
                elif not _grow(figure, axes):
                    _every_second(axis)
                figure.draw_without_rendering()
            else:
                if which == 0 and _touching(axis, which):
                    axis.set_tick_params(rotation=90)


def _touching(axis: Any, which: int) -> bool:
    boxes = sorted(
        ((box.x0, box.x1) if which == 0 else (box.y0, box.y1))
        for box in (label.get_window_extent() for label in _labels(axis))
    )
    gap = 2.0 if which == 0 else 0.0
    return any(left[1] + gap > right[0] for left, right in pairwise(boxes))


def _grow(figure: Figure, axes: Any) -> bool:
    """Make the figure so much higher that the names of the rows of a panel part. False if it may not be.

    Numbers in a row tell what stands between them, so they are not worth the room.
    """
    labels = list(_labels(axes.yaxis))
    if figure.get_layout_engine() is None or all(label.get_text().strip().isdecimal() for label in labels):
        return False
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0 + box.y1)
    apart = [(high.y0 + high.y1 - low.y0 - low.y1) / 2 for low, high in pairwise(boxes)]
    needed = [(high.height + low.height) / 2 for low, high in pairwise(boxes)]
    factor = max(need / max(gap, 1e-3) for need, gap in zip(needed, apart, strict=True))
    wide, high = figure.get_size_inches()
    now = high + (1.02 * factor - 1) * axes.get_window_extent().height / figure.dpi
    if now > max(_HIGHEST, high):
        return False
    figure.set_size_inches(wide, now)
    return True


def _labels(axis: Any) -> Iterator[Text]:
    low, high = sorted(axis.get_view_interval())
    for tick in axis.get_major_ticks():
        if tick.label1.get_visible() and tick.label1.get_text() and low - 1e-9 <= tick.get_loc() <= high + 1e-9:
            yield tick.label1


def _every_second(axis: Any) -> None:
    places, names = list(axis.get_majorticklocs()), [label.get_text() for label in axis.get_ticklabels()]
    if len(places) == len(names) and len(names) > 2:
        axis.set_ticks(places[::2], names[::2])
