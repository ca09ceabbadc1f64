"""A device's schedule: when its work ends, when it drops out, and when it is back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemu.device.behaviour.availability import always, exponential, recorded
from fedemu.device.behaviour.behaviour import Assignment, Behaviour, Schedule
from fedemu.device.behaviour.faults import FaultRates, plan
from fedemu.device.behaviour.profile import Fixed, Profile
from fedemu.protocol.ids import AskId
from fedemu.protocol.seeds import generator

PROFILE = Profile(seconds_per_sample=0.5, down_kbps=8000.0, up_kbps=800.0, latency=0.25)
WORK = Assignment(AskId(1, 0, 0), start=100.0, download_bytes=2_000_000, upload_bytes=300_000, samples=10.0)
"""Takes 2 · 0.25 + 2 + 5 + 3 = 10.5 seconds."""


def behaviour(*times: float, rates: FaultRates = FaultRates()) -> Behaviour:  # noqa: B008  (frozen)
    return Behaviour(1, 2, lambda: recorded(times, None), PROFILE, rates)


def test_the_parts_of_a_work_follow_from_the_profile() -> None:
    assert behaviour(0.0).seconds(WORK) == (2.0, 5.0, 3.0)
    uneven = dataclasses.replace(PROFILE, down_spread=4000.0, up_spread=100.0)
    down, up = uneven.speeds(1, 2, WORK.ask.round)
    assert Behaviour(1, 2, always, uneven, FaultRates()).seconds(WORK) == pytest.approx((16e3 / down, 5.0, 24e2 / up))


def test_a_device_that_stays_finishes_after_latency_download_compute_and_upload() -> None:
    assert behaviour(0.0).schedule(WORK) == Schedule("finish", 110.5)


def test_a_device_that_goes_off_line_drops_out_then_and_is_back_at_its_next_start() -> None:
    assert behaviour(0.0, 104.0, 150.0).schedule(WORK) == Schedule("drop", 104.0, "offline", 150.0)


def test_a_device_that_never_returns_is_back_at_infinity() -> None:
    assert behaviour(0.0, 104.0).schedule(WORK) == Schedule("drop", 104.0, "offline", math.inf)


def test_a_finish_at_the_very_end_of_an_interval_counts() -> None:
    assert behaviour(0.0, 110.5).schedule(WORK).event == "finish"
    assert behaviour(0.0, 110.4).schedule(WORK).event == "drop"


@pytest.mark.parametrize("times", [(0.0, 100.0, 150.0, 200.0), (0.0, 50.0, 150.0, 200.0), (150.0,)])
def test_a_device_that_is_off_line_at_the_start_drops_out_at_once(times: Sequence[float]) -> None:
    assert behaviour(*times).schedule(WORK) == Schedule("drop", 100.0, "offline", 150.0)


def test_a_planned_fault_strikes_at_its_fraction_of_the_work_and_ends_after_its_downtime() -> None:
    rates = FaultRates(crash=1.0, downtime=Fixed(30.0))
    fraction = plan(rates, 1, 2, WORK.ask).fraction
    at = 100.0 + fraction * 10.5
    for times in ((0.0,), (0.0, at, 200.0)):
        assert behaviour(*times, rates=rates).schedule(WORK) == Schedule("drop", at, "crash", at + 30.0)


def test_going_off_line_before_a_planned_fault_comes_first() -> None:
    rates = FaultRates(silence=1.0)
    at = 100.0 + plan(rates, 1, 2, WORK.ask).fraction * 10.5
    before = (100.0 + at) / 2
    assert behaviour(0.0, before, 300.0, rates=rates).schedule(WORK) == Schedule("drop", before, "offline", 300.0)


def test_only_a_device_that_finishes_sends_a_faulty_reply() -> None:
    rates = FaultRates(corrupt=1.0, corruptions=("nan",))
    assert behaviour(0.0, rates=rates).schedule(WORK) == Schedule("finish", 110.5, reply="corrupt", corruption="nan")
    assert behaviour(0.0, 104.0, rates=rates).schedule(WORK).reply == "normal"


def test_the_presence_until_a_time_is_every_interval_that_starts_before() -> None:
    device = behaviour(10.0, 20.0, 30.0, 40.0)
    assert device.presence(30.0) == ((10.0, 20.0),)
    assert device.presence(31.0) == ((10.0, 20.0), (30.0, 40.0))
    assert device.presence(31.0, since=20.0) == ((30.0, 40.0),)


@given(
    start=st.floats(0, 1e5),
    samples=st.floats(0, 1e4),
    round_number=st.integers(0, 1000),
    download=st.integers(0, 10**9),
)
@settings(max_examples=80)
def test_a_schedule_is_the_same_in_every_incarnation_and_never_before_the_start(
    start: float, samples: float, round_number: int, download: int
) -> None:
    profile = dataclasses.replace(PROFILE, down_spread=4000.0, up_spread=100.0)
    rates = FaultRates(crash=0.3, duplicate=0.2)

    def reborn() -> Behaviour:
        return Behaviour(1, 2, lambda: exponential(generator(1, device=2, purpose="test"), 100.0, 50.0), profile, rates)

    work = Assignment(AskId(round_number, 0, 0), start, download, 1000, samples)
    schedule = reborn().schedule(work)
    later = reborn()
    later.presence(2e5)
    assert later.schedule(work) == schedule
    assert schedule.at >= start
    if schedule.event == "drop":
        assert schedule.cause is not None
        assert schedule.back is not None
        assert schedule.back >= schedule.at
        assert schedule.reply == "normal"
    else:
        assert schedule.cause is None
        assert schedule.back is None
