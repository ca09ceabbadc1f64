"""A comparison in words and numbers: the columns of its table, for the terminal and for the page."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedemu.ops.compare import Comparison
from fedemu.ops.compare_entry import BY_PERIOD, SHARES, Statistic
from fedemu.ops.compare_replay import Measure, ReplayStudy

NEVER = "–"
TO_THE_LEFT = frozenset({"experiment", "replay", "outcome"})
"""The columns that hold words."""
_ONLY_WHERE_KNOWN = ("local_forgetting", "aggregation_forgetting", *BY_PERIOD)
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
        if key not in _ONLY_WHERE_KNOWN or set(cells) != {NEVER}:
            table[title] = cells
    table["outcome"] = [entry.outcome for entry in comparison.entries]
    return table


def text(comparison: Comparison, width: int) -> str:
    """The tables for a terminal of so many columns: in one piece each, or else parted so that they fit."""
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as captured:
        _print(console, columns(comparison))
        for study in comparison.replay:
            for title, table in replay_tables(study):
                console.print(f"\n{title}", markup=False)
                _print(console, table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join([*lines, *explanation(comparison)])


def replay_tables(study: ReplayStudy) -> list[tuple[str, dict[str, list[str]]]]:
    """For each measure its title and its table by column: a line per strategy, a column per N."""
    tables = []
    for measure in study.measures:
        lines = [
            {point.samples: _of_replay(study.value(point, measure), study, measure) for point in points}
            for points in study.lines.values()
        ]
        cells = {f"N {size}": [line.get(size, NEVER) for line in lines] for size in study.sizes}
        if any(set(column) != {NEVER} for column in cells.values()):
            tables.append((f"{study.label}: {replay_title(study, measure)}", {"replay": list(study.lines), **cells}))
    return tables


def replay_title(study: ReplayStudy, measure: Measure) -> str:
    """What the values of a study are, and what they are set against."""
    if study.reference is None:
        return f"{measure.name}; no run without replay to set it against"
    without = _absolute(study.reference.figures[measure.key], measure)
    if measure.against == "absolute":
        return f"{measure.name}; {without} without replay"
    kind = "change" if measure.against == "relative" else "difference in percentage points"
    return f"{measure.name}, {kind} against no replay ({without})"


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
    for study in comparison.replay:
        if study.unpaired:
            lines.append(
                f"{study.label}: runs without a counterpart that has no replay, the same seed and as many periods "
                f"are left out of the changes ({study.unpaired})"
            )
    return lines


def _of_replay(figure: Statistic, study: ReplayStudy, measure: Measure) -> str:
    if not study.is_change(measure):
        return _absolute(figure, measure)
    if figure.mean is None:
        return NEVER
    return ("+" if figure.mean > 0 else "") + _written(figure, 100, 1, "%" if measure.against == "relative" else "")


def _absolute(figure: Statistic, measure: Measure) -> str:
    return _percent(figure) if measure.form == "share" else _number(figure)


def _columns(target: float | None) -> Mapping[str, tuple[str, Cell]]:
    return {
        "final accuracy": ("final_accuracy", _percent),
        "best": ("best_accuracy", _percent),
        "forgetting": ("forgetting", _share),
        "round forgetting": ("round_forgetting", _share),
        "average accuracy": ("average_accuracy", _percent),
        "average forgetting": ("average_forgetting", _share),
        "backward transfer": ("backward_transfer", _share),
        "perplexity": ("all_period_perplexity", _number),
        "relative forgetting": ("relative_forgetting", _percent),
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


def _number(figure: Statistic) -> str:
    """Of a perplexity or a loss."""
    size = abs(figure.mean or 0.0)
    return _written(figure, 1, 3 if size < 10 else 1 if size < 1000 else 0, "")


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


def _print(console: Console, table: Mapping[str, list[str]]) -> None:
    """The first column names the rows of every part."""
    labels, *others = table.items()
    parts = [[labels]]
    for column in others:
        if len(parts[-1]) > 1 and _width(_table([*parts[-1], column])) > console.width:
            parts.append([labels])
        parts[-1].append(column)
    for part in parts:
        console.print(_table(part))
        if part is not parts[-1]:
            console.print()


def _table(parts: list[tuple[str, list[str]]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title, _ in parts:
        table.add_column(title, justify="left" if title in TO_THE_LEFT else "right", no_wrap=True)
    for row in zip(*(cells for _, cells in parts), strict=True):
        table.add_row(*map(Text, row))
    return table
