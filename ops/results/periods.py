"""The results of a run by the periods of its stream, read from its rows. Reports and comparisons show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.measures import continual
from fedemu.algorithms.measures.forgetting import mean_known
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import Run

Floats = NDArray[np.float64]

_LARGEST_LOSS = 700.0
"""The perplexity of a larger loss does not fit into a float64."""


@dataclass(frozen=True)
class PeriodResults:
    """The results of a run on a stream of periods. The run may be unfinished.

    ``rows`` are the rows that were evaluated by period, at least one. ``rounds [models]`` is the last evaluated round
    of each period reached. ``accuracy`` and ``loss [models, periods]`` are those of the model after that round on each
    period's test set, NaN without a test set. ``language`` says whether perplexity is the measure. ``untrained
    [periods]`` is the accuracy of the initial model, None if it was not measured.
    """

    rows: Sequence[Row]
    rounds: tuple[int, ...]
    accuracy: Floats
    loss: Floats
    language: bool
    untrained: Floats | None = None

    @property
    def forward_transfer(self) -> float:
        """How earlier periods changed the accuracy on a period that was yet to come. NaN if it was not measured."""
        return math.nan if self.untrained is None else continual.forward_transfer(self.accuracy, self.untrained)

    @property
    def periods(self) -> int:
        """The number of periods of the stream."""
        return int(self.accuracy.shape[1])

    @property
    def perplexity(self) -> Floats:
        """The perplexity of each model on each period's test set, ``[models, periods]``."""
        return perplexity_of(self.loss)

    @property
    def all_period_accuracy(self) -> Floats:
        """The accuracy of each model over the test sets of all periods together, ``[models]``."""
        return self._together("accuracy")

    @property
    def seen_accuracy(self) -> Floats:
        """The accuracy of each model over the test sets of the periods up to its own together, ``[models]``."""
        return self._together("seen_accuracy")

    @property
    def seen_loss(self) -> Floats:
        """The loss of each model over the test sets of the periods up to its own together, ``[models]``."""
        return self._together("seen_loss")

    @property
    def average_incremental_accuracy(self) -> float:
        """The mean of ``seen_accuracy``, a share of 1."""
        return continual.average_incremental_accuracy(self.seen_accuracy)

    @property
    def all_period_loss(self) -> Floats:
        """The loss of each model over the test sets of all periods together, ``[models]``."""
        return self._together("loss")

    @property
    def own_orders(self) -> bool:
        """Whether devices meet tasks in orders of their own. Then the test sets are those of tasks."""
        return self.rows[-1].period_since is not None

    @property
    def since(self) -> NDArray[np.int64]:
        """The period from which on each test set counts as seen, ``[periods]``. Without own orders it is its own."""
        since = self.rows[-1].period_since
        return np.arange(self.periods) if since is None else np.array(since, dtype=np.int64)

    def after_each(self, measure: str) -> Floats:
        """A measure of ``algorithms/measures/continual.py`` after each period, ``[models]``."""
        of = getattr(continual, measure)
        return np.array([of(self.accuracy[:reached], since=self.since) for reached in range(1, len(self.rounds) + 1)])

    def relative_forgetting_after_each(self) -> Floats:
        """How far the perplexity rose above its best, after each period: the mean over earlier ones, ``[models]``."""
        means = [np.nan]
        for reached in range(2, len(self.rounds) + 1):
            forgot = continual.relative_forgetting(self.perplexity[:reached])
            means.append(float(mean_known(forgot[: reached - 1])))
        return np.array(means)

    def _together(self, column: str) -> Floats:
        """A column of the rows of ``rounds``, ``[models]``."""
        by_round = {row.round: row.number(column) for row in self.rows}
        return np.array([by_round[round] for round in self.rounds], dtype=np.float64)


def period_results(run: Run) -> PeriodResults | None:
    """The results of a run by period. None if no round was evaluated by period, as with a static stream."""
    rows = [row for row in run.rows if row.period_accuracy]
    if not rows:
        return None
    last = {row.task or 0: row for row in rows}
    ends = [last[period] for period in sorted(last)]
    accuracy = np.array([row.period_accuracy for row in ends], dtype=np.float64)
    unknown = [None] * accuracy.shape[1]
    return PeriodResults(
        rows,
        tuple(row.round for row in ends),
        accuracy,
        np.array([row.period_loss or unknown for row in ends], dtype=np.float64),
        language=any(row.perplexity is not None for row in rows),
        untrained=next(
            (
                np.array(row.untrained_period_accuracy, dtype=np.float64)
                for row in run.rows
                if row.untrained_period_accuracy
            ),
            None,
        ),
    )


def perplexity_of(loss: Floats) -> Floats:
    """The perplexity of a mean loss over tokens, in the same shape. NaN where it is too large for a float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(loss < _LARGEST_LOSS, np.exp(loss), np.nan)
