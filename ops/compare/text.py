"""A comparison as tables of words and numbers, for the terminal and for the page."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedemu.ops.compare import cells
from fedemu.ops.compare.beside import beside_best
from fedemu.ops.compare.cells import NEVER, Cell
from fedemu.ops.compare.compare import Comparison
from fedemu.ops.compare.entry import BY_PERIOD, OF_DIAGNOSED, ROUNDS_TO, Statistic
from fedemu.ops.compare.measured import measured_table
from fedemu.ops.compare.replay import OBJECTIVE, Measure, ReplayStudy
from fedemu.ops.compare.tasks import TaskStudy
from fedemu.ops.figures import percent

TO_THE_LEFT = frozenset({"experiment", "method", "replay", "outcome"})
"""The columns that hold words. All others hold numbers."""
_ONLY_WHERE_KNOWN = ("last_accuracy", "consistency", *OF_DIAGNOSED, *BY_PERIOD)
_PIPE_WIDTH = 400
"""The width that is assumed without a terminal. The table stays in one piece."""


def columns(comparison: Comparison) -> dict[str, list[str]]:
    """The table by column, the labels first. Each column has one cell per entry: mean ± deviation over the seeds."""
    table: dict[str, list[str]] = {
        "experiment": [entry.label for entry in comparison.entries],
        "runs": [str(len(entry.runs)) for entry in comparison.entries],
    }
    for title, (key, cell) in _columns(comparison.target, comparison.last).items():
        column = [cell(entry.figures[key]) for entry in comparison.entries]
        if key not in _ONLY_WHERE_KNOWN or set(column) != {NEVER}:
            table[title] = column
    table["outcome"] = [entry.outcome for entry in comparison.entries]
    return table


def text(comparison: Comparison, width: int) -> str:
    """All tables for a terminal of this width. A table that is too wide is divided into parts that fit."""
    console = Console(width=width, color_system=None, highlight=False, force_jupyter=False)
    with console.capture() as captured:
        _print(console, columns(comparison))
        for title, table in further_tables(comparison):
            console.print(f"\n{title}", markup=False)
            _print(console, table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join([*lines, *explanation(comparison)])


def further_tables(comparison: Comparison) -> list[tuple[str, dict[str, list[str]]]]:
    """The tables below the first one, each with its title: paired tests, own measures, tasks, replay."""
    return [
        *filter(None, [beside_best(comparison.entries), measured_table(comparison.entries)]),
        *(task_table(study) for study in comparison.tasks),
        *(table for study in comparison.replay for table in replay_tables(study)),
    ]


def task_table(study: TaskStudy) -> tuple[str, dict[str, list[str]]]:
    """The title of a study, and its table by column, each with one cell per method (Babakniya et al., table 4).

    The number of tasks reached is a column if it is not the same for all methods.
    """
    table = {"experiment": [method.label for method in study.methods]}
    reached = [method.reached for method in study.methods]
    if len(set(reached)) > 1:
        table["tasks"] = reached
    for title, (key, cell) in _OF_TASKS.items():
        column = [cell(method.figures[key]) for method in study.methods]
        if set(column) != {NEVER}:
            table[title] = column
    return f"classes of {study.dataset}, task by task", table


def replay_tables(study: ReplayStudy) -> list[tuple[str, dict[str, list[str]]]]:
    """For each measure its title and its table by column. There is one line per strategy and one column per N."""
    tables = []
    for measure in study.measures:
        lines = [
            {point.samples: _of_replay(study.value(point, measure), study, measure) for point in points}
            for points in study.lines.values()
        ]
        by_size = {f"N {size}": [line.get(size, NEVER) for line in lines] for size in study.sizes}
        if any(set(column) != {NEVER} for column in by_size.values()):
            tables.append((f"{study.label}: {replay_title(study, measure)}", {"replay": list(study.lines), **by_size}))
    return tables


def replay_title(study: ReplayStudy, measure: Measure) -> str:
    """The measure of a study's values in words, and the run without replay that they are compared with."""
    if measure is OBJECTIVE:
        return measure.name
    if study.reference is None:
        return f"{measure.name}; no run without replay to set it against"
    without = _absolute(study.reference.figures[measure.key], measure)
    if measure.against == "absolute":
        return f"{measure.name}; {without} without replay"
    kind = "change" if measure.against == "relative" else "difference in percentage points"
    return f"{measure.name}, {kind} against no replay ({without})"


def width_of(stream_is_terminal: bool) -> int:
    """The width of the tables in characters."""
    return shutil.get_terminal_size().columns if stream_is_terminal else _PIPE_WIDTH


def for_people(figure: str, value: float | None) -> str:
    """A figure of a comparison in the unit in which people read it, such as percent."""
    cell = dict([*_OF_TASKS.values(), *_columns(None, 0).values()]).get(figure, cells.number)
    return cell(Statistic((value,)))


def explanation(comparison: Comparison) -> list[str]:
    """Sentences that explain the numbers of the tables."""
    lines = []
    if any(len(entry.runs) > 1 for entry in comparison.entries):
        lines.append("mean ± sample standard deviation over the seeds")
    if comparison.seeds_differ:
        lines.append("the rows have different seeds")
    if comparison.target is not None:
        lines.append(
            f"rounds to a share of the target accuracy {percent(comparison.target)}; {NEVER} if it was never reached"
        )
    if comparison.tasks:
        lines.append(
            "first and later tasks: by round, the real time of a device's work and the coordinator's own; by request, "
            "the emulated bytes to a device and those of its reply; a server job that comes once per task stands apart"
        )
    for study in comparison.replay:
        if study.unpaired:
            lines.append(
                f"{study.label}: runs without a counterpart that has no replay, the same seed and as many periods "
                f"are left out of the changes ({study.unpaired})"
            )
    return lines


_OF_TASKS: Mapping[str, tuple[str, Cell]] = {
    "average incremental accuracy": ("average_incremental_accuracy", cells.share),
    "average forgetting": ("average_forgetting", cells.share),
    "device, first": ("device_seconds_first", cells.seconds),
    "device, later": ("device_seconds_later", cells.seconds),
    "coordinator, first": ("coordinator_seconds_first", cells.seconds),
    "coordinator, later": ("coordinator_seconds_later", cells.seconds),
    "server job": ("server_job_seconds", cells.seconds),
    "down, first": ("bytes_down_first", cells.size),
    "down, later": ("bytes_down_later", cells.size),
    "up, first": ("bytes_up_first", cells.size),
    "up, later": ("bytes_up_later", cells.size),
}


def _of_replay(figure: Statistic, study: ReplayStudy, measure: Measure) -> str:
    if not study.is_change(measure):
        return _absolute(figure, measure)
    if figure.mean is None:
        return NEVER
    unit = " %" if measure.against == "relative" else ""
    return ("+" if figure.mean > 0 else "") + cells.written(figure, 100, 1, unit)


def _absolute(figure: Statistic, measure: Measure) -> str:
    return cells.share(figure) if measure.form == "share" else cells.number(figure)


def _columns(target: float | None, last: int) -> Mapping[str, tuple[str, Cell]]:
    return {
        "final accuracy": ("final_accuracy", cells.share),
        "best": ("best_accuracy", cells.share),
        f"last {last}": ("last_accuracy", cells.share),
        "forgetting": ("forgetting", cells.share),
        "round forgetting": ("round_forgetting", cells.share),
        "consistency": ("consistency", cells.cosine),
        "average accuracy": ("average_accuracy", cells.share),
        "average forgetting": ("average_forgetting", cells.share),
        "backward transfer": ("backward_transfer", cells.share),
        "forward transfer": ("forward_transfer", cells.share),
        "perplexity": ("all_period_perplexity", cells.number),
        "relative forgetting": ("relative_forgetting", cells.share),
        "local forgetting": ("local_forgetting", cells.share),
        "aggregation forgetting": ("aggregation_forgetting", cells.share),
        "local alignment": ("local_alignment", cells.share),
        "global alignment": ("global_alignment", cells.share),
        **{f"to {_reached(share, target)}": (key, cells.count) for key, share in ROUNDS_TO.items()},
        "bytes down": ("bytes_down", cells.size),
        "bytes up": ("bytes_up", cells.size),
        "virtual time": ("virtual_time", cells.span),
        "wall time": ("wall_time", cells.span),
    }


def _reached(share: float, target: float | None) -> str:
    return percent(share, 0) if target is None else percent(share * target)


def _width(table: Table) -> int:
    unlimited = Console(width=10_000)
    return Measurement.get(unlimited, unlimited.options, table).maximum


def _print(console: Console, table: Mapping[str, list[str]]) -> None:
    """Print a table, in parts if it is too wide. Every part begins with the first column, which names the rows."""
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
    for row in zip(*(column for _, column in parts), strict=True):
        table.add_row(*map(Text, row))
    return table
