"""The times of arrival within a period."""

import math

import numpy as np
import pytest

from fedemu.algorithms.data.partition import Partition
from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.algorithms.streams.periods import static
from fedemu.algorithms.streams.times import own_times, poisson
from fedemu.protocol.errors import ConfigurationError


def seeded(seed=0):
    return np.random.default_rng(seed)


def partition(*shares):
    return Partition.of([np.array(share, dtype=np.int64) for share in shares], 0.0, seeded())


def example():
    """Device 0 has samples in periods 0 and 2, device 1 none at all, device 2 in period 1."""
    return Arrivals(
        offsets=np.array([0, 5, 5, 7]),
        indices=np.array([4, 0, 7, 2, 9, 5, 1]),
        periods=np.array([0, 0, 0, 2, 2, 1, 1]),
        seconds=np.array([0.0, 1.5, 1.5, 0.0, 8.0, 0.5, 2.0]),
        period_count=3,
    )


def test_poisson_arrivals_are_sorted_uniform_times_in_the_same_order():
    arrivals = poisson(example(), 10.0, generator=seeded())
    assert arrivals.indices.tolist() == example().indices.tolist()
    draws = seeded().uniform(0.0, 10.0, size=7)
    expected = [*sorted(draws[:3]), *sorted(draws[3:5]), *sorted(draws[5:])]
    assert arrivals.seconds.tolist() == expected


def test_own_times_are_scaled_to_the_period_over_all_devices():
    times = np.array([30.0, 110.0, 5.0, 0.0, 20.0, 100.0, 0.0, 10.0, 0.0, 7.0])
    arrivals = own_times(example(), times, 8.0)
    # Period 0 lasts from 10 to 30, period 1 from 100 to 110, period 2 from 5 to 7; sample 7 now comes first.
    assert arrivals.indices.tolist() == [7, 4, 0, 2, 9, 5, 1]
    assert arrivals.seconds.tolist() == [0.0, 4.0, 8.0, 0.0, 8.0, 0.0, 8.0]


@pytest.mark.parametrize(("per_device", "expected"), [(False, [0, 1, 3, 4]), (True, [0, 4, 0, 4])])
def test_the_scale_is_that_of_the_fleet_or_of_each_device(per_device, expected):
    arrivals, _ = static(partition([0, 1], [2, 3]), 1)
    scaled = own_times(arrivals, np.array([0, 1, 3, 4]) / 32, 1 / 64, per_device=per_device)
    assert (scaled.seconds * 256).tolist() == expected


def test_samples_without_a_time_arrive_last_with_the_latest():
    arrivals, _ = static(partition([0, 1, 2], [3, 4]), 1)
    timed = own_times(arrivals, np.array([np.nan, 10.0, 20.0, np.nan, 15.0]), 8.0)
    assert timed.indices.tolist() == [1, 0, 2, 4, 3]
    assert timed.seconds.tolist() == [0.0, 8.0, 8.0, 4.0, 8.0]


@pytest.mark.parametrize("times", [np.full(2, np.nan), np.full(2, 3.0), np.full(2, 2**62)])
def test_times_that_do_not_tell_samples_apart_are_all_at_the_beginning(times):
    arrivals, _ = static(partition([0, 1]), 1)
    assert own_times(arrivals, times, 8.0).seconds.tolist() == [0.0, 0.0]


def test_nanoseconds_since_1970_keep_their_differences():
    arrivals, _ = static(partition([0, 1, 2]), 1)
    times = 1_600_000_000_000_000_000 + np.array([0, 1, 4])
    assert own_times(arrivals, times, 4.0).seconds.tolist() == [0.0, 1.0, 4.0]


@pytest.mark.parametrize(
    "times",
    [
        np.array([-100, 0, 100], np.int8),
        np.array([-(2**63), 0, 2**63 - 1], np.int64),
        np.array([0, 2**63, 2**64 - 1], np.uint64),
        np.array([-30000, 0, 30000], ">i2"),
    ],
)
def test_whole_times_keep_their_order_whatever_their_type(times):
    arrivals, _ = static(partition([0, 1, 2]), 1)
    timed = own_times(arrivals, times, 8.0)
    assert timed.indices.tolist() == [0, 1, 2]
    assert timed.seconds.tolist() == [0.0, 4.0, 8.0]


@pytest.mark.parametrize("length", [0.0, -1.0, math.inf, math.nan])
def test_a_period_without_a_length_is_refused(length):
    for spread in (
        lambda: poisson(example(), length, generator=seeded()),
        lambda: own_times(example(), np.arange(10), length),
    ):
        with pytest.raises(ConfigurationError, match=f"a period lasts {length} seconds; its length must be positive"):
            spread()


def test_times_that_are_no_numbers_are_refused():
    with pytest.raises(ConfigurationError, match="the times are of type <U1"):
        own_times(example(), np.array(["a"] * 10), 1.0)
