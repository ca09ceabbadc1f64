"""Streams that are divided by an order or by a drift, on cases worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemu.algorithms.data.partition import Partition
from fedemu.algorithms.data.partitioners import iid
from fedemu.algorithms.streams.periods import consecutive, dirichlet_drift, static, window_drift
from fedemu.protocol.errors import ConfigurationError


def seeded(seed=0):
    return np.random.default_rng(seed)


def partition(*shares):
    return Partition.of([np.array(share, dtype=np.int64) for share in shares], 0.0, seeded())


def by_period(arrivals, device):
    return [arrivals.arrived(device, period, math.inf).tolist() for period in range(arrivals.period_count)]


def plan_of(tests):
    return [part.tolist() for part in np.split(tests.indices, tests.offsets[1:-1])]


def test_a_static_stream_is_one_period_with_everything_at_its_beginning():
    arrivals, tests = static(partition([0, 3], [], [1, 2, 4]), 2)
    assert [arrivals.arrived(device, 0, 0.0).tolist() for device in range(3)] == [[0, 3], [], [1, 2, 4]]
    assert (plan_of(tests), tests.held_out) == ([[0, 1]], False)


# Consecutive periods


def test_each_device_divides_its_own_samples_in_the_order_of_the_column():
    column = np.array([9, 8, 7, 6, 5, 4, 3, 2, 1, 0] * 2)
    arrivals, tests = consecutive(column, partition(range(10), range(10, 20)), 2)
    assert by_period(arrivals, 0) == [[9, 8, 7, 6], [4, 3, 2, 1]]
    assert by_period(arrivals, 1) == [[19, 18, 17, 16], [14, 13, 12, 11]]
    assert (plan_of(tests), tests.held_out) == ([[5, 15], [0, 10]], True)


def test_common_cut_points_divide_all_samples_as_one():
    column = np.arange(10)[::-1]
    arrivals, tests = consecutive(column, partition([0, 1, 2], [3, 4, 5, 6, 7, 8, 9]), 2, cut="fleet")
    # From the last sample to the first: 9 8 7 6 to train and 5 to test on, then 4 3 2 1 to train and 0 to test on.
    assert by_period(arrivals, 0) == [[], [2, 1]]
    assert by_period(arrivals, 1) == [[9, 8, 7, 6], [4, 3]]
    assert plan_of(tests) == [[5], [0]]


@pytest.mark.parametrize("cut", ["device", "fleet"])
def test_equal_values_keep_their_order_and_missing_ones_come_last(cut):
    column = np.array([np.nan, 2.0, 1.0, np.nan, 2.0, 1.0, 2.0, 0.0])
    arrivals, tests = consecutive(column, partition(range(8)), 1, cut=cut, test_fraction=0.125)
    assert by_period(arrivals, 0) == [[7, 2, 5, 1, 4, 6, 0]]
    assert plan_of(tests) == [[3]]


def test_the_larger_periods_go_round_from_device_to_device():
    shares = [[0], [1], [2], [3, 4], [5, 6, 7, 8], [], [9]]
    arrivals, tests = consecutive(np.arange(10), partition(*shares), 3, test_fraction=0.5)
    # Devices 0 to 2 have their only sample in periods 0 to 2, device 3 has two in 0 and 1, and device 4, of whose four
    # the larger number is in period 1, has 5 in 0, 6 and 7 in 1, 8 in 2. Every second sample of a period is held out.
    assert by_period(arrivals, 4) == [[5], [6], []]
    assert arrivals.counts().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert plan_of(tests) == [[3, 9], [4, 7], [8]]


def test_the_samples_that_devices_hold_out_of_a_period_add_up_to_the_fraction():
    shares = np.arange(40).reshape(10, 4)
    arrivals, tests = consecutive(np.arange(40), partition(*shares), 2)
    # Two samples of each device and period: after 3, 5, 8 and 10 devices there are 1, 2, 3 and 4 fifths to hold out.
    assert arrivals.counts()[:, 0].tolist() == [2, 2, 1, 2, 1, 2, 2, 1, 2, 1]
    assert plan_of(tests) == [[9, 17, 29, 37], [11, 19, 31, 39]]


def test_a_whole_number_of_samples_to_hold_out_is_not_rounded_down():
    arrivals, tests = consecutive(np.arange(100), partition(np.arange(100)), 1, test_fraction=0.29)
    assert (len(arrivals.indices), plan_of(tests)) == (71, [[*range(71, 100)]])  # as floats, 0.29 · 100 is below 29


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"periods": 0}, "0 periods are asked for; there must be at least 1"),
        ({"periods": 11}, "11 periods need at least one training sample each, but the devices hold 10"),
        ({"periods": 3}, "period 1 of 3 has no sample to test on; ask for fewer periods, or use more data"),
        ({"periods": 2, "test_fraction": 0.0}, "the test fraction is 0.0; it must be above 0 and below 1"),
        ({"periods": 2, "test_fraction": 1.0}, "the test fraction is 1.0; it must be above 0 and below 1"),
        ({"periods": 2, "test_fraction": math.nan}, "the test fraction is nan"),
        ({"periods": 2, "column": np.array(["a"] * 10)}, "the order column is of type <U1, but an order"),
    ],
)
def test_periods_that_the_samples_do_not_suffice_for_are_refused(arguments, complaint):
    arguments = {"column": np.arange(10), "partition": partition(range(5), range(5, 10)), **arguments}
    with pytest.raises(ConfigurationError, match=complaint):
        consecutive(**arguments)


@settings(max_examples=20)
@given(values=st.lists(st.sampled_from([0.0, 1.0, 2.0, math.nan]), min_size=6, max_size=30), devices=st.integers(1, 3))
def test_a_sample_that_arrives_later_is_never_earlier_in_the_order(values, devices):
    column = np.array(values)
    shares = Partition.of(iid(len(column), devices, generator=seeded()), 0.0, seeded())
    arrivals, tests = consecutive(column, shares, 2, test_fraction=0.5)
    rank = np.lexsort((np.arange(len(column)), column)).argsort()
    for device in range(devices):
        assert np.all(np.diff(rank[arrivals.everything(device, 1)]) > 0)
        for period in range(2):
            own = np.intersect1d(np.split(tests.indices, tests.offsets[1:-1])[period], shares.device(device)[0])
            arrived = arrivals.arrived(device, period, 0.0)
            assert not len(own) or not len(arrived) or rank[own].min() > rank[arrived].max()


# Drift


def drifts(name, column, test_column, shares, periods, seed=0, cut="device", **options):
    if name == "dirichlet":
        options = {"alpha": 0.3, **options}
        return dirichlet_drift(column, test_column, shares, periods, generator=seeded(seed), cut=cut, **options)
    options = {"width": 1.5, **options}
    return window_drift(column, test_column, shares, periods, generator=seeded(seed), cut=cut, **options)


def test_a_window_of_one_value_brings_one_after_another():
    column, test_column = (
        np.array(["home", "work", "car"] * 4),
        np.array(["car", "car", "work", "home", "home", "work"]),
    )
    arrivals, tests = drifts("window", column, test_column, partition(range(6), range(6, 12)), 3, width=1.0)
    seen = [[set(column[samples]) for samples in by_period(arrivals, device)] for device in range(2)]
    assert seen[0] == seen[1] == [set(test_column[samples]) for samples in plan_of(tests)]
    assert sorted(len(values) for values in seen[0]) == [1, 1, 1]
    assert set.union(*seen[0]) == {"home", "work", "car"}
    assert not tests.held_out


def test_a_wider_window_lets_neighbours_overlap_and_a_very_wide_one_mixes_all():
    column = np.repeat(np.arange(10), 100)
    shares = partition(range(1000))
    for width, values in ((1.0, 1), (2.0, 3), (1000.0, 10)):
        arrivals, _ = drifts("window", column, column, shares, 10, width=width)
        seen = (arrivals.label_counts(column, 10)[1:-1] > 0).sum(axis=1)
        assert set(seen) == {values}


class Scripted:
    """A generator with given weights and uniform draws, the same waiting time for all samples, and no shuffling."""

    def __init__(self, weights=(), uniform=()):
        self.weights = np.array(weights)
        self.uniform = np.array(uniform)

    def random(self, size):
        assert size == len(self.uniform)
        return self.uniform

    def dirichlet(self, alpha, size):
        assert (size, len(alpha)) == self.weights.shape
        return self.weights

    def exponential(self, size):
        return np.ones(size)

    def permutation(self, values):
        return np.arange(values)


def test_each_period_takes_the_remaining_samples_with_its_largest_weights():
    column = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    generator = Scripted([[0.1, 0.0, 0.9], [0.0, 1.0, 0.0], [0.4, 0.3, 0.3]])
    arrivals, tests = dirichlet_drift(column, column[1:8], partition(range(9)), 3, alpha=1.0, generator=generator)
    assert by_period(arrivals, 0) == [[6, 7, 8], [3, 4, 5], [0, 1, 2]]
    # The test split holds 0 0 1 1 1 2 2: the first period, which is the largest, takes 2 2 and one 0.
    assert plan_of(tests) == [[0, 5, 6], [2, 3], [1, 4]]


def test_the_place_of_a_sample_is_that_of_its_value_plus_its_share_of_the_width():
    column, test_column = np.array([0, 0, 1, 1]), np.array([1, 0])
    generator = Scripted(uniform=[0.1, 0.9, 0.2, 0.7, 0.0, 0.4])
    arrivals, tests = window_drift(column, test_column, partition(range(4)), 2, width=2.0, generator=generator)
    # Places of the training samples: 0.2, 1.8, 1.4 and 2.4; of the test samples: 1.0 and 0.8.
    assert by_period(arrivals, 0) == [[0, 2], [1, 3]]
    assert plan_of(tests) == [[1], [0]]


def test_a_small_alpha_makes_periods_of_few_labels_and_a_large_one_of_all():
    column = np.tile(np.arange(10), 100)
    largest = []
    for alpha in (0.001, 1000.0):
        arrivals, _ = drifts("dirichlet", column, column, partition(range(1000)), 5, alpha=alpha)
        largest.append(arrivals.label_counts(column, 10).max(axis=1).max())
    assert largest[0] == 100
    assert largest[1] < 50


@pytest.mark.parametrize("name", ["dirichlet", "window"])
def test_drift_over_the_fleet_divides_all_samples_evenly(name):
    column = np.array([0] * 7 + [1] * 4)
    arrivals, _ = drifts(name, column, column, partition(range(7), range(7, 11)), 4, cut="fleet")
    assert arrivals.counts().sum(axis=0).tolist() == [3, 3, 3, 2]
    arrivals, _ = drifts(name, column, column, partition(range(7), range(7, 11)), 11, cut="fleet")
    assert arrivals.counts().sum(axis=0).tolist() == [1] * 11


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("dirichlet", {"alpha": 0.0}, "concentration alpha is 0.0; it must be positive and finite"),
        ("dirichlet", {"alpha": math.inf}, "concentration alpha is inf"),
        ("window", {"width": 0.5}, "width is 0.5 values; it must be at least 1 and finite"),
        ("window", {"width": math.inf}, "width is inf"),
        ("window", {"width": math.nan}, "width is nan"),
    ],
)
def test_a_drift_out_of_range_is_refused(name, options, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        drifts(name, np.arange(4), np.arange(4), partition(range(4)), 2, **options)


def test_a_test_split_that_does_not_reach_for_all_periods_is_refused():
    with pytest.raises(ConfigurationError, match="period 2 of 3 has no sample to test on"):
        drifts("window", np.arange(9), np.arange(1), partition(range(9)), 3)


@pytest.mark.parametrize("name", ["dirichlet", "window"])
@settings(max_examples=12)
@given(samples=st.integers(1, 12), devices=st.integers(1, 5), periods=st.integers(1, 5), seed=st.integers(0, 1000))
def test_the_periods_of_a_device_differ_by_one_sample_at_most(name, samples, devices, periods, seed):
    labels = seeded(seed).integers(0, 4, (samples + periods) * devices + samples % devices)
    shares = Partition.of(iid(len(labels), devices, generator=seeded(seed)), 0.0, seeded())
    arrivals, _ = drifts(name, labels, labels, shares, periods, seed)
    counts = arrivals.counts()
    assert (counts.max(axis=1) - counts.min(axis=1)).max() <= 1
