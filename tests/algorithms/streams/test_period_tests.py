"""What a model is tested on in each period."""

import dataclasses

import numpy as np

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.streams.period_tests import PeriodTests


def test_the_test_samples_of_a_period():
    tests = PeriodTests.of(np.array([1, 0, 2, 1]), np.array([6, 4, 0, 3]), period_count=3, held_out=True)
    assert (tests.offsets.tolist(), tests.indices.tolist()) == ([0, 1, 3, 4], [4, 6, 3, 0])


def test_held_out_samples_are_of_the_training_split_and_others_of_the_test_split():
    train, test = (Split(np.zeros((n, 1)), np.zeros(n, dtype=np.int64), {}) for n in (3, 2))
    corpus = Corpus("small", train, test, ("a",), (1,), np.zeros(1), np.ones(1), "none")
    tests = PeriodTests(np.array([0, 1]), np.array([1]), held_out=True)
    assert tests.split(corpus) is train
    assert dataclasses.replace(tests, held_out=False).split(corpus) is test
