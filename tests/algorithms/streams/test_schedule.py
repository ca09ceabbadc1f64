import dataclasses
import math

import numpy as np
import pytest

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.streams.schedule import PeriodTests, Schedule
from fedemu.protocol.errors import DataError


def by_period(schedule, device):
    return [schedule.arrived(device, period, math.inf).tolist() for period in range(schedule.period_count)]


def plan_of(tests):
    return [tests.of_period(period).tolist() for period in range(len(tests))]


def example():
    """Device 0 has samples in periods 0 and 2, device 1 none at all, device 2 in period 1."""
    return Schedule(
        offsets=np.array([0, 5, 5, 7]),
        indices=np.array([4, 0, 7, 2, 9, 5, 1]),
        periods=np.array([0, 0, 0, 2, 2, 1, 1]),
        seconds=np.array([0.0, 1.5, 1.5, 0.0, 8.0, 0.5, 2.0]),
        period_count=3,
    )


def test_a_device_sees_what_has_arrived_in_the_period_by_then():
    schedule = example()
    assert schedule.arrived(0, 0, -1.0).tolist() == []
    assert schedule.arrived(0, 0, 0.0).tolist() == [4]
    assert schedule.arrived(0, 0, 1.49).tolist() == [4]
    assert schedule.arrived(0, 0, 1.5).tolist() == [4, 0, 7]
    assert schedule.arrived(0, 2, 7.0).tolist() == [2]
    assert schedule.arrived(2, 1, math.inf).tolist() == [5, 1]


def test_an_empty_period_and_an_empty_device_see_nothing():
    schedule = example()
    assert by_period(schedule, 0)[1] == []
    assert by_period(schedule, 1) == [[], [], []]
    assert schedule.everything(1, 2).tolist() == []


def test_everything_is_the_earlier_periods_and_what_has_arrived_of_this_one():
    schedule = example()
    assert schedule.everything(0, 0).tolist() == [4, 0, 7]
    assert schedule.everything(0, 1, 0.0).tolist() == [4, 0, 7]
    assert schedule.everything(0, 2, 0.0).tolist() == [4, 0, 7, 2]
    assert schedule.everything(0, 2).tolist() == [4, 0, 7, 2, 9]


def test_samples_are_counted_by_device_period_and_label():
    schedule, labels = example(), np.array([0, 1, 1, 0, 0, 1, 1, 1, 0, 0])
    assert schedule.counts().tolist() == [[3, 0, 2], [0, 0, 0], [0, 2, 0]]
    assert schedule.label_counts(labels, 2).tolist() == [[2, 1], [0, 2], [1, 1]]
    assert schedule.label_counts(labels, 2, device=0).tolist() == [[2, 1], [0, 0], [1, 1]]


def test_a_device_or_a_period_that_there_is_not_is_refused():
    schedule = example()
    for question in (schedule.arrived, schedule.everything):
        with pytest.raises(IndexError, match="device 3 of 3"):
            question(3, 0, 0.0)
        with pytest.raises(IndexError, match="device -1 of 3"):
            question(-1, 0, 0.0)
        with pytest.raises(IndexError, match="period 3 of 3"):
            question(0, 3, 0.0)


def test_a_schedule_survives_the_way_through_arrays():
    again = Schedule.from_arrays(example().to_arrays())
    assert again.period_count == 3
    for name, array in example().to_arrays().items():
        assert again.to_arrays()[name].tolist() == array.tolist()
        assert again.to_arrays()[name].dtype == array.dtype


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("seconds", None, "the schedule lacks seconds"),
        ("seconds", np.zeros(7, dtype=np.float32), r"seconds of the schedule is float32 \[7\], not a row of float64"),
        ("offsets", np.array([0, 5, 4, 7]), "offsets of the schedule do not fit its 7 indices"),
        ("indices", np.array([4, 0, 7, 2, 9, 5, -1]), "negative index -1"),
        ("indices", np.array([4, 0, 7, 2, 9, 5, 4]), "lets a sample arrive twice"),
        ("periods", np.array([0, 0, 0, 2, 2, 1]), "7 indices, 6 periods and 7 times"),
        ("periods", np.array([0, 0, 0, 2, 2, 1, 3]), "names period 3 of 3"),
        ("periods", np.array([0, 0, 2, 0, 2, 1, 1]), "not in the order of their arrival"),
        ("seconds", np.array([0.0, 1.5, 1.0, 0.0, 8.0, 0.5, 2.0]), "not in the order of their arrival"),
        ("seconds", np.array([-1.0, 1.5, 1.5, 0.0, 8.0, 0.5, 2.0]), "before the beginning"),
        ("seconds", np.array([0.0, 1.5, 1.5, 0.0, np.nan, 0.5, 2.0]), "before the beginning of their period, or none"),
        ("period_count", np.array([0]), "has 0 periods; it needs at least 1"),
        ("period_count", np.array([3, 3]), "period_count of the schedule has 2 values"),
    ],
)
def test_arrays_that_are_no_schedule_are_refused(name, value, complaint):
    arrays = {**example().to_arrays(), name: value}
    with pytest.raises(DataError, match=complaint):
        Schedule.from_arrays({key: array for key, array in arrays.items() if array is not None})


# What periods are tested on


def test_the_test_samples_of_a_period_and_of_all_so_far():
    tests = PeriodTests.of(np.array([1, 0, 2, 1]), np.array([6, 4, 0, 3]), period_count=3, held_out=True)
    assert plan_of(tests) == [[4], [6, 3], [0]]
    assert [tests.up_to(period).tolist() for period in range(3)] == [[4], [4, 6, 3], [4, 6, 3, 0]]
    for question in (tests.of_period, tests.up_to):
        with pytest.raises(IndexError, match="period 3 of 3"):
            question(3)


def test_held_out_samples_are_of_the_training_split_and_others_of_the_test_split():
    train, test = (Split(np.zeros((n, 1)), np.zeros(n, dtype=np.int64), {}) for n in (3, 2))
    corpus = Corpus("small", train, test, ("a",), (1,), np.zeros(1), np.ones(1), "none")
    tests = PeriodTests(np.array([0, 1]), np.array([1]), held_out=True)
    assert tests.split(corpus) is train
    assert dataclasses.replace(tests, held_out=False).split(corpus) is test


@pytest.mark.parametrize("held_out", [True, False])
def test_a_test_plan_survives_the_way_through_arrays(held_out):
    tests = PeriodTests(np.array([0, 1, 1, 3]), np.array([6, 4, 0]), held_out)
    again = PeriodTests.from_arrays(tests.to_arrays())
    assert (plan_of(again), again.held_out) == ([[6], [], [4, 0]], held_out)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("held_out", None, "the test plan lacks held_out"),
        ("held_out", np.array([], dtype=np.int64), "held_out of the test plan has 0 values"),
        ("indices", np.zeros((1, 3), dtype=np.int64), r"int64 \[1, 3\], not a row of int64"),
        ("offsets", np.array([0, 1, 2]), "offsets of the test plan do not fit its 3 indices"),
    ],
)
def test_arrays_that_are_no_test_plan_are_refused(name, value, complaint):
    arrays = {**PeriodTests(np.array([0, 1, 3]), np.array([6, 4, 0]), True).to_arrays(), name: value}
    with pytest.raises(DataError, match=complaint):
        PeriodTests.from_arrays({key: array for key, array in arrays.items() if array is not None})
