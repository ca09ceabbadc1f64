"""Class-incremental streams: which task brings which class, and what is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fedemu.algorithms.data.partition import Partition
from fedemu.algorithms.streams.tasks import ClassTasks, class_incremental, own_orders
from fedemu.protocol.errors import ConfigurationError


def seeded(seed=0):
    return np.random.default_rng(seed)


def partition(*shares):
    return Partition.of([np.array(share, dtype=np.int64) for share in shares], 0.0, seeded())


def by_period(arrivals, device):
    return [arrivals.arrived(device, period, math.inf).tolist() for period in range(arrivals.period_count)]


def plan_of(tests):
    return [part.tolist() for part in np.split(tests.indices, tests.offsets[1:-1])]


def test_tasks_are_runs_of_the_class_order_and_the_first_are_larger():
    tasks = ClassTasks.of(5, 2, [3, 0, 4, 2, 1])
    assert (len(tasks), tasks.offsets.tolist()) == (2, [0, 3, 5])
    assert tasks.task.tolist() == [0, 1, 1, 0, 0]
    assert tasks.position.tolist() == [1, 4, 3, 0, 2]


def test_samples_arrive_with_their_class_and_are_tested_with_it():
    labels, test_labels = np.array([0, 1, 2, 3, 0, 1, 2, 3]), np.array([3, 2, 1, 0, 3])
    tasks = ClassTasks.of(4, 2, [3, 0, 2, 1])
    arrivals, tests = class_incremental(
        labels, test_labels, partition([0, 1, 2, 3, 4], [5, 6], [7]), tasks, generator=seeded()
    )
    held = [[sorted(samples) for samples in by_period(arrivals, device)] for device in range(3)]
    assert held == [[[0, 3, 4], [1, 2]], [[], [5, 6]], [[7], []]]
    assert (plan_of(tests), tests.held_out) == ([[0, 3, 4], [1, 2]], False)


@pytest.mark.parametrize(
    ("classes", "tasks", "order", "complaint"),
    [
        (3, 4, [0, 1, 2], "stream.tasks = 4, but 3 classes make at least 1 task and at most 3"),
        (3, 0, [0, 1, 2], "stream.tasks = 0, but"),
        (
            3,
            2,
            [0, 2],
            "the class order misses: 1; stream.order must name each of the classes 0 to 2 once, or be empty",
        ),
        (3, 2, [0, 2, 2, 1], "the class order repeats: 2; stream.order"),
        (3, 2, [0, 3, 1], "the class order names a class that there is not: 3; stream.order"),
    ],
)
def test_tasks_that_cannot_be_made_are_refused(classes, tasks, order, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        ClassTasks.of(classes, tasks, order)


def test_a_task_without_samples_and_labels_of_other_classes_are_refused():
    tasks = ClassTasks.of(3, 3, [0, 1, 2])
    everything = partition(range(2))
    with pytest.raises(ConfigurationError, match="period 3 of 3 has no sample to train on at any device"):
        class_incremental(np.array([0, 1]), np.array([0, 1, 2]), everything, tasks, generator=seeded())
    with pytest.raises(ConfigurationError, match="period 2 of 3 has no sample to test on"):
        class_incremental(np.array([0, 1, 2]), np.array([0, 2]), partition(range(3)), tasks, generator=seeded())
    for labels in ([1, 3], [-1, 0]):
        with pytest.raises(ConfigurationError, match=f"made of 3 classes, but labels go from {min(labels)} to"):
            class_incremental(np.array(labels), np.array([0, 1, 2]), everything, tasks, generator=seeded())


def test_one_class_makes_one_task():
    labels = np.zeros(2, dtype=np.int64)
    arrivals, tests = class_incremental(
        labels, labels, partition([0], [1]), ClassTasks.of(1, 1, [0]), generator=seeded()
    )
    assert [by_period(arrivals, device) for device in range(2)] == [[[0]], [[1]]]
    assert plan_of(tests) == [[0, 1]]


def test_each_device_meets_the_tasks_in_its_own_order():
    labels, test_labels = np.array([0, 1, 2, 3, 0, 1, 2, 3]), np.array([3, 2, 1, 0, 3])
    tasks = replace(ClassTasks.of(4, 3, [3, 0, 2, 1]), own=np.array([[1, 0, 2], [2, 1, 0], [1, 2, 0]]))
    arrivals, tests = class_incremental(
        labels, test_labels, partition([0, 1, 2, 3, 4], [5, 6], [7]), tasks, generator=seeded()
    )
    held = [[sorted(samples) for samples in by_period(arrivals, device)] for device in range(3)]
    # Task 0 brings the classes 3 and 0, task 1 brings 2, task 2 brings 1.
    assert held == [[[2], [0, 3, 4], [1]], [[5], [6], []], [[], [], [7]]]
    assert plan_of(tests) == [[0, 3, 4], [1], [2]]
    assert tests.since.tolist() == tasks.since.tolist() == [1, 0, 0]


def test_own_orders_follow_from_the_seed_and_the_device():
    tasks = ClassTasks.of(6, 5, range(6))
    few, many, other = own_orders(tasks, 3, 7), own_orders(tasks, 40, 7), own_orders(tasks, 40, 8)
    assert many.own[:3].tolist() == few.own.tolist()
    assert many.own.tolist() != other.own.tolist()
    assert np.sort(many.own, axis=1).tolist() == [[0, 1, 2, 3, 4]] * 40
    assert len(np.unique(many.own, axis=0)) > 20
    assert many.since.tolist() == [0] * 5
    assert tasks.since.tolist() == [0, 1, 2, 3, 4]
