"""What a run's page shows of generators: how good each one is, and what it made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import Run
from fedemu.ops.figures import percent
from fedemu.ops.pages.parts import Table, numbers_by_name
from fedemu.ops.report.plots.generated import Generated, samples_of_task

MOST_TASKS: Final = 12
"""A page shows at most this many tasks of a stream, evenly spaced, and the last task is one of them."""
SHARES: Final = ("recognised", "agreed")
"""The figures of a generator that are shares, which the page shows in percent."""

ByTask = Mapping[int, Generated]
"""What was generated, by task."""


def generated_plots(generated: ByTask) -> dict[str, Callable[[ByTask], Figure | None]]:
    """The plots of the tasks that are shown, by name. Each plot takes ``generated`` and draws one task of it."""
    tasks = list(generated)
    chosen = np.linspace(0, len(tasks) - 1, min(len(tasks), MOST_TASKS)).round().astype(int)
    return {f"generated-{tasks[place]}": partial(_of_task, tasks[place]) for place in chosen}


def generator_table(rows: Sequence[Row]) -> Table | None:
    """A line for each task whose rows have remarks about a generator. None if no row has such remarks."""
    told: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        if said := row.about("generator"):
            told.setdefault(row.task or 0, said)
    if not told:
        return None
    names = list(dict.fromkeys(name for said in told.values() for name in said))
    lines = [(f"{task + 1}", *(_figure(name, said.get(name)) for name in names)) for task, said in told.items()]
    return numbers_by_name(("task", *(name.replace("_", " ") for name in names)), lines)


def missing_pictures(run: Run) -> list[str]:
    """A sentence for each task whose pictures could not be kept."""
    return [
        f"There are no pictures of task {int(failure.get('task') or 0) + 1}: {failure.get('detail')}"
        for failure in run.named("pictures_failed")
    ]


def _of_task(task: int, generated: ByTask) -> Figure | None:
    """On top a real sample of each class, and below it the images of that class that the generator made."""
    return samples_of_task(task, generated[task])


def _figure(name: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return "–"
    return percent(value) if name in SHARES else f"{value:.4g}"
