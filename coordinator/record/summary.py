"""The summary of a run, as ``summary.json`` holds it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, Literal

import numpy as np

from fedemu.algorithms.measures import continual
from fedemu.algorithms.measures.forgetting import Floats, forgetting
from fedemu.coordinator.record.row import COLUMNS, Row
from fedemu.protocol.host.hardware import cores, graphics, processor
from fedemu.protocol.messages import OUTCOMES

RunOutcome = Literal["completed", "diverged", "quorum", "interrupted", "failed"]

_COUNTS = {"selected", *OUTCOMES, "attempts", "bytes_down", "bytes_up", "wire_bytes_down", "wire_bytes_up"}
TOTALS = tuple(column for column in COLUMNS if column in _COUNTS)
"""The columns of a row that a summary adds up, in the order of the rows."""
LAST_ROUNDS = 100
"""The number of last rounds over which ``last_accuracy`` is a mean."""


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that may change a result."""
    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", "pyzmq", "fedemu"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def machine() -> dict[str, Any]:
    """The machine in a few facts: ``system``, ``processor``, ``cores`` usable here, ``memory_bytes``.

    With NVIDIA's driver also ``gpus``, their models, ``driver``, its version, and ``cuda``, the version that torch has.
    """
    found = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor().get("model name") or platform.processor() or platform.machine(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if gpus := graphics():
        torch = sys.modules.get("torch")
        found |= {**gpus, "cuda": getattr(getattr(torch, "version", None), "cuda", None)}
    return found


@dataclass(frozen=True)
class Summary:
    """A run at its end. Accuracies are shares of 1, times are seconds. NaN or None means that nothing was evaluated.

    ``last_accuracy`` is the mean of the last 100 rounds, None if there are fewer. ``rounds`` counts finished rounds,
    ``totals`` has the sums over the rounds of the columns ``TOTALS``, ``periods`` is the result of
    ``summarize_periods``. ``ended`` is the date and the time at the end, in UTC. ``compute`` says how the run was
    computed: by the ``coordinator`` and by the ``machines`` of the fleet, each with all its ways, whether it was
    ``mixed``, with several ways, and by which ``executor`` devices were computed.
    """

    name: str
    outcome: RunOutcome
    rounds: int
    final_accuracy: float | None
    best_accuracy: float | None
    last_accuracy: float | None
    forgetting: float | None
    perturbed: bool
    totals: Mapping[str, int]
    virtual_time: float
    wall_time: float
    model_digest: str
    seed: int
    data_digest: str
    chance_accuracy: float | None = None
    """The accuracy of always answering with the most frequent class of the test samples. None for language data."""
    periods: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=versions)
    machine: Mapping[str, Any] = field(default_factory=machine)
    compute: Mapping[str, Any] = field(default_factory=dict)
    ended: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


def summarize(
    rows: Sequence[Row],
    *,
    name: str,
    outcome: RunOutcome,
    seed: int,
    model_digest: str,
    data_digest: str,
    perturbed: bool = False,
    chance: float | None = None,
    compute: Mapping[str, Any] | None = None,
) -> Summary:
    """The summary of a run with these rows; its times are those of the last row."""
    accuracies = [row.accuracy for row in rows if row.accuracy is not None]
    last = rows[-1] if rows else Row(round=0)
    return Summary(
        name=name,
        outcome=outcome,
        rounds=len(rows),
        final_accuracy=accuracies[-1] if accuracies else None,
        best_accuracy=max(accuracies, default=None),
        last_accuracy=accuracy_of_last(rows),
        forgetting=forgetting_of(rows),
        perturbed=perturbed,
        totals={key: sum(int(row.number(key) or 0) for row in rows) for key in TOTALS},
        virtual_time=last.virtual_time or 0.0,
        wall_time=last.wall_time or 0.0,
        model_digest=model_digest,
        seed=seed,
        data_digest=data_digest,
        chance_accuracy=chance,
        periods=summarize_periods(rows),
        compute=compute or {},
    )


def summarize_periods(rows: Sequence[Row]) -> dict[str, Any] | None:
    """The results of each period's model on the test sets of all periods. None without periods.

    ``docs/run_directory.md`` explains the keys. A period's model is that of its last evaluated round. A period without
    an evaluated round is left out. Rows that have a perplexity belong to language data.
    """
    ends = {row.task or 0: row for row in rows if row.period_accuracy}
    if not ends:
        return None
    last = [*ends.values()]
    accuracy, loss = (_array(last, column) for column in ("period_accuracy", "period_loss"))
    seen = _array(last, "seen_accuracy")
    untrained = next((row.untrained_period_accuracy for row in rows if row.untrained_period_accuracy), None)
    since = last[-1].period_since
    found = {
        "rounds": [row.round for row in last],
        "accuracy": accuracy,
        "loss": loss,
        "seen_accuracy": seen,
        "average_accuracy": continual.average_accuracy(accuracy, since=since),
        "average_incremental_accuracy": continual.average_incremental_accuracy(seen),
        "average_forgetting": continual.average_forgetting(accuracy, since),
        "backward_transfer": continual.backward_transfer(accuracy, since),
        "untrained_accuracy": untrained,
        "forward_transfer": None if untrained is None else continual.forward_transfer(accuracy, _known(untrained)),
        "forgetting": continual.forgetting_factor(accuracy),
    }
    if any(row.perplexity is not None for row in last):
        perplexity = continual.perplexity(-loss, np.ones_like(loss))
        found["perplexity"] = perplexity
        found["all_period_perplexity"] = [row.perplexity for row in last]
        found["relative_forgetting"] = continual.relative_forgetting(perplexity)
    return found


def forgetting_of(rows: Sequence[Row]) -> float | None:
    """The forgetting measure F over the evaluated rounds. None for fewer than two, and without classes to compare."""
    value = forgetting(_array([row for row in rows if row.class_accuracy], "class_accuracy"))
    return None if np.isnan(value) else value


def accuracy_of_last(rows: Sequence[Row], rounds: int = LAST_ROUNDS) -> float | None:
    """The mean accuracy of the evaluated rounds among the last ``rounds``. None for a run with fewer rounds.

    Legate et al. (2023), section 4, report the mean over the last 100 rounds, after Reddi et al. (2020).
    """
    known = [row.accuracy for row in rows[-rounds:] if row.accuracy is not None]
    return float(np.mean(known)) if known and len(rows) >= rounds else None


def _known(values: Sequence[float | None]) -> Floats:
    return np.array(values, dtype=np.float64)


def _array(rows: Sequence[Row], column: str) -> Floats:
    """A column as an array ``[rows, ...]``; NaN where nothing was measured."""
    return np.array([getattr(row, column) for row in rows], dtype=np.float64)
