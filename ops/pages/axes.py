"""Axes that fit what is drawn: shares in percent, and limits that make differences visible."""

from __future__ import annotations

import math
from typing import Any, Final, Literal

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedemu.ops.figures import percent

SHARES: Final = FuncFormatter(lambda value, _: f"{round(100 * value, 3):g} %")
"""Writes the ticks of an axis of shares in percent."""
POINTS: Final = FuncFormatter(lambda value, _: f"{100 * value:+g}" if value else "0")
"""Writes the ticks of an axis of differences of shares in percentage points."""
_STEPS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
_LEAST: Final = 0.01
"""An axis of shares is at least this long, one percentage point."""
_LONG_NAME: Final = 20
"""After a longer name, the limits of an axis stand in a line of their own."""
_ROOM: Final = 0.06
"""The room that is left above and below what is drawn, as a share of its height."""


def fit_shares(axes: Any, values: Any, name: str, which: Literal["x", "y"] = "y", lowest: float = 0.0) -> None:
    """Scale an axis to shares: from a little below the least of ``values`` to a little above the largest.

    ``name`` is what the axis shows. If the axis does not begin at 0, its label says so. NaN takes no part. The axis
    stays between ``lowest`` and 1, but for a little room above a line at 1. Without any value it has all of that.
    """
    low, high = limits(values, lowest)
    above = 0.02 * (high - low) if high == 1.0 else 0.0  # so that a line at the highest value is seen whole
    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.set(**{f"{which}lim": (low, high + above)})
    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(SHARES)
    digits = 0 if round(100 * low, 6).is_integer() and round(100 * high, 6).is_integer() else 1
    cut = f"{100 * low:.{digits}f} to {percent(high, digits)}"
    gap = "\n" if len(name) > _LONG_NAME else " "
    label = name if low == 0 else f"{name}{gap}(axis: {cut})" if name else f"axis: {cut}"
    axes.set(**{f"{which}label": label})


def say_cut(axes: Any) -> None:
    """Say in the label of the vertical axis that it does not begin at 0, if it is so."""
    if axes.get_ylim()[0] > 0:
        axes.set_ylabel(f"{axes.get_ylabel()}\n(axis not from 0)")


def limits(values: Any, lowest: float = 0.0) -> tuple[float, float]:
    """Limits for an axis of the shares ``values``: round numbers with a little room around them, ``lowest`` to 1."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if not known.size:
        return lowest, 1.0
    low, high = float(known.min()), float(known.max())
    room = max(_ROOM * (high - low), (_LEAST - (high - low)) / 2)
    low, high = low - room, high + room
    step = next((step for step in _STEPS if step >= (high - low) / 8), _STEPS[-1])
    low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    return round(max(low, lowest), 4), round(min(high, 1.0), 4)
