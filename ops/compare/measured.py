"""What devices and methods of one's own measure, in the runs of a comparison: each run's last value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedemu.ops.compare import cells
from fedemu.ops.compare.entry import Entry, Statistic
from fedemu.ops.results.own_measures import MOST, OwnMeasure, last_measures


def measured(entries: Sequence[Entry]) -> Mapping[OwnMeasure, Sequence[Statistic]]:
    """By measure, in the order of their names, a figure for each entry. A run has its value of the last round with it.

    A run without the measure has None.
    """
    last = [[last_measures(run.rows) for run in entry.runs] for entry in entries]
    measures = sorted({measure for of_entry in last for of_run in of_entry for measure in of_run})
    return {
        measure: [Statistic(tuple(of_run.get(measure) for of_run in of_entry)) for of_entry in last]
        for measure in measures
    }


def measured_table(entries: Sequence[Entry]) -> tuple[str, dict[str, list[str]]] | None:
    """The title and the table by column, each with one cell per entry. None if nothing was measured.

    There are ``MOST`` measures at most, as in pictures.
    """
    found = list(measured(entries).items())[:MOST]
    if not found:
        return None
    table = {"experiment": [entry.label for entry in entries]}
    for measure, figures in found:
        table[measure.title] = [cells.any_number(figure) for figure in figures]
    return "what devices and methods measured, in the last round that has it", table
