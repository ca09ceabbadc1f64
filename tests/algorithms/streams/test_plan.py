"""What devices know of the stream, on its way through arrays; ``tests/device/memory/`` has what it gives a device."""

import numpy as np
import pytest

from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.protocol.errors import DataError

ARRIVALS = Arrivals(np.array([0, 2, 3]), np.array([4, 0, 7]), np.array([0, 2, 1]), np.zeros(3), period_count=3)


@pytest.mark.parametrize("rules", [(1, 0.0, False, 0, 0), (3, 2.5, True, 7, 4)])
def test_a_plan_survives_the_way_through_arrays(rules):
    again = StreamPlan.from_arrays(StreamPlan(ARRIVALS, *rules).to_arrays())
    assert (again.rounds_per_period, again.period_seconds, again.cumulative, again.budget, again.alone) == rules
    assert again.arrivals.indices.tolist() == [4, 0, 7]
    assert len(again) == 2


def test_rounds_count_from_1_and_round_0_belongs_to_the_first_period():
    assert [StreamPlan(ARRIVALS).period_of(number) for number in range(5)] == [0, 0, 1, 2, 2]
    assert [StreamPlan(ARRIVALS, 2).period_of(number) for number in range(8)] == [0, 0, 0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("rules", "complaint"),
    [
        (None, "rules are not five finite numbers"),
        (np.array([1, 0, 0, 0, 0]), "rules are not five finite numbers"),
        (np.array([1.0, 0.0, 0.0, 0.0]), "rules are not five finite numbers"),
        (np.array([1.0, np.inf, 0.0, 0.0, 0.0]), "rules are not five finite numbers"),
        (np.array([0.0, 0.0, 0.0, 0.0, 0.0]), "rules make no sense"),
        (np.array([1.0, -0.5, 0.0, 0.0, 0.0]), "rules make no sense"),
        (np.array([1.0, 0.0, 0.5, 0.0, 0.0]), "rules make no sense"),
        (np.array([1.0, 0.0, 0.0, -1.0, -1.0]), "rules make no sense"),
        (np.array([1.0, 0.0, 0.0, 2.0, 3.0]), "rules make no sense"),
    ],
)
def test_arrays_that_describe_no_plan_are_refused(rules, complaint):
    arrays = {**StreamPlan(ARRIVALS).to_arrays(), "rules": rules}
    with pytest.raises(DataError, match=complaint):
        StreamPlan.from_arrays({name: array for name, array in arrays.items() if array is not None})
