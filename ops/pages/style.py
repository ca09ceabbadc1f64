"""How fedemu's pictures look, and what all of them need: figures, colours, ticks, legends, and numbers with gaps."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from fedemu.coordinator.record.row import Row

matplotlib.use("Agg")

Rows = Sequence[Row]
Floats = NDArray[np.float64]

INK = "#22303c"
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f6fb2", "#e08a1e", "#3c9d5f", "#c8443f", "#7a5fa8", "#9aa5ae"
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, "#2aa3a8", "#cf6fa5", "#8a6a46", "#4d5862", "#a3a22b")
"""The colours of lines that are compared. After the last colour they are used again with another line style."""
LINE_STYLES = ("-", "--", ":")
MARKERS = "osD^vP*X<>"
ACCURACY_COLOURS = matplotlib.colormaps["viridis"].with_extremes(bad="#e8ecef")
"""The colours of accuracies from 0 to 1. A missing accuracy is grey."""
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
    "axes.axisbelow": True,
    "grid.color": "#e8ecef",
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
}

P = ParamSpec("P")


def rendered(draw: Callable[P, Figure | None], *args: P.args, **kwargs: P.kwargs) -> bytes | None:
    """The PNG of the figure that ``draw`` returns, in fedemu's style. None if ``draw`` returns None."""
    with matplotlib.rc_context(STYLE):
        figure = draw(*args, **kwargs)
        if figure is None:
            return None
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def new_figure(title: str, *, width: float = 6.6, height: float = 3.4) -> tuple[Figure, Any]:
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
    return MaxNLocator(bins, integer=integer, steps=[1, 2, 5, 10])


def class_map(axes: Any, rounds: Sequence[int], table: Floats) -> Any:
    """Draw ``table [classes, rounds]`` as a heat map. A round that was not evaluated shows the last evaluated one."""
    edges = np.array([*rounds, rounds[-1] + 1]) - 0.5
    image = axes.pcolormesh(edges, np.arange(len(table) + 1) - 0.5, table, cmap=ACCURACY_COLOURS, vmin=0, vmax=1)
    axes.grid(False)
    axes.yaxis.set_major_locator(round_ticks(12, integer=True))
    return image


def sequence_colours(name: str, count: int) -> Floats:
    """``count`` colours ``[count, rgba]`` of a sequential colour map.

    The palest end of the map is left out, because it is hard to see on white.
    """
    return np.array(matplotlib.colormaps[name](np.linspace(0.04, 0.9, count)), dtype=np.float64)


def period_colours(periods: int) -> Floats:
    """The colour of each period ``[periods, rgba]``, the same in every picture of a run."""
    return sequence_colours("plasma", periods)


def period_bar(figure: Figure, axes: Any, periods: int, title: str) -> None:
    """Show at the right of ``axes`` which colour means which period."""
    colour_bar(figure, axes, period_colours(periods), title)


def colour_bar(figure: Figure, axes: Any, colours: Any, title: str) -> None:
    """Draw a field of each of ``colours`` at the right of ``axes``. The fields are numbered from 0 upwards."""
    count = len(colours)
    norm = BoundaryNorm(np.arange(count + 1) - 0.5, count)
    fields = ScalarMappable(norm, ListedColormap(colours))
    bar = figure.colorbar(fields, ax=axes, pad=0.02, label=title, spacing="uniform")
    bar.ax.tick_params(length=0)
    bar.ax.minorticks_off()
    bar.set_ticks(counted(count))


def counted(count: int, most: int = 12) -> list[int]:
    """At most ``most`` of the numbers from 0 to ``count - 1``, evenly spaced."""
    step = next((step for step in (1, 2, 5, 10, 20, 50, 100) if count <= step * most), max(1, count // most))
    return list(range(0, count, step))


def plain_log_axis(axes: Any, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with ticks at 1, 2 and 5 times the powers of 10."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure, axes: Any) -> Figure | None:
    """The figure with a legend of its lines below them. None if no line has a name."""
    handles, named = axes.get_legend_handles_labels()
    if not handles:
        return None
    figure.legend(handles, named, loc="outside lower center", ncols=legend_columns(named), fontsize=8.5)
    return figure


def legend_columns(named: Sequence[str]) -> int:
    """How many columns of these names fit below a figure."""
    longest = max(map(len, named))
    return 1 if longest > 45 else 2 if longest > 26 else 3


def line_look(place: int) -> dict[str, Any]:
    """The colour and the style of a line. ``place`` is its number, from 0, among the lines that are compared."""
    return {"color": PALETTE[place % len(PALETTE)], "linestyle": LINE_STYLES[place // len(PALETTE) % len(LINE_STYLES)]}


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
