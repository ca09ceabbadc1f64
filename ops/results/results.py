"""The results of a run, read back from its directory: for people at the end of a run, and for notebooks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedemu.coordinator.record.row import Row, updates_per_second
from fedemu.coordinator.record.run import read_run
from fedemu.coordinator.record.summary import accuracy_of_last
from fedemu.ops.figures import decimal, per_second, percent, span
from fedemu.ops.results.doubts import cause_of, doubts
from fedemu.protocol.host.paths import exists
from fedemu.protocol.messages import OUTCOMES
from fedemu.protocol.wording import counted


@dataclass(frozen=True)
class Results:
    """The results of a run. ``rows`` are its rounds in order, ``events`` the lines of ``events.jsonl``.

    ``summary`` has the keys of ``summary.json``. It is empty if the run is unfinished. ``outcome`` is how the run
    ended, ``unfinished`` before that. A run that was resumed for more rounds, and has not got them, is ``interrupted``.
    """

    directory: Path
    rows: tuple[Row, ...]
    events: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    outcome: str

    @classmethod
    def read(cls, directory: Path) -> Results:
        """Read a run. Raises ConfigurationError if ``directory`` holds none, or a file of it is damaged."""
        run = read_run(directory)
        return cls(directory, run.rows, run.events, run.summary, run.outcome)

    @property
    def accuracy(self) -> float | None:
        """The accuracy of the final model on the test set, a share of 1. None if nothing was evaluated."""
        value = self.summary.get("final_accuracy")
        return None if value is None else float(value)

    @property
    def perplexity(self) -> float | None:
        """The perplexity of the last evaluated model on the test set.

        None if nothing was evaluated, if the data are no language, or if it is too large for a float64.
        """
        evaluated = [row.perplexity for row in self.rows if row.accuracy is not None]
        return evaluated[-1] if evaluated else None

    @property
    def cause(self) -> str:
        """The cause for which the run diverged. Empty if it did not."""
        return cause_of(self.events, self.summary)

    @property
    def model(self) -> Path:
        """The file of the final model's variables, in the format safetensors."""
        return self.directory / "model.safetensors"

    @property
    def report(self) -> Path:
        """The file of the report. It need not exist."""
        return self.directory / "report.html"

    @property
    def speed(self) -> float | None:
        """The accepted device updates per real second of rounds. None before the first round is over."""
        accepted = sum(row.accepted or 0 for row in self.rows)
        return updates_per_second(accepted, sum(row.round_seconds or 0.0 for row in self.rows))

    def accuracy_of_last(self, rounds: int) -> float | None:
        """The mean accuracy of the evaluated rounds among the last ``rounds``. None for a run with fewer rounds."""
        return accuracy_of_last(self.rows, rounds)

    def to_json(self) -> str:
        """The summary and the run directory as one JSON object, for other programs."""
        return json.dumps({"directory": str(self.directory), **self.summary}, allow_nan=False)

    def to_text(self) -> str:
        """The results in a few lines, for people."""
        summary, lines = self.summary, []
        totals = summary.get("totals") or {}
        real, virtual = (span(summary.get(key) or 0.0) for key in ("wall_time", "virtual_time"))
        rounds = counted(summary.get("rounds") or 0, "round")
        end = f"{self.outcome}, {rounds} in {real} ({virtual} of the experiment's time)"
        lines.append(f"{summary.get('name')}: {end}")
        if self.cause:
            lines.append(f"  cause     {self.cause}")
        if self.accuracy is not None:
            also = "" if self.perplexity is None else f"  perplexity {decimal(self.perplexity, 2)}"
            lines.append(
                f"  accuracy  {percent(self.accuracy)}  (best {percent(summary.get('best_accuracy') or 0.0)}){also}"
            )
        lines += _periods(summary.get("periods"))
        if summary.get("rounds"):
            counts = [f"{totals[outcome]:,} {outcome}" for outcome in OUTCOMES if totals.get(outcome)]
            speed = "" if self.speed is None else f"; {per_second(self.speed)} updates/s"
            lines.append(
                f"  devices   {totals.get('selected', 0):,} asked: {', '.join(counts) or 'none replied'}{speed}"
            )
        lines += [f"  doubt     {doubt}" for doubt in doubts(self.rows, summary)]
        if summary.get("perturbed"):
            lines.append(
                "  perturbed: a device was given up or lost its own state, unplanned, so the same run may end otherwise"
            )
        lines.append(f"  model     {self.model}  sha256 {str(summary.get('model_digest'))[:16]}")
        if exists(self.report):
            lines.append(f"  report    {self.report}")
        return "\n".join(lines)


def _periods(periods: Mapping[str, Any] | None) -> list[str]:
    """One line about the periods of the stream, none if there is only one."""
    if not periods:
        return []
    told = [f"{len(periods['rounds'])} of {len(periods['accuracy'][0])}"]
    for key, name in (
        ("average_accuracy", "average accuracy"),
        ("average_incremental_accuracy", "average incremental accuracy"),
        ("average_forgetting", "forgetting"),
        ("backward_transfer", "backward transfer"),
        ("forward_transfer", "forward transfer"),
    ):
        if periods.get(key) is not None:
            told.append(f"{name} {percent(periods[key])}")
    return [f"  periods   {', '.join(told)}"]
