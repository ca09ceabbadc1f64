"""What must hold of every run, however it was disturbed; a check returns its complaints, none if it holds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedemu.protocol.messages import OUTCOMES

Row = Mapping[str, Any]


def outcomes_add_up(rows: Sequence[Row]) -> list[str]:
    """Every selected device ends in exactly one outcome, and every round is there once, in order."""
    complaints = []
    if [row["round"] for row in rows] != list(range(1, len(rows) + 1)):
        complaints.append(f"the rounds are {[row['round'] for row in rows]}, not 1 to {len(rows)} in order")
    for row in rows:
        outcomes = sum(row[outcome] for outcome in OUTCOMES)
        if outcomes != row["selected"]:
            complaints.append(f"round {row['round']}: {row['selected']} devices selected but {outcomes} outcomes")
    return complaints


def nothing_counted_twice(rows: Sequence[Row], per_round: int) -> list[str]:
    """No round accepts more replies than were wanted over its attempts."""
    return [
        f"round {row['round']}: {row['accepted']} replies accepted in {row['attempts']} attempts of {per_round}"
        for row in rows
        if row["accepted"] > per_round * row["attempts"]
    ]


def clock_goes_forward(rows: Sequence[Row]) -> list[str]:
    """The experiment's clock never goes back."""
    times = [row["virtual_time"] for row in rows]
    return [
        f"the clock went back from {before:.3f} to {after:.3f}"
        for before, after in itertools.pairwise(times)
        if after < before
    ]


@dataclass
class Usage:
    """Samples of one process over a run: resident bytes and open file descriptors."""

    name: str
    resident: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def grows(self, *, slack_bytes: int = 48 * 2**20, slack_descriptors: int = 64) -> list[str]:
        """Compares the last quarter of the samples with the second one; fewer than 16 say nothing."""
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
