"""How fedemu's pictures look, and what all of them need: a figure, numbers with gaps, units that read well."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from numpy.typing import NDArray

matplotlib.use("Agg")

Row = Mapping[str, Any]
Rows = Sequence[Row]
Floats = NDArray[np.float64]

INK = "#22303c"
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f6fb2", "#e08a1e", "#3c9d5f", "#c8443f", "#7a5fa8", "#9aa5ae"
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, "#2aa3a8", "#cf6fa5", "#8a6a46", "#4d5862", "#a3a22b")
"""Colours of rows that are compared; after the last they come again with another line style."""
LINE_STYLES = ("-", "--", ":")
MARKERS = "osD^vP*X<>"
ACCURACY_COLOURS = matplotlib.colormaps["viridis"].with_extremes(bad="#e8ecef")
"""Of an accuracy from 0 to 1; grey where there is none."""
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
    """The PNG of what ``draw`` draws, in fedemu's style; None where it has nothing to draw."""
    with matplotlib.rc_context(STYLE):
        figure = draw(*args, **kwargs)
        if figure is None:
            return None
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def new_figure(title: str, *, width: float = 6.6, height: float = 3.4) -> tuple[Figure, Any]:
    """A figure of these inches with one pair of axes over the rounds."""
    figure = bare_figure(width, height)
    axes = figure.add_subplot()
    axes.set_title(title)
    over_rounds(axes)
    return figure, axes


def bare_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    return figure


def over_rounds(axes: Any) -> None:
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(round_ticks(integer=True))


def round_ticks(bins: int = 9, *, integer: bool = False) -> MaxNLocator:
    """Ticks at numbers that people count in."""
    return MaxNLocator(bins, integer=integer, steps=[1, 2, 5, 10])


def class_map(axes: Any, rounds: Sequence[int], table: Floats) -> Any:
    """Draw ``table [classes, rounds]`` as a heat map; a round that was not evaluated shows the last one before it."""
    edges = np.array([*rounds, rounds[-1] + 1]) - 0.5
    image = axes.pcolormesh(edges, np.arange(len(table) + 1) - 0.5, table, cmap=ACCURACY_COLOURS, vmin=0, vmax=1)
    axes.grid(False)
    axes.yaxis.set_major_locator(round_ticks(12, integer=True))
    return image


def sequence_colours(name: str, count: int) -> Floats:
    """So many colours ``[count, rgba]`` of a sequential map, without its palest end, which is hard to see on white."""
    return np.array(matplotlib.colormaps[name](np.linspace(0.04, 0.9, count)), dtype=np.float64)


def period_colours(periods: int) -> Floats:
    """The colour of each period ``[periods, rgba]``, the same in every picture of a run."""
    return sequence_colours("plasma", periods)


def period_bar(figure: Figure, axes: Any, periods: int, title: str) -> None:
    """What the colours of periods mean, at the right of ``axes``."""
    colour_bar(figure, axes, period_colours(periods), title)


def colour_bar(figure: Figure, axes: Any, colours: Any, title: str) -> None:
    """A field for each of ``colours``, numbered from 0 upwards."""
    count = len(colours)
    norm = BoundaryNorm(np.arange(count + 1) - 0.5, count)
    fields = ScalarMappable(norm, ListedColormap(colours))
    bar = figure.colorbar(fields, ax=axes, pad=0.02, label=title, spacing="uniform")
    bar.ax.tick_params(length=0)
    bar.ax.minorticks_off()
    bar.set_ticks(counted(count))


def counted(count: int, most: int = 12) -> list[int]:
    """At most so many of the numbers from 0 to below ``count``, evenly spaced."""
    step = next((step for step in (1, 2, 5, 10, 20, 50, 100) if count <= step * most), max(1, count // most))
    return list(range(0, count, step))


def plain_log_axis(axes: Any, which: Literal["x", "y"]) -> None:
    """A logarithmic axis with ticks at numbers that people count in."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure, axes: Any) -> Figure | None:
    """The figure with its lines named below; None where no line has a name."""
    handles, named = axes.get_legend_handles_labels()
    if not handles:
        return None
    figure.legend(handles, named, loc="outside lower center", ncols=legend_columns(named), fontsize=8.5)
    return figure


def legend_columns(named: Sequence[str]) -> int:
    longest = max(map(len, named))
    return 1 if longest > 45 else 2 if longest > 26 else 3


def line_look(place: int) -> dict[str, Any]:
    """The colour and the style of the line of this number among those that are compared."""
    return {"color": PALETTE[place % len(PALETTE)], "linestyle": LINE_STYLES[place // len(PALETTE) % len(LINE_STYLES)]}


def series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Rounds and values of the rows that have the key."""
    pairs = [(int(row["round"]), float(row[key])) for row in rows if row.get(key) is not None]
    return [round for round, _ in pairs], [value for _, value in pairs]


def numbers(values: Any) -> Floats:
    """A list, nested or not, as an array; NaN where it holds None."""
    return np.array(values, dtype=np.float64)


def marker(points: int) -> str:
    """Dots on a line of few points, which could not be told from its slopes otherwise."""
    return "o" if points < 15 else ""
