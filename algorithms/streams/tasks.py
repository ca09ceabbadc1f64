"""Class-incremental streams: each period is a task, which brings classes that no other task has.

All devices meet the tasks in one order, or each device in an order of its own. Then a period has a task for each
device, and the test sets are those of the tasks, by their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedemu.algorithms.data.flat import Indices, owners_of
from fedemu.algorithms.data.partition import Partition
from fedemu.algorithms.data.partitioners import Labels
from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.algorithms.streams.period_tests import PeriodTests, checked
from fedemu.protocol import seeds
from fedemu.protocol.errors import ConfigurationError


@dataclass(frozen=True)
class ClassTasks:
    """Task ``t`` brings the classes ``order[offsets[t]:offsets[t + 1]]``.

    ``order [classes]`` holds every class once, ``offsets`` are ``[tasks + 1]``. In period t device d meets the task
    ``own[d, t]``; ``own [devices, tasks]`` is None if every device meets task t in period t.
    """

    order: Indices
    offsets: Indices
    own: Indices | None = None

    def __len__(self) -> int:
        """The number of tasks."""
        return len(self.offsets) - 1

    @property
    def task(self) -> Indices:
        """The task of each class, ``[classes]``."""
        return np.searchsorted(self.offsets, self.position, side="right") - 1

    @property
    def since(self) -> Indices:
        """The period in which some device first meets each task, ``[tasks]``."""
        return np.arange(len(self)) if self.own is None else np.argsort(self.own, axis=1).min(axis=0)

    @property
    def position(self) -> Indices:
        """The position of each class in the order, ``[classes]``: its row in a head that grows task by task."""
        return np.argsort(self.order)

    @classmethod
    def of(cls, classes: int, tasks: int, order: Sequence[int] | Indices) -> ClassTasks:
        """Tasks that bring consecutive parts of the order. The first ``classes % tasks`` tasks bring one class more.

        ``order`` is a permutation of all classes, given or drawn (``generator.permutation(classes)``). Raises
        ConfigurationError if it is not, or if there are not enough classes.
        """
        if not 1 <= tasks <= classes:
            raise ConfigurationError(
                f"stream.tasks = {tasks}, but {classes} classes make at least 1 task and at most {classes}"
            )
        given = np.asarray(order, dtype=np.int64)
        values, counts = np.unique(given, return_counts=True)
        for faulty, fault in (
            (np.setdiff1d(values, np.arange(classes)), "names a class that there is not"),
            (values[counts > 1], "repeats"),
            (np.setdiff1d(np.arange(classes), values), "misses"),
        ):
            if len(faulty):
                raise ConfigurationError(
                    f"the class order {fault}: {', '.join(map(str, faulty[:10]))}; "
                    f"stream.order must name each of the classes 0 to {classes - 1} once, or be empty"
                )
        sizes = [len(part) for part in np.array_split(given, tasks)]
        return cls(given, np.concatenate([[0], np.cumsum(sizes)]))


def own_orders(tasks: ClassTasks, devices: int, seed: int) -> ClassTasks:
    """The same tasks, which each device meets in an order of its own. It is a function of the seed and the device."""
    drawn = [
        seeds.generator(seed, device=device, purpose="task order").permutation(len(tasks)) for device in range(devices)
    ]
    return replace(tasks, own=np.array(drawn, dtype=np.int64).reshape(devices, len(tasks)))


def class_incremental(
    labels: Labels, test_labels: Labels, partition: Partition, tasks: ClassTasks, *, generator: np.random.Generator
) -> tuple[Arrivals, PeriodTests]:
    """A stream whose periods are tasks. All samples of a task's classes arrive at the beginning of its period.

    A device's samples of a period are in random order. A task is tested on the test split's samples of its classes. Any
    partition can be used. MFCL spreads each task by itself with Dir(1) (Babakniya et al., 2023, section 5). That of
    ``dirichlet`` is the same, if ``min_samples`` is 0 and ``retry`` and ``balanced`` are off: it spreads each class by
    itself.
    """
    for part in (labels, test_labels):
        if len(part) and not 0 <= part.min() <= part.max() < len(tasks.order):
            raise ConfigurationError(
                f"the tasks are made of {len(tasks.order)} classes, but labels go from {part.min()} to {part.max()}"
            )
    shuffled = generator.permutation(len(partition.train_indices))
    period = tasks.task[labels[partition.train_indices[shuffled]]]
    tests = PeriodTests.of(
        tasks.task[test_labels], np.arange(len(test_labels)), period_count=len(tasks), held_out=False
    )
    if tasks.own is not None:
        period = np.argsort(tasks.own, axis=1)[owners_of(partition.train_offsets)[shuffled], period]
        tests = replace(tests, since=tasks.since)
    return checked(Arrivals.of(partition, shuffled, period, len(tasks)), tests)
