"""The row that a finished round leaves in ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedemu.algorithms.interface import Context
from fedemu.algorithms.measures.forgetting import accuracy_lost
from fedemu.coordinator.asks.ask import VERDICTS
from fedemu.coordinator.evaluation.evaluate import Evaluation
from fedemu.coordinator.rounds.tally import Tally
from fedemu.coordinator.timeline import Timeline

EVALUATED = (
    "accuracy",
    "loss",
    "perplexity",
    "class_accuracy",
    "seen_accuracy",
    "seen_loss",
    "period_accuracy",
    "period_loss",
)
"""The columns that are an ``Evaluation``'s fields; None where the round was not evaluated."""


def round_row(
    context: Context,
    tally: Tally,
    timeline: Timeline,
    evaluation: Evaluation | None,
    last: Sequence[float] | None,
    diagnosis: Mapping[str, Any] | None,
    remarks: Mapping[str, Any],
) -> dict[str, Any]:
    """``docs/run_directory.md`` explains the columns, of which the caller adds those about the round's real costs.

    ``last`` is the class accuracy of the evaluation before, ``diagnosis`` the round's line of ``diagnosis.jsonl``,
    ``remarks`` what the algorithm says.
    """
    lost = None
    if evaluation is not None and last is not None:
        lost = float(accuracy_lost(last, evaluation.class_accuracy))
    found = diagnosis or {}
    return {
        "round": context.round,
        "task": context.task,
        "virtual_time": timeline.time,
        "wall_time": timeline.spent,
        **{column: None if evaluation is None else getattr(evaluation, column) for column in EVALUATED},
        "round_forgetting": lost,
        "local_forgetting": found.get("local_forgetting"),
        "aggregation_forgetting": found.get("aggregation_forgetting"),
        "online": tally.online,
        "selected": sum(tally.outcomes.values()),
        **{verdict: tally.outcomes[verdict] for verdict in VERDICTS},
        "attempts": tally.attempts,
        "bytes_down": tally.bytes_down,
        "bytes_up": tally.bytes_up,
        "device_metrics": {name: tally.metrics[name] / tally.measured[name] for name in sorted(tally.metrics)},
        "remarks": dict(remarks),
    }
