"""Timetables of devices: intervals, traces, and the statistics of the random kinds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemu.device.behaviour import availability
from fedemu.device.behaviour.availability import (
    KEPT_INTERVALS,
    LATEST,
    Interval,
    Timetable,
    TooFarAhead,
    always,
    diurnal,
    exponential,
    joined,
    recorded,
    weibull,
)
from fedemu.protocol.seeds import generator


def take(source: Iterator[Interval], count: int) -> list[Interval]:
    return list(itertools.islice(source, count))


SOURCES: dict[str, Callable[[int], Iterator[Interval]]] = {
    "always": lambda seed: always(),
    "exponential": lambda seed: exponential(generator(seed, purpose="test"), 50.0, 20.0),
    "weibull": lambda seed: weibull(generator(seed, purpose="test"), 0.5, 30.0, 60.0),
    "diurnal": lambda seed: diurnal(generator(seed, purpose="test"), 0.5, 0.5, 2.0, 3.0, 600.0),
    "recorded": lambda seed: recorded((0.0, 3.0, 7.0, 9.0, 12.0), 13.0, shift=float(seed % 13)),
    "recorded once": lambda seed: recorded((0.0, 3.0, 7.0, 9.0, 12.0), None),
}


@pytest.mark.parametrize("name", SOURCES)
@given(seed=st.integers(0, 2**32 - 1), times=st.lists(st.floats(0, 5e4), min_size=2, max_size=5))
@settings(max_examples=25)
def test_a_timetable_until_an_earlier_time_is_a_prefix_in_whatever_order_it_is_asked(
    name: str, seed: int, times: list[float]
) -> None:
    timetable = Timetable(partial(SOURCES[name], seed))
    told = {time: timetable.until(time) for time in times}
    for early, late in itertools.combinations(sorted(told), 2):
        assert told[late][: len(told[early])] == told[early]
    again = Timetable(partial(SOURCES[name], seed))
    assert all(again.until(time) == intervals for time, intervals in told.items())


@pytest.mark.parametrize("name", SOURCES)
@given(seed=st.integers(0, 2**32 - 1), time=st.floats(0, 5e4))
@settings(max_examples=25)
def test_intervals_ascend_do_not_touch_and_agree_with_the_answers_for_single_times(
    name: str, seed: int, time: float
) -> None:
    timetable = Timetable(partial(SOURCES[name], seed))
    intervals = timetable.until(time + 1000.0)
    assert all(type(value) is float for interval in intervals for value in interval)
    assert all(0.0 <= start < end for start, end in intervals)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(intervals))
    holding = [end for start, end in intervals if start <= time < end]
    assert timetable.end_at(time) == (holding[0] if holding else None)
    later = [start for start, _ in intervals if start > time]
    if later:
        assert timetable.next_start(time) == later[0]
    else:
        assert timetable.next_start(time) >= time + 1000.0


@pytest.mark.parametrize("name", SOURCES)
@given(seed=st.integers(0, 2**32 - 1), times=st.lists(st.floats(0, 5e3), min_size=2, max_size=8))
@settings(max_examples=25)
def test_a_timetable_that_has_forgotten_something_answers_as_a_new_one(
    name: str, seed: int, times: list[float]
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(availability, "KEPT_INTERVALS", 2)
        used = Timetable(partial(SOURCES[name], seed))
        for since, time in itertools.pairwise(times):
            new = Timetable(partial(SOURCES[name], seed))
            whole = new.until(max(times))
            assert used.until(time, since) == tuple(each for each in whole if each[1] > since and each[0] < time)
            assert used.end_at(since) == Timetable(partial(SOURCES[name], seed)).end_at(since)
            assert used.next_start(time) == Timetable(partial(SOURCES[name], seed)).next_start(time)


def test_a_timetable_reads_each_interval_once_while_time_goes_on_and_holds_few_of_them() -> None:
    read: list[Interval] = []

    def begin() -> Iterator[Interval]:
        for start in itertools.count(0.0, 2.0):
            read.append((start, start + 1.0))
            yield read[-1]

    timetable = Timetable(begin)
    for time in map(float, range(0, 20_000, 4)):
        assert timetable.until(time + 100.0, time)[0] == (time, time + 1.0)
        assert timetable.end_at(time) == time + 1.0
        assert timetable.next_start(time + 1.0) == time + 2.0
        assert len(timetable) <= KEPT_INTERVALS + 60
    assert len(read) == len({*read}) < 10_060
    late = Timetable(begin)
    assert late.end_at(1e4) == 1e4 + 1.0
    assert len(late) == 2
    assert timetable.end_at(8.0) == 9.0, "time may go back"


def test_a_question_reads_a_bounded_number_of_intervals_also_if_all_of_them_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(availability, "MOST_INTERVALS", 100)
    monkeypatch.setattr(availability, "MOST_OVER", 10_000)
    monkeypatch.setattr(availability, "KEPT_INTERVALS", 10)
    timetable = Timetable(lambda: recorded((0.0, 1.0), 2.0))
    for time in map(float, range(0, 10_000, 100)):
        assert timetable.end_at(time) == time + 1.0
    for too_far in (1e6, 1e300, math.inf):
        with pytest.raises(TooFarAhead, match="takes more than 10,000 intervals; ask for an earlier time"):
            timetable.end_at(too_far)
        with pytest.raises(TooFarAhead, match="takes more than 10,000 intervals; ask for an earlier time"):
            timetable.next_start(too_far)
        with pytest.raises(TooFarAhead, match="takes more than 100 intervals; ask for an earlier time"):
            timetable.until(too_far)
        assert len(timetable) <= 100
    assert timetable.end_at(100.0) == 101.0


def test_a_life_that_begins_late_can_do_what_one_that_was_there_before_could_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(availability, "MOST_INTERVALS", 100)

    def late() -> Timetable:
        return Timetable(lambda: recorded((0.0, 1.0), 2.0))

    assert late().end_at(9_900.0) == 9_901.0
    assert late().next_start(9_900.0) == 9_902.0
    assert late().until(9_904.0, since=9_900.0) == ((9_900.0, 9_901.0), (9_902.0, 9_903.0))
    slept = late()
    assert (slept.end_at(0.0), slept.end_at(9_900.0), slept.end_at(4.0)) == (1.0, 9_901.0, 5.0)


def test_always_is_one_interval_without_end() -> None:
    timetable = Timetable(always)
    assert timetable.until(1.0) == ((0.0, math.inf),)
    assert timetable.until(math.inf) == ((0.0, math.inf),)
    assert timetable.end_at(1e9) == math.inf
    assert timetable.next_start(0.0) == math.inf


def test_a_time_before_the_first_start_has_no_interval() -> None:
    timetable = Timetable(lambda: recorded((5.0, 6.0), None))
    assert timetable.until(5.0) == ()
    assert timetable.until(5.1) == ((5.0, 6.0),)
    assert timetable.end_at(4.9) is None
    assert timetable.next_start(4.9) == 5.0
    assert timetable.next_start(5.0) == math.inf
    assert Timetable(lambda: recorded((5.0, 6.0, 8.0, 9.0), None)).next_start(5.0) == 8.0


def test_an_interval_holds_its_start_and_not_its_end() -> None:
    timetable = Timetable(lambda: recorded((5.0, 6.0), None))
    assert timetable.end_at(5.0) == 6.0
    assert timetable.end_at(6.0) is None


def test_a_timetable_for_all_time_is_refused_if_it_would_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "MOST_INTERVALS", 2000)
    timetable = Timetable(lambda: recorded((0.0, 1.0), 2.0))
    with pytest.raises(TooFarAhead, match="more than 2,000 intervals"):
        timetable.until(math.inf)


def test_a_trace_without_a_period_is_played_once() -> None:
    assert take(recorded((1.0, 2.0, 4.0, 5.0), None), 9) == [(1.0, 2.0), (4.0, 5.0)]
    assert take(recorded((1.0, 2.0, 2.0, 5.0), None), 9) == [(1.0, 5.0)]


def test_a_device_that_is_on_line_at_the_end_stays_for_ever_or_until_the_period_ends() -> None:
    assert take(recorded((1.0, 2.0, 4.0), None), 9) == [(1.0, 2.0), (4.0, math.inf)]
    assert take(recorded((1.0, 2.0, 4.0), 5.0), 4) == [(1.0, 2.0), (4.0, 5.0), (6.0, 7.0), (9.0, 10.0)]


def test_a_trace_wraps_at_its_period_and_joins_what_touches_there() -> None:
    assert take(recorded((0.0, 1.0, 4.0, 5.0), 5.0), 3) == [(0.0, 1.0), (4.0, 6.0), (9.0, 11.0)]


@pytest.mark.parametrize("period", [86_400.0, 604_800.0, 345_678.123, 60.3])
def test_a_device_that_is_on_line_at_both_ends_of_a_trace_has_no_gap_there_whatever_rounding_does(
    period: float,
) -> None:
    for shift in [0.0, *np.random.default_rng(1).uniform(0.0, period, size=50)]:
        turns = take(recorded((0.0, period / 4, period / 2, period), period, shift=shift), 40)
        gaps = [after[0] - before[1] for before, after in pairwise(turns)]
        assert min(gaps) == pytest.approx(period / 4), f"a trace that was moved by {shift!r}"


def test_a_shift_moves_a_trace_later_and_brings_its_end_to_the_front() -> None:
    assert take(recorded((0.0, 1.0, 4.0, 6.0), 10.0, shift=4.125), 3) == [(0.0, 0.125), (4.125, 5.125), (8.125, 10.125)]
    assert take(recorded((0.0, 1.0), 10.0, shift=13.0), 2) == [(3.0, 4.0), (13.0, 14.0)]


def test_a_trace_that_fills_its_period_is_always_on_and_an_empty_one_never() -> None:
    assert take(recorded((0.0, 5.0), 5.0), 9) == [(0.0, math.inf)]
    assert take(recorded((0.0,), 5.0), 9) == [(0.0, math.inf)]
    assert take(recorded((0.0, 2.0, 2.0, 5.0), 5.0), 9) == [(0.0, math.inf)]
    assert take(recorded((), 5.0), 9) == []
    timetable = Timetable(lambda: recorded((), 5.0))
    assert timetable.until(100.0) == ()
    assert timetable.next_start(0.0) == math.inf


def test_joining_drops_empty_intervals_and_stops_after_an_endless_one() -> None:
    given_intervals = [(0.0, 1.0), (1.0, 2.0), (3.0, 3.0), (4.0, 6.0), (5.0, 5.5), (7.0, math.inf), (8.0, 9.0)]
    assert list(joined(given_intervals)) == [(0.0, 2.0), (4.0, 6.0), (7.0, math.inf)]


def online_share(sources: list[Iterator[Interval]], time: float) -> float:
    return float(np.mean([Timetable(partial(iter, source)).end_at(time) is not None for source in sources]))


@pytest.mark.parametrize("time", [0.0, 30.0, 500.0])
def test_exponential_and_weibull_fleets_are_stationary_from_the_start(time: float) -> None:
    def fleet(make: Callable[[np.random.Generator], Iterator[Interval]]) -> list[Iterator[Interval]]:
        return [make(generator(7, device=device, purpose="test")) for device in range(3000)]

    # Three standard deviations of a share of 3,000 devices are about 0.026.
    assert online_share(fleet(lambda random: exponential(random, 60.0, 30.0)), time) == pytest.approx(2 / 3, abs=0.03)
    assert online_share(fleet(lambda random: weibull(random, 0.6, 20.0, 60.0)), time) == pytest.approx(1 / 4, abs=0.03)


def test_the_weibull_spells_that_cover_the_start_are_longer_than_others() -> None:
    fleet = (weibull(generator(7, device=device, purpose="test"), 2.0, 60.0, 30.0) for device in range(3000))
    left = np.array([end for start, end in map(next, fleet) if start == 0.0])
    assert left.mean() == pytest.approx(60.0 * math.gamma(2.0) / (2 * math.gamma(1.5)), rel=0.05)


@pytest.mark.parametrize("longest", [1e20, 1e100, 1e308])
@pytest.mark.parametrize("source", [exponential, lambda random, on, off: weibull(random, 1.0, on, off)])
def test_spells_beside_which_others_are_lost_in_rounding_have_no_end(source: Any, longest: float) -> None:
    never, ever = [], [(0.0, math.inf)]
    for seed in range(4):
        assert take(source(generator(seed, purpose="test"), longest, 60.0), 2) == ever
        assert take(source(generator(seed, purpose="test"), 60.0, longest), 2) == never
        assert take(source(generator(seed, purpose="test"), longest, longest), 2) in (never, ever)


def test_repetitions_in_which_an_interval_or_a_gap_is_lost_in_rounding_have_an_end() -> None:
    assert take(recorded((0.0, 1e-4), 1e13), 2) == [(0.0, 1e-4)]
    assert take(recorded((0.0, 1e13 - 1e-2), 1e13), 99)[-1][1] == LATEST


def test_a_daily_rhythm_with_spells_of_a_million_years_ends_some_day() -> None:
    random = generator(1, purpose="test")
    assert list(diurnal(random, 5e-324, 0.0, 2.0, 2.0, 60.0)) == []
    assert list(diurnal(random, 0.5, 0.5, 2.0, 2.0, 1e100)) in ([], [(0.0, math.inf)])
    *intervals, last = (until for _, until in diurnal(random, 0.9, 0.1, 2.0, 2.0, 1e12))
    assert len(intervals) > 50
    assert max(intervals) < LATEST
    assert last == math.inf


def test_spells_have_the_mean_length_that_was_asked_for() -> None:
    intervals = take(exponential(generator(1, purpose="test"), 60.0, 30.0), 4000)
    online = np.array([end - start for start, end in intervals[1:-1]])
    offline = np.array([after[0] - before[1] for before, after in itertools.pairwise(intervals)])
    assert online.mean() == pytest.approx(60.0, rel=0.06)
    assert offline.mean() == pytest.approx(30.0, rel=0.06)
    weibull_intervals = take(weibull(generator(1, purpose="test"), 2.0, 60.0, 30.0), 4000)
    lengths = np.array([end - start for start, end in weibull_intervals[1:-1]])
    assert lengths.mean() == pytest.approx(60.0 * math.gamma(1.5), rel=0.04)


def test_a_diurnal_fleet_follows_the_hour_of_the_day() -> None:
    def share(hour: float, mean: float = 0.5, amplitude: float = 0.4, spell: float = 600.0) -> float:
        fleet = [
            diurnal(generator(3, device=device, purpose="test"), mean, amplitude, 2.0, 0.0, spell)
            for device in range(500)
        ]
        return online_share(fleet, hour * 3600.0)

    assert share(2.0) == pytest.approx(0.9, abs=0.06)
    assert share(14.0) == pytest.approx(0.1, abs=0.06)
    assert share(20.0) == pytest.approx(0.5, abs=0.06)
    assert share(26.0) == pytest.approx(0.9, abs=0.06)
    assert share(0.0) == pytest.approx(0.5 + 0.4 * math.cos(math.pi / 6), abs=0.06)
    assert share(26.0, 0.2, 0.1) == pytest.approx(0.3, abs=0.06)
    assert share(26.0, 0.8, 0.1) == pytest.approx(0.9, abs=0.06)
    assert share(9.0, spell=3600.0) == pytest.approx(0.5, abs=0.06), "an hour later than 8 o'clock"
    assert share(33.0, spell=3600.0) == pytest.approx(0.5, abs=0.06)


def test_devices_of_a_diurnal_fleet_have_their_own_offsets() -> None:
    fleet = [diurnal(generator(3, device=device, purpose="test"), 0.5, 0.5, 2.0, 100.0, 60.0) for device in range(1500)]
    assert online_share(fleet, 2 * 3600.0) == pytest.approx(0.5, abs=0.05)


def test_a_diurnal_mean_of_one_is_always_on_and_of_zero_never() -> None:
    assert take(diurnal(generator(1, purpose="test"), 1.0, 0.0, 2.0, 2.0, 60.0), 9) == [(0.0, math.inf)]
    assert take(diurnal(generator(1, purpose="test"), 0.0, 0.0, 2.0, 2.0, 60.0), 9) == []
