"""The samples of its stream that a device can reach, at any time and in any round."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.device.memory.stream import DeviceStream

# Samples 10, 11 arrive in period 0, 12 in period 1, none in period 2, 13 and 14 in period 3; device 1 has 15 alone.
ARRIVALS = Arrivals(
    offsets=np.array([0, 5, 6]),
    indices=np.array([10, 11, 12, 13, 14, 15]),
    periods=np.array([0, 0, 1, 3, 3, 2]),
    seconds=np.array([0.0, 30.0, 0.0, 0.0, 60.0, 5.0]),
    period_count=4,
)


def stream(device: int = 0, **rules: float) -> DeviceStream:
    return DeviceStream(StreamPlan(ARRIVALS, 2, 100.0, **rules), device)  # type: ignore[arg-type]


def test_a_device_has_what_has_arrived_of_the_rounds_period() -> None:
    times = [(0.0, 1), (30.0, 2), (100.0, 3), (199.0, 4), (200.0, 5), (300.0, 7), (360.0, 8), (9e9, 100)]
    assert [stream().arrived(time, round).tolist() for time, round in times] == [
        [10], [10, 11], [12], [12], [], [13], [13, 14], [13, 14],
    ]  # fmt: skip


def test_samples_are_there_at_once_if_the_rounds_of_their_period_begin_late() -> None:
    assert stream().arrived(5000.0, 2).tolist() == [10, 11]


def test_rounds_make_periods_and_the_last_one_goes_on() -> None:
    assert [stream().period(round) for round in (1, 2, 3, 8, 9, 1000)] == [0, 0, 1, 3, 3, 3]


def test_a_period_that_is_over_is_sealed_with_all_that_arrived_in_it() -> None:
    assert [stream().sealed(period).tolist() for period in range(4)] == [[10, 11], [12], [], [13, 14]]
    assert [stream(1).sealed(period).tolist() for period in range(4)] == [[], [], [15], []]


def test_a_cumulative_stream_keeps_everything() -> None:
    assert stream(cumulative=True).arrived(300.0, 7).tolist() == [10, 11, 12, 13]


def test_the_budget_is_that_of_the_plan() -> None:
    assert (stream().budget, stream(budget=7).budget) == (0, 7)


@settings(max_examples=60)
@given(data=st.data(), cumulative=st.booleans())
def test_samples_of_earlier_periods_are_never_reached(data: st.DataObject, cumulative: bool) -> None:
    devices, periods = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    samples = data.draw(st.integers(1, 40))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    owner, period = random.integers(devices, size=samples), random.integers(periods, size=samples)
    seconds = random.choice([0.0, 1.0, 50.0, 99.0], size=samples)
    order = np.lexsort((seconds, period, owner))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=devices))])
    arrivals = Arrivals(offsets, order, period[order], seconds[order], periods)
    length = data.draw(st.sampled_from([0.0, 1.0, 100.0]))
    plan = StreamPlan(arrivals, data.draw(st.integers(1, 4)), length, cumulative, budget=3)
    plan = StreamPlan.from_arrays(plan.to_arrays())
    for device in range(devices):
        mine = DeviceStream(plan, device)
        for _ in range(24):
            round, time = data.draw(st.integers(1, 24)), data.draw(st.floats(0.0, 1000.0))
            now, here = mine.period(round), mine.arrived(time, round)
            assert here.tolist() == plan.held(device, round, time).tolist()
            assert (owner[here] == device).all()
            assert (period[here] <= now).all() if cumulative else (period[here] == now).all()
            current = here[period[here] == now]
            assert (now * length + seconds[current] <= time).all()
