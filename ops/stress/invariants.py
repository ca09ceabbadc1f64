"""What must hold of every run, whatever disturbed it. A check returns complaints, or an empty list if it passes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedemu.coordinator.record.json_lines import plain
from fedemu.coordinator.record.row import COLUMNS, Row
from fedemu.coordinator.record.summary import RunOutcome, summarize

FROM_ROWS = (
    "rounds",
    "final_accuracy",
    "best_accuracy",
    "last_accuracy",
    "forgetting",
    "totals",
    "virtual_time",
    "wall_time",
    "periods",
)
"""The keys of a summary that follow from the rows alone."""


def outcomes_add_up(rows: Sequence[Row]) -> list[str]:
    """Check that every selected device has exactly one outcome, and that every round is there once and in order."""
    complaints = []
    rounds = [row.round for row in rows]
    if rounds != list(range(1, len(rows) + 1)):
        complaints.append(f"the rounds are {rounds}, not 1 to {len(rows)} in order")
    for row in rows:
        outcomes = sum(row.outcomes.values())
        if outcomes != row.selected:
            complaints.append(f"round {row.round}: {row.selected} devices selected but {outcomes} outcomes")
    return complaints


def nothing_counted_twice(rows: Sequence[Row], per_round: int) -> list[str]:
    """Check that no round accepts more than ``per_round`` replies for each of its attempts."""
    return [
        f"round {row.round}: {row.accepted} replies accepted in {row.attempts} attempts of {per_round}"
        for row in rows
        if row.outcomes["accepted"] > per_round * (row.attempts or 0)
    ]


def clock_goes_forward(rows: Sequence[Row]) -> list[str]:
    """Check that the experiment's clock never goes back."""
    times = [row.virtual_time or 0.0 for row in rows]
    return [
        f"the clock went back from {before:.3f} to {after:.3f}"
        for before, after in itertools.pairwise(times)
        if after < before
    ]


def totals_are_right(rows: Sequence[Row], summary: Mapping[str, Any]) -> list[str]:
    """Check that a summary has the number of the rows, and the accuracies, sums and times that they give."""
    whole = summarize(rows, name="", outcome="completed", seed=0, model_digest="", data_digest="")
    given = plain({name: getattr(whole, name) for name in FROM_ROWS})
    return [
        f"the summary's {name} is {summary[name]}, but the rows of metrics.jsonl give {given[name]}"
        for name in FROM_ROWS
        if summary[name] != given[name]
    ]


def same_rows(rows: Sequence[Row], undisturbed: Sequence[Row]) -> list[str]:
    """Check that rows are those of an undisturbed run, but for what ``is_measured``. Tells the first difference."""
    if len(rows) != len(undisturbed):
        return [f"metrics.jsonl has {len(rows)} rows, undisturbed {len(undisturbed)}"]
    return [
        f"round {row.round}: {column} is {value}, undisturbed {expected}"
        for row, other in zip(rows, undisturbed, strict=True)
        for column in COLUMNS
        if not is_measured(column) and (value := getattr(row, column)) != (expected := getattr(other, column))
    ][:1]


def is_measured(column: str) -> bool:
    """Whether a column of a row is measured on the machine, so that it differs from run to run: times and traffic."""
    return column.startswith("wire_") or column.endswith("_seconds") or column == "wall_time"


def ended_as_undisturbed(
    rows: Sequence[Row],
    summary: Mapping[str, Any],
    digest: str,
    undisturbed: Sequence[Row] | None = None,
    *,
    outcome: RunOutcome = "completed",
) -> list[str]:
    """Check a run that is over. It must have this ``outcome`` and the model ``digest`` of an undisturbed run.

    With the rows of the ``undisturbed`` run its own rows must be the same.
    """
    complaints = outcomes_add_up(rows) + clock_goes_forward(rows) + totals_are_right(rows, summary)
    if undisturbed is not None:
        complaints += same_rows(rows, undisturbed)
    if summary["outcome"] != outcome:
        complaints.append(f"the outcome of the run is {summary['outcome']}, and not {outcome}")
    if summary["perturbed"]:
        complaints.append("the run was perturbed: an unplanned absence decided an outcome")
    if summary["model_digest"] != digest:
        complaints.append(f"the model's digest is {summary['model_digest'][:16]}, undisturbed {digest[:16]}")
    return complaints


@dataclass
class Usage:
    """Samples of one process over a run: resident bytes and open file descriptors."""

    name: str
    resident: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def grows(self, *, slack_bytes: int = 48 * 2**20, slack_descriptors: int = 64) -> list[str]:
        """Check that the last quarter of the samples is not above the second one. Fewer than 16 samples always pass."""
        if len(self.resident) < 16:
            return []
        complaints = []
        quarter = len(self.resident) // 4
        for what, values, slack in (
            ("resident bytes", self.resident, slack_bytes),
            ("file descriptors", self.descriptors, slack_descriptors),
        ):
            before = max(values[quarter : 2 * quarter])
            after = min(values[-quarter:])
            if after > before + slack:
                complaints.append(f"{self.name}: {what} grew from {before:,} to {after:,}")
        return complaints
