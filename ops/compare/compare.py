"""The comparison of runs: the figures of each experiment over its seeds, and the rounds that it took to a target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedemu.coordinator.record.summary import LAST_ROUNDS
from fedemu.ops.compare.entry import Entry, Statistic, best_accuracy, figures_of
from fedemu.ops.compare.looks import places
from fedemu.ops.compare.measured import measured
from fedemu.ops.compare.paired import BETTER, paired_tests
from fedemu.ops.compare.replay import ReplayStudy, replay_studies
from fedemu.ops.compare.runs import grouped, labels
from fedemu.ops.compare.tasks import TaskStudy, task_studies


@dataclass(frozen=True)
class Comparison:
    """A comparison of experiments, one entry for each.

    Rounds are counted until a run reaches certain shares of the accuracy ``target``, which is None if no run was
    evaluated. ``replay`` compares experiments that differ in their replay only, ``tasks`` those whose classes come task
    by task. ``last`` is the number of last rounds whose mean accuracy is given. ``command`` makes the comparison again.
    """

    entries: tuple[Entry, ...]
    target: float | None
    warnings: tuple[str, ...]
    replay: tuple[ReplayStudy, ...] = ()
    tasks: tuple[TaskStudy, ...] = ()
    last: int = LAST_ROUNDS
    command: tuple[str, ...] = ()

    @property
    def seeds_differ(self) -> bool:
        """Whether some experiments have runs of other seeds than others, so that their means are not of the same."""
        return len({frozenset(entry.seeds) for entry in self.entries}) > 1

    def table(self) -> dict[str, Any]:
        """The whole comparison in the form of JSON, as ``compare.json`` holds it."""
        own = measured(self.entries)
        return {
            "target": self.target,
            "last": self.last,
            "warnings": list(self.warnings),
            "rows": [
                {**entry.table(), "measures": {each.column: figures[place].table() for each, figures in own.items()}}
                for place, entry in enumerate(self.entries)
            ],
            "tests": [test.table() for key in BETTER for test in paired_tests(self.entries, key)],
            "replay": [study.table() for study in self.replay],
            "tasks": [study.table() for study in self.tasks],
        }


def compare(paths: Iterable[Path], target: float | None = None, last: int = LAST_ROUNDS) -> Comparison:
    """Compare the runs in ``paths``, each of which is a run directory or a folder of run directories.

    Runs of one experiment with different seeds are one entry. ``target`` is a share of 1. Its default is the best
    accuracy of the first entry that was evaluated, as the mean over its seeds. ``last_accuracy`` is the mean over the
    last ``last`` rounds. Raises ConfigurationError if a path holds no run.
    """
    paths = list(paths)
    command = ["fedemu", "compare", *map(str, paths)]
    command += [] if target is None else ["--target", repr(float(target))]
    command += [] if last == LAST_ROUNDS else ["--last", str(last)]
    groups, warnings = grouped(paths)
    if target is None:
        best = (Statistic(tuple(best_accuracy(run) for run in group.runs)).mean for group in groups)
        target = next((mean for mean in best if mean is not None), None)
    looks = places([group.experiment for group in groups])
    entries = tuple(
        Entry(label, group.runs, group.seeds, figures_of(group.runs, target, last), group.experiment, place)
        for label, group, place in zip(labels(groups), groups, looks, strict=True)
    )
    studies = replay_studies(entries), task_studies(entries)
    return Comparison(entries, target, tuple(warnings), *studies, last, tuple(command))
