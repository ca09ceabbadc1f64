"""On-line times: when a device is on-line, and how far ahead it announces that."""

from __future__ import annotations

import math

import pytest

from fedemu.coordinator.fleet.online_times import DAY, OnlineTimes, horizon, horizon_of_ask
from fedemu.protocol.errors import MalformedMessage


def test_an_on_line_interval_is_half_open() -> None:
    times = OnlineTimes(100.0, [(10.0, 20.0), (20.0, 30.0), (50.0, math.inf)])
    assert [times.spell(time) for time in (9.9, 10.0, 20.0, 29.9, 30.0, 50.0, 1e9)] == [
        (False, -math.inf, 10.0), (True, 10.0, 20.0), (True, 20.0, 30.0), (True, 20.0, 30.0),
        (False, 30.0, 50.0), (True, 50.0, math.inf), (True, 50.0, math.inf),
    ]  # fmt: skip
    assert OnlineTimes(100.0, []).spell(5.0) == (False, -math.inf, math.inf)
    assert [times.arrival(time) for time in (0.0, 15.0, 30.0, 60.0)] == [10.0, 15.0, 50.0, 60.0]
    assert OnlineTimes(100.0, [(10.0, 20.0)]).arrival(20.0) is None


def test_intervals_that_are_over_are_not_kept() -> None:
    times = OnlineTimes(100.0, [(10.0, 20.0), (30.0, 40.0), (50.0, 60.0)], since=30.0)
    assert [times.spell(time)[0] for time in (15.0, 30.0, 45.0, 50.0)] == [False, True, False, True]
    assert OnlineTimes(100.0, [(10.0, 20.0)], since=20.0).arrival(0.0) is None


@pytest.mark.parametrize("intervals", [[(5.0, 5.0)], [(5.0, 4.0)], [(5.0, 9.0), (8.0, 10.0)]])
def test_on_line_times_out_of_order_are_malformed(intervals: list[tuple[float, float]]) -> None:
    with pytest.raises(MalformedMessage):
        OnlineTimes(10.0, intervals)


def test_the_horizon_is_one_day_and_doubles_until_it_grows_by_eight_days() -> None:
    days = [0, 1, 1.1, 5, 9, 17, 24.1, 3650]
    assert [horizon(day * DAY, 0.0) / DAY for day in days] == [1, 1, 2, 8, 16, 24, 32, 3656]
    assert [horizon(0.0, day * DAY) / DAY for day in days] == [1, 1, 2, 8, 16, 24, 32, 3656]


def test_the_horizon_lies_ten_years_ahead_at_most_whatever_the_time_is() -> None:
    assert [horizon(day * DAY, 1e300) / DAY for day in (0, 8e6)] == [3656, 8e6 + 3656]
    assert horizon(1e300, 1e300) == pytest.approx(1e300)


def test_an_ask_begins_with_a_horizon_of_a_few_days_however_long_its_deadline_is() -> None:
    days = [horizon_of_ask(0.0, seconds) / DAY for seconds in (600.0, 5 * DAY, 8 * DAY, 1e9, math.inf)]
    assert days == [1, 8, 8, 8, 8]
    assert horizon_of_ask(1e9, 1e9) - 1e9 <= 16 * DAY
