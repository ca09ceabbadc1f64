"""How fedemu's pictures look, and what all of them need: figures, colours, ticks, legends, and numbers with gaps."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, ParamSpec

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap, LinearSegmentedColormap, ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from fedemu.coordinator.record.row import Row
from fedemu.ops.pages.axes import SHARES
from fedemu.ops.pages.behind import series_of
from fedemu.ops.pages.colours import AXIS, BLUE, GREEN, GRID, INK, ORANGE, PURPLE, RED, SKY, SLATE

Rows = Sequence[Row]
Floats = NDArray[np.float64]

WIDTH = 5.6
"""The width of a figure in inches: two of them stand beside each other on a page."""
PALETTE = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, SLATE)
"""The colours of lines that are compared. After the last colour they are used again with another line style."""
LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = "osD^vP*X<>"
_LINES = 3
"""A name beside an axis or above a panel has at most so many lines."""
_MOST_NAMED = 24
"""More classes than this have their numbers at an axis, not their names."""
_LONGEST_CLASS = 16
"""The name of a class at an axis has at most so many characters."""
ACCURACY_COLOURS = matplotlib.colormaps["viridis"].with_extremes(bad=(0.55, 0.6, 0.64, 0.35))
"""The colours of accuracies from 0 to 1. A missing accuracy is grey."""
ORDERED = LinearSegmentedColormap.from_list("ordered", ["#2f6fd6", "#8a5fd0", "#c9559b", "#de6a4a", "#c98a00"])
"""The colours of things in an order, such as periods. Each can be seen on white and on black."""
_FONT = "DejaVu Sans"
NO_LETTER = "Glyph "
"""How matplotlib warns of a letter that the font lacks. Browsers have other fonts for it, so pages show it."""
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": [_FONT],
    "font.size": 9.5,
    "figure.facecolor": "white",
    "axes.facecolor": "none",
    "axes.edgecolor": AXIS,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedemu",
}

P = ParamSpec("P")


def in_style(further: Mapping[str, Any] | None = None) -> AbstractContextManager[None]:
    """In this block pictures have fedemu's style, and nothing that people have set for theirs, as in ``matplotlibrc``.

    ``further`` are settings of matplotlib that the block needs beside it.
    """
    now: Any = matplotlib.rcParams
    own = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend" and value != now[key]}
    style: Any = own | STYLE | dict(further or {})
    return matplotlib.rc_context(style)


def drawn(draw: Callable[P, Figure | None], *args: P.args, **kwargs: P.kwargs) -> Figure | None:
    """The figure that ``draw`` returns, in fedemu's style."""
    with in_style():
        return draw(*args, **kwargs)


def saved(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """The figure as a PNG on white, or as an SVG without a background.

    ``Figure.savefig`` would draw it twice, the first time only to lay it out, which a single drawing does as well.
    """
    buffer = io.BytesIO()
    with in_style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", NO_LETTER)
        if kind == "png":
            figure.set_dpi(120)
            FigureCanvasAgg(figure).print_png(buffer)  # type: ignore[no-untyped-call]
        else:
            figure.set_dpi(144)
            figure.patch.set_visible(False)
            text = io.TextIOWrapper(buffer, encoding="utf-8")
            FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})  # type: ignore[no-untyped-call]
            text.flush()
            text.detach()
            figure.patch.set_visible(True)
    return buffer.getvalue()


def new_figure(title: str, *, width: float = WIDTH, height: float = 3.2) -> tuple[Figure, Any]:
    """A figure with one pair of axes over the rounds. ``width`` and ``height`` are inches."""
    figure = bare_figure(width, height)
    axes = figure.add_subplot()
    axes.set_title(title)
    over_rounds(axes)
    return figure, axes


def bare_figure(width: float, height: float) -> Figure:
    """A figure without axes. ``width`` and ``height`` are inches."""
    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    return figure


def over_rounds(axes: Any) -> None:
    """Label the horizontal axis as that of the rounds."""
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(round_ticks(integer=True))


def round_ticks(bins: int = 9, *, integer: bool = False) -> MaxNLocator:
    """At most ``bins`` intervals between ticks at multiples of 1, 2, 5 or 10."""
    return (_WholeTicks if integer else MaxNLocator)(bins, integer=integer, steps=[1, 2, 5, 10])


class _WholeTicks(MaxNLocator):
    """Ticks at whole numbers, also where an axis is so short that it holds a single one."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        return [tick for tick in super().tick_values(vmin, vmax) if float(tick).is_integer()] or [round(vmin)]


def class_map(axes: Any, rounds: Sequence[int], table: Floats) -> Any:
    """Draw ``table [classes, rounds]`` as a heat map. A round that was not evaluated shows the last evaluated one."""
    every = np.arange(rounds[0], rounds[-1] + 1)
    shown = table[:, np.searchsorted(rounds, every, side="right") - 1]
    extent = (rounds[0] - 0.5, rounds[-1] + 0.5, -0.5, len(table) - 0.5)
    axes.grid(False)
    axes.yaxis.set_major_locator(round_ticks(12, integer=True))
    return cell_map(axes, shown, cmap=ACCURACY_COLOURS, vmin=0, vmax=1, origin="lower", extent=extent)


def name_classes(axis: Any, names: Sequence[str], classes: int) -> bool:
    """Write the names of classes at an axis. False if there are none, or too many: then their numbers stay."""
    if not (can_name(names) and len(names) == classes <= _MOST_NAMED):
        return False
    axis.set_ticks(range(classes), [shortened(name, _LONGEST_CLASS) for name in names], fontsize=8)
    return True


def can_name(names: Sequence[str]) -> bool:
    """Whether names of classes can stand at an axis: they are not just numbers, and the font has all their letters."""
    return [*names] != [*map(str, range(len(names)))] and not letters_without_form("".join(names))


def letters_without_form(text: str) -> str:
    """The letters of a text that the font of figures lacks, each once. Boxes stand in their place, except on pages."""
    font = get_font(findfont(_FONT))
    return "".join(letter for letter in dict.fromkeys(text) if letter != "\n" and not font.get_char_index(ord(letter)))


def cell_map(axes: Any, table: Any, **look: Any) -> Any:
    """Draw ``table [rows, columns]`` as cells with sharp edges, however large the picture is shown."""
    return axes.imshow(table, aspect=look.pop("aspect", "auto"), interpolation="none", **look)


def sequence_colours(count: int) -> Floats:
    """``count`` colours ``[count, rgba]`` of things in an order, such as the periods of a run."""
    return np.array(ORDERED(np.linspace(0, 1, count)), dtype=np.float64)


def tones(colours: Colormap) -> tuple[str, ...]:
    """A few colours of a map, from its beginning to its end."""
    return tuple(to_hex(colours(place / 6)) for place in range(7))


def period_bar(figure: Figure, axes: Any, periods: int, title: str) -> None:
    """Show at the right of ``axes`` which colour means which period. Periods count from 1."""
    colour_bar(figure, axes, sequence_colours(periods), title, first=1)


def colour_bar(figure: Figure, axes: Any, colours: Any, title: str, first: int) -> None:
    """Draw a field of each of ``colours`` at the right of ``axes``. The fields are numbered from ``first`` upwards."""
    count = len(colours)
    norm = BoundaryNorm(np.arange(count + 1) - 0.5, count)
    fields = ScalarMappable(norm, ListedColormap(colours))
    bar = figure.colorbar(fields, ax=axes, pad=0.02, label=title, spacing="uniform")
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    bar.ax.minorticks_off()
    places = evenly_spaced(count)
    bar.set_ticks(places, labels=[str(place + first) for place in places])


def accuracy_bar(figure: Figure, image: Any, axes: Any, **look: Any) -> None:
    """Show at the right of ``axes`` which colour of ``image`` means which accuracy."""
    bar = figure.colorbar(image, ax=axes, pad=0.02, format=SHARES, **look)
    bar.outline.set_visible(False)


def evenly_spaced(count: int, most: int = 12) -> list[int]:
    """At most ``most`` of the numbers from 0 to ``count - 1``, evenly spaced."""
    step = next((step for step in (1, 2, 5, 10, 20, 50, 100) if count <= step * most), -(-count // most))
    return list(range(0, count, step))


def number_periods(axis: Any, places: Sequence[int]) -> None:
    """Put ticks at ``places``, which are indices of periods, and number them from 1."""
    axis.set_ticks(places, [str(place + 1) for place in places])


def plain_log_axis(axes: Any, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with ticks at 1, 2 and 5 times the powers of 10, which are written as plain numbers."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure, axes: Any, columns: int = 0) -> Figure | None:
    """The figure with a legend of its lines below them. None if no line has a name."""
    handles, _ = axes.get_legend_handles_labels()
    if not handles:
        return None
    named = [shortened(series_of(handle)) for handle in handles]
    columns = columns or legend_columns(named)
    figure.legend(handles, named, loc="outside lower center", ncols=columns, fontsize=8.5)
    return figure


def legend_columns(named: Sequence[str]) -> int:
    """How many columns of these names fit below a figure."""
    longest = max(map(len, named))
    return 1 if longest > 34 else 2 if longest > 20 else 3


def literal(name: str) -> str:
    """A name that matplotlib shows letter by letter: two dollar signs would enclose a formula."""
    return name.replace("$", r"\$")


def shortened(name: str, longest: int = 64) -> str:
    """A name that fits below a figure, as matplotlib takes it. The middle of a longer one is left out."""
    return literal(_cut(name, longest))


def wrapped(name: str, width: int) -> str:
    """A name in at most three lines of at most ``width`` characters, as matplotlib takes it.

    The middle of a longer one is left out.
    """
    lengths = range(_LINES * width - 6, 0, -1)
    lines = next(lines for most in lengths if len(lines := textwrap.wrap(_cut(name, most), width)) <= _LINES)
    return literal("\n".join(lines))


def _cut(name: str, longest: int) -> str:
    return name if len(name) <= longest else f"{name[: longest // 2]}…{name[-longest // 2 + 1 :]}"


def line_look(place: int) -> dict[str, Any]:
    """The colour and the style of a line. ``place`` is its number, from 0, among the lines that are compared."""
    return {"color": PALETTE[place % len(PALETTE)], "linestyle": LINE_STYLES[place // len(PALETTE) % len(LINE_STYLES)]}


def markers(place: int, points: int) -> dict[str, Any]:
    """The markers of a line that is compared: those of its place, at eight of its points or so."""
    return {
        "marker": MARKERS[(place + 2 * (place // len(PALETTE))) % len(MARKERS)],
        "markevery": (place % 3, max(1, -(-points // 8))) if points > 15 else 1,
        "markersize": 4.5,
    }


def series(rows: Rows, column: str) -> tuple[list[int], list[float]]:
    """The rounds in which ``column`` was measured, and its values."""
    pairs = [(row.round, value) for row in rows if (value := row.number(column)) is not None]
    return [round for round, _ in pairs], [value for _, value in pairs]


def numbers(values: Any) -> Floats:
    """A list, nested or not, as an array that has NaN in place of None."""
    return np.array(values, dtype=np.float64)


def marker(points: int) -> str:
    """The marker of a line with this number of points. A line of few points has dots, so that the points are seen."""
    return "o" if points < 15 else ""
