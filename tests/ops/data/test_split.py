"""The test split that is taken where a data set has none."""

import numpy as np
import pytest

from fedemu.ops.data.split import stratified
from fedemu.protocol.errors import DataError


def test_a_stratified_part_is_the_ceiling_shared_by_largest_remainder():
    y = np.array([0] * 10 + [1] * 6 + [2] * 5)
    chosen = stratified(y, 0.25)
    # A quarter of 21 is 5.25, so six: 2.5 + 1.5 + 1.25 of the classes; halves go to the lower label first.
    assert np.bincount(y[chosen]).tolist() == [3, 2, 1]
    assert (chosen == stratified(y, 0.25)).all()
    # As floats, 0.07 · 100 is above 7, and 0.29 · 100 is below 29.
    assert [stratified(np.zeros(100, np.int64), fraction).sum() for fraction in (0.07, 0.29)] == [7, 29]
    assert np.bincount(np.array([0] * 100 + [1] * 100)[stratified(np.repeat([0, 1], 100), 0.29)]).tolist() == [29, 29]
    # Four samples give one, without a remainder. So the third goes to the five.
    y = np.array([0] * 4 + [1] * 5)
    assert np.bincount(y[stratified(y, 0.25)]).tolist() == [1, 2]
    chosen = np.flatnonzero(stratified(np.tile([0, 1], 100), 0.05))
    assert chosen.tolist() == [4, 37, 52, 59, 110, 129, 145, 150, 172, 185], "the same samples on every machine"
    # Ten give two and a half, five give one and a quarter: the 38 that lack are of the first classes of ten.
    y = np.repeat(np.arange(100), [10, 5] * 50)
    assert np.bincount(y[stratified(y, 0.25)]).tolist() == [3, 1] * 38 + [2, 1] * 12


def test_a_class_keeps_a_sample_for_training():
    y = np.array([0, 1, 1, 1, 1])
    assert np.bincount(y[~stratified(y, 0.9)]).tolist() == [1, 1]


def test_a_test_split_that_cannot_be_taken_is_an_error():
    with pytest.raises(DataError, match="no test split can be taken from 2 samples of 2 classes"):
        stratified(np.array([0, 1]), 0.5)
