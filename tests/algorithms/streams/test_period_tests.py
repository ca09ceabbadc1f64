"""What a model is tested on in each period."""

import dataclasses

import numpy as np
import pytest

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.streams.period_tests import PeriodTests
from fedemu.protocol.errors import DataError


def plan_of(tests):
    return [part.tolist() for part in np.split(tests.indices, tests.offsets[1:-1])]


def test_the_test_samples_of_a_period():
    tests = PeriodTests.of(np.array([1, 0, 2, 1]), np.array([6, 4, 0, 3]), period_count=3, held_out=True)
    assert plan_of(tests) == [[4], [6, 3], [0]]
    assert tests.since is None


def test_held_out_samples_are_of_the_training_split_and_others_of_the_test_split():
    train, test = (Split(np.zeros((n, 1)), np.zeros(n, dtype=np.int64), {}) for n in (3, 2))
    corpus = Corpus("small", train, test, ("a",), (1,), np.zeros(1), np.ones(1), "none")
    tests = PeriodTests(np.array([0, 1]), np.array([1]), held_out=True)
    assert tests.split(corpus) is train
    assert dataclasses.replace(tests, held_out=False).split(corpus) is test


def test_a_test_set_may_count_as_seen_earlier_or_later_than_its_number_says():
    tests = PeriodTests(np.array([0, 1, 3, 4]), np.array([4, 6, 3, 0]), False, since=np.array([1, 0, 0]))
    assert PeriodTests.from_arrays(tests.to_arrays()).since.tolist() == [1, 0, 0]


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
