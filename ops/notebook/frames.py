"""Results as pandas frames. pandas is imported when a frame is asked for, and not before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fedemu.coordinator.record.row import Row
from fedemu.ops.compare.compare import Comparison
from fedemu.ops.compare.entry import FIGURES
from fedemu.ops.compare.measured import measured
from fedemu.ops.results.own_measures import own_measures
from fedemu.protocol.errors import FedemuError

if TYPE_CHECKING:
    from pandas import DataFrame


class Rows(tuple[Row, ...]):
    """The rounds of a run in order. Called, it gives them as a pandas frame."""

    def __call__(self) -> DataFrame:
        """The rounds as a pandas frame, one line for each, with the columns of ``metrics.jsonl``.

        Shares are between 0 and 1. What was not measured is NaN. A column that holds several numbers by round, such as
        ``class_accuracy``, has a tuple in each line. What devices reported has a column each, such as
        ``device_metrics.loss``, and so has each number that a method of one's own remarks, such as ``remarks.norm``.
        ``remarks`` are NaN if no round has any. Raises FedemuError if pandas is not installed.
        """
        lines = [_flat(row) for row in self or (Row(round=0),)]
        if not any(line["remarks"] for line in lines):  # Parquet has no column of mappings that are all empty
            lines = [line | {"remarks": math.nan} for line in lines]
        frame = frame_of(lines, numbers=set(_NUMBERS))
        return frame if self else frame.head(0).copy()  # a run that has no round yet has the columns, too

    def __repr__(self) -> str:
        known = [row.accuracy for row in self if row.accuracy is not None]
        last = f", the last accuracy {known[-1]:.4f}" if known else ""
        return f"<{len(self)} rows{last}; call rows() for a pandas frame>"


_NUMBERS = {
    name
    for name, field in Row.__dataclass_fields__.items()
    if field.type in {"int", "int | None", "float", "float | None"}
}


def _flat(row: Row) -> dict[str, Any]:
    """A row by column. What devices reported has columns of its own, and so have the method's own measures."""
    columns = row.to_json()
    reported: Mapping[str, float | None] = columns.pop("device_metrics")
    remarked = {measure.name: value for measure, value in own_measures(row).items() if measure.teller == "method"}
    return {
        **columns,
        **{f"device_metrics.{name}": value for name, value in reported.items()},
        **{f"remarks.{name}": value for name, value in remarked.items()},
    }


def frame_of(lines: Iterable[Mapping[str, Any]], numbers: set[str]) -> DataFrame:
    """A frame of lines by column. The columns ``numbers`` hold numbers also where none is known."""
    try:
        import pandas
    except ImportError as error:
        raise FedemuError("a frame needs pandas, which is not installed; install it: pip install pandas") from error
    frame = pandas.DataFrame(list(lines))
    for column in frame.columns:
        if column in numbers or column.startswith(("device_metrics.", "remarks.")):
            frame[column] = pandas.to_numeric(frame[column])
    return frame


def comparison_frame(comparison: Comparison) -> DataFrame:
    """A line for each experiment: the mean of each figure over the seeds, and its standard deviation as ``NAME_sd``.

    The figures are those of fedemu, and what devices and methods of one's own measured, such as ``remarks.norm``.
    """
    own = {measure.column: figures for measure, figures in measured(comparison.entries).items()}
    lines = []
    for place, entry in enumerate(comparison.entries):
        line: dict[str, Any] = {"experiment": entry.label, "runs": len(entry.runs), "outcome": entry.outcome}
        figures = {**entry.figures, **{column: of_entries[place] for column, of_entries in own.items()}}
        for key in (*FIGURES, *own):
            line |= {key: figures[key].mean, f"{key}_sd": figures[key].deviation}
        lines.append(line)
    frame = frame_of(lines, {name for key in (*FIGURES, *own) for name in (key, f"{key}_sd")})
    return frame.dropna(axis="columns", how="all")
