"""The comparison of runs on class-incremental streams: accuracy over the classes so far, and costs per round.

The figures are those of Babakniya et al., "A Data-Free Approach to Mitigate Catastrophic Forgetting in Federated Class
Incremental Learning for Vision Tasks" (2023), section 5, table 4 and figure 5, with the traffic beside the times.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import Run
from fedemu.ops.compare.entry import Entry, Statistic
from fedemu.ops.compare.runs import Group, labels
from fedemu.ops.results.periods import Floats, period_results
from fedemu.ops.results.words import at

QUALITY = ("average_incremental_accuracy", "average_forgetting")
COSTS = (
    "device_seconds_first",
    "device_seconds_later",
    "coordinator_seconds_first",
    "coordinator_seconds_later",
    "server_job_seconds",
    "bytes_down_first",
    "bytes_down_later",
    "bytes_up_first",
    "bytes_up_later",
)
"""The costs per round, in the first task and in later ones. Seconds are real: those of a device's training and of the
coordinator's own work, as the median over rounds. Bytes are emulated: those to a device that is asked, and from one
that replies. ``server_job_seconds`` is per task, for methods with one server job per task. The server jobs of other
methods are part of the coordinator's seconds."""

Rows = Sequence[Row]


@dataclass(frozen=True)
class Method:
    """An experiment of a study. ``costs`` has the keys ``COSTS``.

    ``seen [runs, tasks]`` is the accuracy over the classes so far after each task, NaN for tasks not reached.
    """

    label: str
    entry: Entry
    costs: Mapping[str, Statistic]
    seen: Floats

    @property
    def reached(self) -> str:
        """The tasks that all runs have reached, and how many there are, as in ``2 of 5``."""
        tasks = at(self.entry.experiment, ("stream", "tasks"))
        return f"{int((~np.isnan(self.seen)).sum(axis=1).min())} of {tasks}"

    @property
    def figures(self) -> Mapping[str, Statistic]:
        """The figures by the keys ``QUALITY`` and ``COSTS``."""
        return {**{key: self.entry.figures[key] for key in QUALITY}, **self.costs}

    def table(self) -> dict[str, Any]:
        """The method in the form of JSON."""
        return {
            "label": self.entry.label,
            **{key: figure.table() for key, figure in self.figures.items()},
            "seen_accuracy": [[None if np.isnan(value) else value for value in run] for run in self.seen],
        }


@dataclass(frozen=True)
class TaskStudy:
    """The experiments with the classes of one data set, which ``dataset`` names."""

    dataset: str
    methods: tuple[Method, ...]

    def table(self) -> dict[str, Any]:
        """The study in the form of JSON."""
        return {"dataset": self.dataset, "methods": [method.table() for method in self.methods]}


def task_studies(entries: Sequence[Entry]) -> tuple[TaskStudy, ...]:
    """One study for each data set whose classes come task by task. Empty if there is none."""
    by_data: dict[str, list[Entry]] = {}
    for entry in entries:
        tested = any(period_results(run) for run in entry.runs)
        if tested and at(entry.experiment, ("stream", "kind")) == "classes":
            by_data.setdefault(str(at(entry.experiment, ("data", "dataset"))), []).append(entry)
    return tuple(
        TaskStudy(
            dataset,
            tuple(_method(label, entry) for label, entry in zip(_named(members, entries), members, strict=True)),
        )
        for dataset, members in by_data.items()
    )


def _named(members: Sequence[Entry], entries: Sequence[Entry]) -> list[str]:
    """The labels of the experiments. Settings that differ only between studies are left out of them."""
    if len(members) == len(entries):
        return [entry.label for entry in members]
    return labels([Group(entry.runs[0].path, entry.experiment, entry.runs, entry.seeds) for entry in members])


def _method(label: str, entry: Entry) -> Method:
    of_runs = [_costs(run.rows) for run in entry.runs]
    costs = {key: Statistic(tuple(costs[key] for costs in of_runs)) for key in COSTS}
    seen = [_seen(run) for run in entry.runs]
    table = np.full((len(seen), max(map(len, seen))), np.nan)
    for line, values in zip(table, seen, strict=True):
        line[: len(values)] = values
    return Method(label, entry, costs, table)


def _seen(run: Run) -> Floats:
    found = period_results(run)
    return np.empty(0) if found is None else found.seen_accuracy


def _costs(rows: Rows) -> dict[str, float | None]:
    apart = _jobs_once_per_task(rows)
    jobs = [row.server_seconds for row in rows if row.server_seconds]
    found: dict[str, float | None] = {"server_job_seconds": statistics.fmean(jobs) if apart and jobs else None}
    for stretch, of_stretch in (
        ("first", [row for row in rows if row.task == 0]),
        ("later", [row for row in rows if row.task]),
    ):
        coordinator = [
            row.coordinator_seconds - ((row.server_seconds or 0.0) if apart else 0.0)
            for row in of_stretch
            if row.coordinator_seconds is not None
        ]
        device = [row.device_seconds for row in of_stretch if row.device_seconds is not None]
        found |= {
            f"device_seconds_{stretch}": statistics.median(device) if device else None,
            f"coordinator_seconds_{stretch}": statistics.median(coordinator) if coordinator else None,
            f"bytes_down_{stretch}": _per(of_stretch, "bytes_down", "selected"),
            f"bytes_up_{stretch}": _per(of_stretch, "bytes_up", "accepted", "rejected"),
        }
    return found


def _jobs_once_per_task(rows: Rows) -> bool:
    """Whether every task has server jobs in one round at most."""
    return max(Counter(row.task for row in rows if row.server_seconds).values(), default=0) <= 1


def _per(rows: Rows, key: str, *outcomes: str) -> float | None:
    """A column's sum, divided by the number of devices in these columns. None if there were none.

    Rows that lack the column do not count.
    """
    known = [(row, value) for row in rows if (value := row.number(key)) is not None]
    devices = sum(row.number(outcome) or 0 for row, _ in known for outcome in outcomes)
    return sum(value for _, value in known) / devices if devices else None
