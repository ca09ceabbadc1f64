"""A comparison in words and numbers: the columns of its table, for the terminal and for the page."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedemu.ops.compare import SHARES, Comparison, Statistic

NEVER = "–"
_ONLY_DIAGNOSED = ("local_forgetting", "aggregation_forgetting")
_PIPE_WIDTH = 400
"""Columns of what is no terminal: the table stays in one piece."""

Cell = Callable[[Statistic], str]


def columns(comparison: Comparison) -> dict[str, list[str]]:
    """The table by column, each with one cell per entry, the labels first; mean ± deviation over the seeds."""
    table: dict[str, list[str]] = {
        "experiment": [entry.label for entry in comparison.entries],
        "runs": [str(len(entry.runs)) for entry in comparison.entries],
    }
    for title, (key, cell) in _columns(comparison.target).items():
        cells = [cell(entry.figures[key]) for entry in comparison.entries]
        if key not in _ONLY_DIAGNOSED or set(cells) != {NEVER}:
            table[title] = cells
    table["outcome"] = [entry.outcome for entry in comparison.entries]
    return table


def text(comparison: Comparison, width: int) -> str:
    """The table for a terminal of so many columns: in one piece, or else parted so that it fits."""
    labels, *others = columns(comparison).items()
    parts = [[labels]]
    for column in others:
        if len(parts[-1]) > 1 and _width(_table([*parts[-1], column])) > width:
            parts.append([labels])
        parts[-1].append(column)
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(_table(part))
            if part is not parts[-1]:
                console.print()
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join([*lines, *explanation(comparison)])


def width_of(stream_is_terminal: bool) -> int:
    return shutil.get_terminal_size().columns if stream_is_terminal else _PIPE_WIDTH


def explanation(comparison: Comparison) -> list[str]:
    """What the numbers of the table are, in a line or two."""
    lines = []
    if any(len(entry.runs) > 1 for entry in comparison.entries):
        lines.append("mean ± sample standard deviation over the seeds")
    if comparison.target is not None:
        lines.append(
            f"rounds to a share of the target accuracy {comparison.target:.1%}; {NEVER} if it was never reached"
        )
    return lines


def _columns(target: float | None) -> Mapping[str, tuple[str, Cell]]:
    return {
        "final accuracy": ("final_accuracy", _percent),
        "best": ("best_accuracy", _percent),
        "forgetting": ("forgetting", _share),
        "round forgetting": ("round_forgetting", _share),
        "local forgetting": ("local_forgetting", _share),
        "aggregation forgetting": ("aggregation_forgetting", _share),
        **{f"to {_reached(share, target)}": (f"rounds_to_{share * 100:.0f}", _count) for share in SHARES},
        "bytes down": ("bytes_down", _bytes),
        "bytes up": ("bytes_up", _bytes),
        "virtual time": ("virtual_time", _span),
        "wall time": ("wall_time", _span),
    }


def _reached(share: float, target: float | None) -> str:
    return f"{share:.0%}" if target is None else f"{share * target:.1%}"


def _percent(figure: Statistic) -> str:
    return _written(figure, 100, 1, "%")


def _share(figure: Statistic) -> str:
    return _written(figure, 1, 3, "")


def _count(figure: Statistic) -> str:
    """Rounds; where some seeds never got so far, how many did."""
    whole = len(figure.known) < 2
    reached = "" if len(figure.known) in {0, len(figure.values)} else f" ({len(figure.known)} of {len(figure.values)})"
    return _written(figure, 1, 0 if whole else 1, reached)


def _bytes(figure: Statistic) -> str:
    size = figure.mean or 0.0
    power = next((power for power in range(4) if abs(size) < 1000 ** (power + 1)), 4)
    return _written(figure, 1000.0**-power, 1, f" {('B', 'kB', 'MB', 'GB', 'TB')[power]}")


def _span(figure: Statistic) -> str:
    seconds = figure.mean or 0.0
    divisor, unit = next(
        ((divisor, unit) for divisor, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")) if seconds >= 3 * divisor),
        (1.0, "s"),
    )
    return _written(figure, 1 / divisor, 1, f" {unit}")


def _written(figure: Statistic, factor: float, digits: int, unit: str) -> str:
    """``12.3 ± 0.4 MB``; a deviation that is nothing at all (bytes, often) is not written."""
    if figure.mean is None:
        return NEVER
    spread = f" ± {figure.deviation * factor:.{digits}f}" if figure.deviation else ""
    return f"{figure.mean * factor:.{digits}f}{spread}{unit}"


def _width(table: Table) -> int:
    unlimited = Console(width=10_000)
    return Measurement.get(unlimited, unlimited.options, table).maximum


def _table(parts: list[tuple[str, list[str]]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title, _ in parts:
        table.add_column(title, justify="left" if title in {"experiment", "outcome"} else "right", no_wrap=True)
    for row in zip(*(cells for _, cells in parts), strict=True):
        table.add_row(*map(Text, row))
    return table
