"""The cells of a comparison's table: mean ± deviation over the seeds, in a unit that suits the figure."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedemu.ops.compare.entry import Statistic
from fedemu.ops.figures import time_unit

NEVER = "–"
"""The cell of a figure that does not exist."""

_SHORT = {"days": "d", "hours": "h", "minutes": "min", "seconds": "s"}

Cell = Callable[[Statistic], str]
"""Writes a figure as a cell."""


def share(figure: Statistic) -> str:
    """A share of 1 in percent, with one decimal."""
    return written(figure, 100, 1, " %")


def cosine(figure: Statistic) -> str:
    """A cosine, with three decimals."""
    return written(figure, 1, 3, "")


def number(figure: Statistic) -> str:
    """A perplexity or a loss."""
    large = abs(figure.mean or 0.0)
    return written(figure, 1, 3 if large < 10 else 1 if large < 1000 else 0, "")


def any_number(figure: Statistic) -> str:
    """A number of any size, in powers of ten if it is very small or very large."""
    large = abs(figure.mean or 0.0)
    if large == 0 or 0.01 <= large < 1e6:
        return number(figure)
    power = math.floor(math.log10(large))
    return written(figure, 10.0**-power, 2, f" · 10^{power}")


def count(figure: Statistic) -> str:
    """A number of rounds."""
    return written(figure, 1, 0 if len(figure.known) < 2 else 1, "")


def size(figure: Statistic) -> str:
    """A size in bytes."""
    power = next((power for power in range(4) if abs(figure.mean or 0.0) < 999.95 * 1000.0**power), 4)
    return written(figure, 1000.0**-power, 1, f" {('B', 'kB', 'MB', 'GB', 'TB')[power]}")


def seconds(figure: Statistic) -> str:
    """A time that may be as short as milliseconds, with two or three digits."""
    short = abs(figure.mean or 0.0)
    if short < 0.995:
        return written(figure, 1000, 0 if short >= 0.0095 else 1, " ms")
    return written(figure, 1, 2 if short < 9.95 else 1 if short < 99.5 else 0, " s")


def span(figure: Statistic) -> str:
    """A time that may be as long as days."""
    divisor, unit = time_unit(figure.mean or 0.0)
    return written(figure, 1 / divisor, 1, f" {_SHORT[unit]}")


def written(figure: Statistic, factor: float, digits: int, unit: str) -> str:
    """Mean and deviation times ``factor``, such as ``12.3 ± 0.4 MB``. A deviation of 0 is not written.

    If only some seeds have the figure, the cell says how many: ``12.3 ± 0.4 MB (2 of 3)``.
    """
    if figure.mean is None:
        return NEVER
    spread = f" ± {figure.deviation * factor:.{digits}f}" if figure.deviation else ""
    known, seeds = len(figure.known), len(figure.values)
    some = f" ({known} of {seeds})" if known < seeds else ""
    return f"{figure.mean * factor:.{digits}f}{spread}{unit}{some}"
