"""When samples arrive: questions to the arrivals, and arrays that do not describe a stream."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.protocol.errors import DataError


def by_period(arrivals, device):
    return [arrivals.arrived(device, period, math.inf).tolist() for period in range(arrivals.period_count)]


def example():
    """Device 0 has samples in periods 0 and 2, device 1 none at all, device 2 in period 1."""
    return Arrivals(
        offsets=np.array([0, 5, 5, 7]),
        indices=np.array([4, 0, 7, 2, 9, 5, 1]),
        periods=np.array([0, 0, 0, 2, 2, 1, 1]),
        seconds=np.array([0.0, 1.5, 1.5, 0.0, 8.0, 0.5, 2.0]),
        period_count=3,
    )


def test_a_device_sees_what_has_arrived_in_the_period_by_then():
    arrivals = example()
    assert arrivals.arrived(0, 0, -1.0).tolist() == []
    assert arrivals.arrived(0, 0, 0.0).tolist() == [4]
    assert arrivals.arrived(0, 0, 1.49).tolist() == [4]
    assert arrivals.arrived(0, 0, 1.5).tolist() == [4, 0, 7]
    assert arrivals.arrived(0, 2, 7.0).tolist() == [2]
    assert arrivals.arrived(2, 1, math.inf).tolist() == [5, 1]
    turned = replace(arrivals, offsets=np.array([0, 2, 2, 7]), indices=np.roll(arrivals.indices, 2))
    turned = replace(turned, periods=np.roll(arrivals.periods, 2), seconds=np.roll(arrivals.seconds, 2))
    assert by_period(turned, 2) == [[4, 0, 7], [], [2, 9]]
    assert turned.arrived(2, 2, 7.0).tolist() == [2]


def test_an_empty_period_and_an_empty_device_see_nothing():
    arrivals = example()
    assert by_period(arrivals, 0)[1] == []
    assert by_period(arrivals, 1) == [[], [], []]
    assert arrivals.everything(1, 2).tolist() == []


def test_everything_includes_the_earlier_periods_and_what_has_arrived_in_this_one():
    arrivals = example()
    assert arrivals.everything(0, 0).tolist() == [4, 0, 7]
    assert arrivals.everything(0, 1, 0.0).tolist() == [4, 0, 7]
    assert arrivals.everything(0, 2, 0.0).tolist() == [4, 0, 7, 2]
    assert arrivals.everything(0, 2).tolist() == [4, 0, 7, 2, 9]


def test_a_period_is_complete_with_its_last_sample():
    assert [example().complete(0, period) for period in range(3)] == [1.5, -math.inf, 8.0]
    assert example().complete(1, 1) == -math.inf


def test_samples_are_counted_by_device_period_and_label():
    arrivals, labels = example(), np.array([0, 1, 1, 0, 0, 1, 1, 1, 0, 0])
    assert arrivals.counts().tolist() == [[3, 0, 2], [0, 0, 0], [0, 2, 0]]
    assert arrivals.label_counts(labels, 2).tolist() == [[2, 1], [0, 2], [1, 1]]
    by_device = [arrivals.label_counts(labels, 2, device=device).tolist() for device in range(3)]
    assert by_device == [[[2, 1], [0, 0], [1, 1]], [[0, 0]] * 3, [[0, 0], [0, 2], [0, 0]]]


def test_a_device_or_a_period_that_there_is_not_is_refused():
    arrivals = example()
    for question in (arrivals.arrived, arrivals.everything):
        with pytest.raises(IndexError, match="device 3 of 3"):
            question(3, 0, 0.0)
        with pytest.raises(IndexError, match="device -1 of 3"):
            question(-1, 0, 0.0)
        with pytest.raises(IndexError, match="period 3 of 3"):
            question(0, 3, 0.0)


NOTHING = Arrivals(np.zeros(3, np.int64), *np.zeros((2, 0), np.int64), np.zeros(0), 3)


@pytest.mark.parametrize(
    "arrivals",
    [
        # Devices 0 and 1 share the samples 0 and 1.
        replace(example(), offsets=np.array([0, 5, 7, 7]), indices=np.array([4, 0, 7, 1, 9, 0, 1])),
        NOTHING,
    ],
    ids=["shared samples", "no samples"],
)
def test_arrivals_survive_the_way_through_arrays(arrivals):
    again = Arrivals.from_arrays(arrivals.to_arrays())
    assert again.period_count == 3
    for name, array in arrivals.to_arrays().items():
        assert again.to_arrays()[name].tolist() == array.tolist()
        assert again.to_arrays()[name].dtype == array.dtype


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("seconds", None, "the stream lacks seconds"),
        ("seconds", np.zeros(7, dtype=np.float32), r"seconds of the stream is float32 \[7\], not a row of float64"),
        ("offsets", np.array([0, 5, 4, 7]), "offsets of the stream do not fit its 7 indices"),
        ("offsets", np.array([1, 5, 5, 7]), "offsets of the stream do not fit its 7 indices"),
        ("offsets", np.zeros(0, dtype=np.int64), "offsets of the stream do not fit its 7 indices"),
        ("indices", np.array([4, 0, 7, 2, 9, 5, -1]), "negative index -1"),
        ("indices", np.array([4, 0, 7, 2, 4, 5, 6]), "lets a sample arrive twice"),
        ("periods", np.array([0, 0, 0, 2, 2, 1]), "7 indices, 6 periods and 7 times"),
        ("periods", np.array([0, 0, 0, 2, 2, 1, 3]), "names period 3 of 3"),
        ("periods", np.array([0, 0, 2, 0, 2, 1, 1]), "not in the order of their arrival"),
        ("periods", np.array([0, 0, 0, 2, 2, 1, 0]), "not in the order of their arrival"),
        ("seconds", np.array([0.0, 1.5, 1.5, 0.0, 8.0, 2.0, 0.5]), "not in the order of their arrival"),
        ("seconds", np.array([0.0, 1.5, 1.0, 0.0, 8.0, 0.5, 2.0]), "not in the order of their arrival"),
        ("seconds", np.array([-1.0, 1.5, 1.5, 0.0, 8.0, 0.5, 2.0]), "before the beginning of their period"),
        ("seconds", np.array([0.0, 1.5, 1.5, 0.0, np.nan, 0.5, 2.0]), "times that are not finite"),
        ("period_count", np.array([0]), "has 0 periods; it needs at least 1"),
        ("period_count", np.array([3, 3]), "period_count of the stream has 2 values"),
    ],
)
def test_arrays_that_describe_no_stream_are_refused(name, value, complaint):
    arrays = {**example().to_arrays(), name: value}
    with pytest.raises(DataError, match=complaint):
        Arrivals.from_arrays({key: array for key, array in arrays.items() if array is not None})
