"""Runs side by side: what each experiment came to over its seeds, and how many rounds it took to a target."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedemu.algorithms.metrics import forgetting
from fedemu.coordinator.run_directory import Run
from fedemu.ops.compare_runs import grouped, labels

SHARES = (0.5, 0.75, 0.95)
"""Of the target accuracy; the rounds to each are counted (Aljahdali et al., table 1)."""
_BY_ROUND = ("round_forgetting", "local_forgetting", "aggregation_forgetting")
"""Of these a run's figure is the mean over the rounds that have them; the last two only diagnosed rounds do."""
FIGURES = (
    "final_accuracy",
    "best_accuracy",
    "forgetting",
    *_BY_ROUND,
    *(f"rounds_to_{share * 100:.0f}" for share in SHARES),
    "bytes_down",
    "bytes_up",
    "virtual_time",
    "wall_time",
)
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Statistic:
    """One figure of every run of an experiment; None where a run has none (an accuracy that was never reached)."""

    values: tuple[float | None, ...]

    @property
    def known(self) -> list[float]:
        return [value for value in self.values if value is not None]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.known) if self.known else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation; None for fewer than two values."""
        return statistics.stdev(self.known) if len(self.known) > 1 else None


@dataclass(frozen=True)
class Entry:
    """One row of a comparison: an experiment, run with one seed or several. ``figures`` has the keys ``FIGURES``."""

    label: str
    runs: tuple[Run, ...]
    seeds: tuple[int | None, ...]
    figures: Mapping[str, Statistic]

    @property
    def outcome(self) -> str:
        """``completed``, or how many runs ended how."""
        counts = Counter(outcome_of(run) for run in self.runs)
        return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {name}" for name, n in counts.most_common())


@dataclass(frozen=True)
class Comparison:
    """``target`` is the accuracy to whose shares the rounds are counted; None where no run was evaluated."""

    entries: tuple[Entry, ...]
    target: float | None
    warnings: tuple[str, ...]

    def table(self) -> dict[str, Any]:
        """Everything, as JSON knows it."""
        return {"target": self.target, "warnings": list(self.warnings), "rows": [_row(entry) for entry in self.entries]}


def compare(paths: Iterable[Path], target: float | None = None) -> Comparison:
    """Compare the runs in ``paths``, each a run directory or a folder of run directories.

    Runs of one experiment with other seeds are one row. ``target`` is a share of 1; by default the best accuracy of
    the first row that was evaluated, the mean over its seeds. Raises ConfigurationError where a path holds no run.
    """
    groups, warnings = grouped(paths)
    if target is None:
        best = (Statistic(tuple(best_accuracy(run) for run in group.runs)).mean for group in groups)
        target = next((mean for mean in best if mean is not None), None)
    entries = tuple(
        Entry(label, group.runs, group.seeds, _figures(group.runs, target))
        for label, group in zip(labels(groups), groups, strict=True)
    )
    return Comparison(entries, target, tuple(warnings))


def outcome_of(run: Run) -> str:
    return str((run.summary or {}).get("outcome") or "unfinished")


def accuracies(run: Run) -> list[float]:
    """Of the evaluated rounds."""
    return [float(row["accuracy"]) for row in run.rows if row.get("accuracy") is not None]


def best_accuracy(run: Run) -> float | None:
    return max(accuracies(run), default=None)


def rounds_to(run: Run, accuracy: float) -> int | None:
    """The first evaluated round that reached ``accuracy``; None where none did."""
    for row in run.rows:
        if row.get("accuracy") is not None and row["accuracy"] >= accuracy - _ROUNDING:
            return int(row["round"])
    return None


def _figures(runs: Sequence[Run], target: float | None) -> dict[str, Statistic]:
    of_runs = [_figures_of(run, target) for run in runs]
    return {key: Statistic(tuple(figures[key] for figures in of_runs)) for key in FIGURES}


def _figures_of(run: Run, target: float | None) -> dict[str, float | None]:
    reached = accuracies(run)
    classes = [row["class_accuracy"] for row in run.rows if row.get("class_accuracy")]
    forgot = forgetting(classes) if len(classes) > 1 else math.nan
    return {
        "final_accuracy": reached[-1] if reached else None,
        "best_accuracy": best_accuracy(run),
        "forgetting": None if math.isnan(forgot) else forgot,
        **{key: _mean(run, key) for key in _BY_ROUND},
        **{
            f"rounds_to_{share * 100:.0f}": None if target is None else rounds_to(run, share * target)
            for share in SHARES
        },
        **{key: float(sum(row.get(key) or 0 for row in run.rows)) for key in ("bytes_down", "bytes_up")},
        **{key: run.rows[-1].get(key) if run.rows else None for key in ("virtual_time", "wall_time")},
    }


def _mean(run: Run, key: str) -> float | None:
    """Of a column of ``metrics.jsonl``; None where no round has it."""
    known = [row[key] for row in run.rows if row.get(key) is not None]
    return statistics.fmean(known) if known else None


def _row(entry: Entry) -> dict[str, Any]:
    figures = {
        key: {"mean": figure.mean, "deviation": figure.deviation, "values": list(figure.values)}
        for key, figure in entry.figures.items()
    }
    return {
        "label": entry.label,
        "outcome": entry.outcome,
        "runs": [
            {"directory": str(run.path), "seed": seed, "outcome": outcome_of(run), "rounds": len(run.rows)}
            for run, seed in zip(entry.runs, entry.seeds, strict=True)
        ],
        **figures,
    }
