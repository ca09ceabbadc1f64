"""The figures of a run on a stream of periods, in words and numbers for its page."""

from __future__ import annotations

import math

from fedemu.algorithms.measures import continual
from fedemu.ops.figures import percent
from fedemu.ops.pages.parts import Table, numbers_by_name
from fedemu.ops.results.periods import PeriodResults, perplexity_of

_TITLES = ("period", "last round", "just learnt", "latest model", "forgetting factor", "seen so far", "all periods")


def period_cards(results: PeriodResults) -> list[tuple[str, str]]:
    """Labels and figures of the latest model."""
    language = [
        ("perplexity, all periods", _number(perplexity_of(results.all_period_loss)[-1])),
        ("relative forgetting, mean", _share(results.relative_forgetting_after_each()[-1])),
    ]
    return [
        *(language if results.language else []),
        ("average accuracy", _share(results.after_each("average_accuracy")[-1])),
        ("average incremental accuracy", _share(results.average_incremental_accuracy)),
        ("average forgetting", _share(results.after_each("average_forgetting")[-1])),
        ("backward transfer", _share(results.after_each("backward_transfer")[-1])),
        *([] if results.untrained is None else [("forward transfer", _share(results.forward_transfer))]),
    ]


def period_table(results: PeriodResults) -> Table:
    """A line for each period. Its values are accuracies, or perplexities if the data are language.

    The page explains the columns. A value that is not known yet is a dash. With own orders of tasks the columns of a
    test set are about the task of the line's number.
    """
    if results.language:
        table, form = results.perplexity, _number
        seen, together = perplexity_of(results.seen_loss), perplexity_of(results.all_period_loss)
        forgot = continual.relative_forgetting(table)
    else:
        table, form, seen, together = results.accuracy, _share, results.seen_accuracy, results.all_period_accuracy
        forgot = continual.forgetting_factor(table)
    reached = len(results.rounds)
    lines = [
        (
            f"{period + 1}",
            f"{results.rounds[period]:,}" if period < reached else "–",
            form(table[since, period]) if since < reached else "–",
            form(table[-1, period]),
            _share(forgot[period]) if since < reached - 1 else "–",
            form(seen[period]) if period < reached else "–",
            form(together[period]) if period < reached else "–",
        )
        for period, since in enumerate(results.since.tolist())
    ]
    return numbers_by_name(_TITLES, lines)


def _share(value: float) -> str:
    return "–" if math.isnan(value) else percent(value)


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}"
