"""The runs of one experiment round by round, over its seeds. The plots of a comparison draw these curves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.measures.forgetting import mean_known
from fedemu.coordinator.record.row import Row, Values
from fedemu.coordinator.record.run import Run
from fedemu.ops.compare.entry import Entry

Floats = NDArray[np.float64]

MOVED = "moved"
"""What ``spent`` takes beside columns: all emulated bytes up to the round, down and up."""


class Curve(NamedTuple):
    """Mean and sample deviation over the seeds, by round. The deviation is 0 if only one run has the round."""

    rounds: Floats
    mean: Floats
    deviation: Floats


def curve(entry: Entry, key: str) -> Curve:
    """A column of the rows, over the rounds in which at least one run has it."""
    return curve_of(entry, lambda row: row.number(key))


def curve_of(entry: Entry, read: Callable[[Row], float | None]) -> Curve:
    """What ``read`` finds in the rows, over the rounds in which at least one run has it."""
    by_round: dict[int, list[float]] = defaultdict(list)
    for run in entry.runs:
        for row in run.rows:
            if (value := read(row)) is not None:
                by_round[row.round].append(value)
    rounds = sorted(by_round)
    values = [np.array(by_round[round]) for round in rounds]
    return Curve(
        np.array(rounds, dtype=np.float64),
        np.array([np.mean(column) for column in values]),
        np.array([np.std(column, ddof=1) if len(column) > 1 else 0.0 for column in values]),
    )


def spent(entry: Entry, key: str) -> tuple[Floats, Floats]:
    """The rounds, and what a run has spent by the end of each: ``virtual_time`` or ``MOVED``.

    If all runs have all rounds, it is the mean over the runs. A run that ended before the others takes part in the
    means of its own rounds alone: what single rounds cost is averaged, and added up. So it never falls.
    """
    costs: dict[int, list[float]] = defaultdict(list)
    for run in entry.runs:
        before = 0.0
        for round, value in _so_far(run, key):
            costs[round].append(value - before)
            before = value
    rounds = sorted(costs)
    return np.array(rounds, dtype=np.float64), np.cumsum([np.mean(costs[round]) for round in rounds])


def _so_far(run: Run, key: str) -> Iterator[tuple[int, float]]:
    """What the run has spent by the end of each round that tells it."""
    moved = 0.0
    for row in run.rows:
        told = [of_way for of_way in (row.bytes_down, row.bytes_up) if of_way is not None]
        moved += sum(told)
        value = (moved if told else None) if key == MOVED else row.number(key)
        if value is not None:
            yield row.round, value


def draws_class_order(entry: Entry) -> bool:
    """Whether each seed draws the order in which the classes come."""
    stream = entry.experiment.get("stream", {})
    return stream.get("kind") == "classes" and not stream.get("order")


def class_table(entry: Entry) -> tuple[list[int], Floats]:
    """The rounds with accuracies by class, and their mean over the runs that have them, ``[classes, rounds]``.

    NaN where no run has test samples of a class. Runs may have been tested on data with more classes than others. Where
    each seed draws its own order of the classes, a mean over seeds would mix these orders: the table is that of the
    first run.
    """
    by_round: dict[int, list[Values]] = defaultdict(list)
    for run in entry.runs[:1] if draws_class_order(entry) else entry.runs:
        for row in run.rows:
            if row.class_accuracy:
                by_round[row.round].append(row.class_accuracy)
    rounds = sorted(by_round)
    classes = max((len(values) for of_runs in by_round.values() for values in of_runs), default=0)
    table = np.full((len(rounds), classes), np.nan)
    for line, round in zip(table, rounds, strict=True):
        means = mean_known(np.array([*zip_longest(*by_round[round])], dtype=np.float64))
        line[: len(means)] = means
    return rounds, table.T
