"""How a run did on the periods of its stream, read from its rows: what reports and comparisons draw and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.measures import continual as continual_metrics
from fedemu.algorithms.measures.forgetting import mean_known
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import Run

Floats = NDArray[np.float64]

_LARGEST_LOSS = 700.0
"""Beyond it a perplexity is no float64."""


@dataclass(frozen=True)
class PeriodResults:
    """A run on a stream of periods, also an unfinished one.

    ``rows`` are the rows of ``metrics.jsonl`` that were evaluated by period, at least one. ``rounds [models]`` is the
    last evaluated round of each period reached; ``accuracy`` and ``loss [models, periods]`` are of the model after
    that round on each period's test set, NaN where there is none. ``language`` is whether perplexity is the measure.
    """

    rows: Sequence[Row]
    rounds: tuple[int, ...]
    accuracy: Floats
    loss: Floats
    language: bool

    @property
    def periods(self) -> int:
        return int(self.accuracy.shape[1])

    @property
    def perplexity(self) -> Floats:
        """``[models, periods]``."""
        return perplexity_of(self.loss)

    @property
    def all_period_accuracy(self) -> Floats:
        """Over the test sets of all periods together, ``[models]``."""
        return self._together("accuracy")

    @property
    def seen_accuracy(self) -> Floats:
        """Over the test sets of the periods up to the model's own together, ``[models]``."""
        return self._together("seen_accuracy")

    @property
    def seen_loss(self) -> Floats:
        """Over the same test sets as ``seen_accuracy``, ``[models]``."""
        return self._together("seen_loss")

    @property
    def average_incremental_accuracy(self) -> float:
        return continual_metrics.average_incremental_accuracy(self.seen_accuracy)

    @property
    def all_period_loss(self) -> Floats:
        """Over the test sets of all periods together, ``[models]``."""
        return self._together("loss")

    def after_each(self, measure: str) -> Floats:
        """What a measure of ``continual_metrics`` came to after each period: ``[models]``."""
        of = getattr(continual_metrics, measure)
        return np.array([of(self.accuracy[:reached]) for reached in range(1, len(self.rounds) + 1)])

    def relative_forgetting_after_each(self) -> Floats:
        """The mean over the earlier periods of how much the perplexity rose above its best, ``[models]``."""
        means = [np.nan]
        for reached in range(2, len(self.rounds) + 1):
            forgot = continual_metrics.relative_forgetting(self.perplexity[:reached])
            means.append(float(mean_known(forgot[: reached - 1])))
        return np.array(means)

    def _together(self, column: str) -> Floats:
        by_round = {row.round: row.number(column) for row in self.rows}
        return np.array([by_round[round] for round in self.rounds], dtype=np.float64)


def period_results(run: Run) -> PeriodResults | None:
    """None where no round was evaluated by period, as with a static stream."""
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
    )


def perplexity_of(loss: Floats) -> Floats:
    """Of a mean loss over tokens; NaN where it is too large to be written."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(loss < _LARGEST_LOSS, np.exp(loss), np.nan)
