"""The figures of a run on a stream of periods, in words and numbers for its page."""

from __future__ import annotations

import math

from fedemu.algorithms.measures import continual
from fedemu.ops.pages.parts import Table, numbers_by_name
from fedemu.ops.results.periods import PeriodResults, perplexity_of

_TITLES = ("period", "last round", "just learnt", "latest model", "forgetting factor", "seen so far", "all periods")


def period_cards(results: PeriodResults) -> list[tuple[str, str]]:
    """Labels and figures of the latest model."""
    language = [
        ("perplexity, all periods", _number(perplexity_of(results.all_period_loss)[-1], ".4g")),
        ("relative forgetting, mean", _number(results.relative_forgetting_after_each()[-1], "+.1%")),
    ]
    return [
        *(language if results.language else []),
        ("average accuracy", _number(results.after_each("average_accuracy")[-1], ".1%")),
        ("average incremental accuracy", _number(results.average_incremental_accuracy, ".1%")),
        ("average forgetting", _number(results.after_each("average_forgetting")[-1], ".3f")),
        ("backward transfer", _number(results.after_each("backward_transfer")[-1], ".3f")),
        *([] if results.untrained is None else [("forward transfer", _number(results.forward_transfer, ".3f"))]),
    ]


def period_table(results: PeriodResults) -> Table:
    """A line for each period. Its values are accuracies, or perplexities if the data are language.

    The page explains the columns. A value that is not known yet is a dash.
    """
    if results.language:
        table, form = results.perplexity, ".4g"
        seen, together = perplexity_of(results.seen_loss), perplexity_of(results.all_period_loss)
        forgot, lost = continual.relative_forgetting(table), "+.1%"
    else:
        table, form, seen, together = results.accuracy, ".1%", results.seen_accuracy, results.all_period_accuracy
        forgot, lost = continual.forgetting_factor(table), "+.3f"
    reached = len(results.rounds)
    lines = [
        (
            f"{period}",
            f"{results.rounds[period]:,}" if period < reached else "–",
            _number(table[period, period], form) if period < reached else "–",
            _number(table[-1, period], form),
            _number(forgot[period], lost) if period < reached - 1 else "–",
            _number(seen[period], form) if period < reached else "–",
            _number(together[period], form) if period < reached else "–",
        )
        for period in range(results.periods)
    ]
    return numbers_by_name(_TITLES, lines)


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else f"{value:{form}}"
