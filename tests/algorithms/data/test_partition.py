"""The partition as arrays: validation parts, and views of a device."""

import numpy as np
import pytest

from fedemu.algorithms.data.partition import Partition
from fedemu.protocol.errors import ConfigurationError


def shares(*lists):
    return [np.array(values, dtype=np.int64) for values in lists]


def test_a_device_sees_its_own_samples():
    partition = Partition.of(shares([0, 3], [], [1, 2, 4]), 0.0, np.random.default_rng(0))
    assert len(partition) == 3
    assert [partition.device(i)[0].tolist() for i in range(3)] == [[0, 3], [], [1, 2, 4]]
    assert all(len(partition.device(i)[1]) == 0 for i in range(3))
    assert partition.train_offsets.tolist() == [0, 2, 2, 5]


@pytest.mark.parametrize(("samples", "fraction", "expected"), [(100, 0.29, 29), (90, 0.7, 63), (50, 0.58, 29)])
def test_a_share_that_is_whole_is_not_rounded_down_because_floats_are_inexact(samples, fraction, expected):
    assert fraction * samples < expected
    assert len(Partition.of([np.arange(samples)], fraction, np.random.default_rng(0)).validation_indices) == expected


def test_a_device_outside_the_fleet_is_refused():
    partition = Partition.of(shares([0], [1]), 0.0, np.random.default_rng(0))
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"device {index} of 2"):
            partition.device(index)


@pytest.mark.parametrize(
    ("samples", "fraction", "expected"),
    [(10, 0.1, 1), (19, 0.1, 1), (9, 0.1, 0), (1, 0.9, 0), (3, 0.99, 2), (3, 1 - 1e-12, 2), (0, 0.5, 0)],
)
def test_validation_takes_the_floor_of_its_fraction_and_leaves_one_sample(samples, fraction, expected):
    partition = Partition.of([np.arange(samples)], fraction, np.random.default_rng(0))
    train, validation = partition.device(0)
    assert len(validation) == expected
    assert sorted([*train, *validation]) == list(range(samples))
    assert train.tolist() == sorted(train)
    assert validation.tolist() == sorted(validation)


def test_the_same_generator_holds_the_same_samples_back():
    first, second = (Partition.of([np.arange(100)], 0.2, np.random.default_rng(7)) for _ in range(2))
    other = Partition.of([np.arange(100)], 0.2, np.random.default_rng(8))
    assert first.validation_indices.tolist() == second.validation_indices.tolist()
    assert first.validation_indices.tolist() != other.validation_indices.tolist()
    behind_a_small_one = Partition.of([np.arange(3), 3 + np.arange(100)], 0.2, np.random.default_rng(7))
    assert behind_a_small_one.device(1)[1].tolist() == [3 + index for index in first.validation_indices]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_validation_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ConfigurationError, match=r"validation fraction is .*; it must be at least 0 and below 1"):
        Partition.of([np.arange(3)], fraction, np.random.default_rng(0))
