"""The table of a suite: for each stream the methods, the most accurate first, with the spread over the seeds."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedemu.coordinator.record.run import Run, read_run
from fedemu.ops.compare import cells
from fedemu.ops.compare.entry import Statistic, figures_of
from fedemu.ops.sweeps.grid import override_of
from fedemu.ops.sweeps.methods import label
from fedemu.ops.sweeps.plan import Planned
from fedemu.protocol.errors import FedemuError
from fedemu.protocol.host.files import write_whole

TABLE, NUMBERS = "suite.md", "suite.csv"


@dataclass(frozen=True)
class Line:
    """One method on one stream: its figures over the ``planned`` runs, and how many of these are over.

    A run that is not over has no value in any figure.
    """

    stream: str
    method: str
    accuracy: Statistic
    forgetting: Statistic
    bytes: Statistic
    updates: Statistic
    runs: int
    planned: int
    diverged: int


def lines(folder: Path, runs: Sequence[Planned]) -> dict[str, list[Line]]:
    """The lines of every stream, the most accurate method first. A method without a run comes last."""
    streams: dict[str, list[Planned]] = {}
    for run in runs:
        streams.setdefault(run.part, []).append(run)
    return {stream: _of_stream(folder, stream, planned) for stream, planned in streams.items()}


def overview(standing: dict[str, list[Line]]) -> dict[str, list[str]]:
    """All streams side by side, by column: accuracy and forgetting of each method. A cell without a run is empty."""
    lines_of = {(line.stream, line.method): line for found in standing.values() for line in found}
    methods = list(dict.fromkeys(line.method for found in standing.values() for line in found))
    table = {"method": methods}
    for stream in standing:
        of_methods = [lines_of.get((stream, method)) for method in methods]
        table[f"{stream}: accuracy"] = [
            "" if line is None else _with_diverged(line, cells.share(line.accuracy)) for line in of_methods
        ]
        table[f"{stream}: forgetting"] = ["" if line is None else cells.share(line.forgetting) for line in of_methods]
    return table


def _with_diverged(line: Line, cell: str) -> str:
    return f"{cell}, {line.diverged} diverged" if line.diverged else cell


def text(standing: dict[str, list[Line]]) -> str:
    """The tables as Markdown, which terminals show too: all streams side by side, then each for itself."""
    together = overview(standing)
    blocks = [_markdown([*together], [*zip(*together.values(), strict=True)])] if len(standing) > 1 else []
    for stream, found in standing.items():
        head = ["method", "accuracy", "forgetting", "bytes", "updates", "runs"]
        body = [
            [
                line.method,
                cells.share(line.accuracy),
                cells.share(line.forgetting),
                cells.size(line.bytes),
                cells.written(line.updates, 1, 0, ""),
                _with_diverged(line, f"{line.runs} of {line.planned}"),
            ]
            for line in found
        ]
        blocks.append(f"{stream}\n\n{_markdown(head, body)}")
    return "\n\n".join([*blocks, EXPLANATION])


def write_standing(folder: Path, standing: dict[str, list[Line]]) -> Path:
    """Write ``suite.md`` and ``suite.csv``, in which shares are shares of 1. Returns the path of the first.

    A line of ``suite.csv`` tells how many runs it is over, how many are ``planned``, and how many ``diverged``.
    """
    numbers = io.StringIO()
    table = csv.writer(numbers)
    names = ("accuracy", "forgetting", "bytes", "updates")
    columns = [f"{name}_{kind}" for name in names for kind in ("mean", "sd")]
    table.writerow(["stream", "method", "runs", "planned", "diverged", *columns])
    for found in standing.values():
        for line in found:
            values = [value for name in names for value in _of(getattr(line, name))]
            table.writerow([line.stream, line.method, line.runs, line.planned, line.diverged, *values])
    write_whole(folder / NUMBERS, numbers.getvalue())
    write_whole(folder / TABLE, text(standing) + "\n")
    return folder / TABLE


EXPLANATION = (
    "Mean ± sample standard deviation over the seeds. Accuracy is that of the last model on the whole test set. "
    "Forgetting is the average forgetting of earlier periods, or the mean forgetting from round to round where there "
    "are no periods. Bytes are the emulated ones of all devices in both directions; updates are their accepted "
    "replies. The best method of a stream stands first. A table of several streams has the methods in the order of the "
    "first one. (1 of 3) says that only one of three planned runs is over and has the figure."
)


def _of(figure: Statistic) -> tuple[float | None, float | None]:
    return figure.mean, figure.deviation


def _of_stream(folder: Path, stream: str, planned: Sequence[Planned]) -> list[Line]:
    named = {run.group: _name(run) for run in planned}
    if len(set(named.values())) < len(named):  # the same method with several presets
        named = {group: group.name for group in named}
    places: dict[Path, list[Path]] = {}
    for run in planned:
        places.setdefault(run.group, []).append(folder / run.folder)
    found = [
        _line(stream, named[group], [run for place in those for run in _read(place)], len(those))
        for group, those in places.items()
    ]
    return sorted(found, key=lambda line: -1.0 if line.accuracy.mean is None else line.accuracy.mean, reverse=True)


def _name(run: Planned) -> str:
    return ", ".join([label(run.method or run.experiment), *map(override_of, run.choices)])


def _line(stream: str, name: str, runs: Sequence[Run], planned: int) -> Line:
    figures = figures_of(runs, None)
    has_periods = figures["average_accuracy"].mean is not None
    forgetting = figures["average_forgetting" if has_periods else "round_forgetting"]
    down, up = figures["bytes_down"].values, figures["bytes_up"].values

    def over_planned(values: Iterable[float | None]) -> Statistic:
        return Statistic((*values, *[None] * (planned - len(runs))))

    return Line(
        stream,
        name,
        over_planned(figures["final_accuracy"].values),
        over_planned(forgetting.values),
        over_planned(None if a is b is None else (a or 0) + (b or 0) for a, b in zip(down, up, strict=True)),
        over_planned(float(sum(row.accepted or 0 for row in run.rows)) if run.rows else None for run in runs),
        len(runs),
        planned,
        sum(run.outcome == "diverged" for run in runs),
    )


def _read(place: Path) -> list[Run]:
    """The run in a folder if it is over."""
    try:
        run = read_run(place)
    except FedemuError:
        return []
    return [run] if run.outcome in ("completed", "diverged") else []


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rows = [[cell.replace("|", r"\|") for cell in row] for row in (head, *body)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def written(row: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"

    first, *rest = map(written, rows)
    return "\n".join([first, "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rest])
