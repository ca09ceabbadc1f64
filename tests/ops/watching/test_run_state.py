"""What a run tells about its state at each scrape."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from fedemu.ops.watching.run_state import STATES, RunState


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _scrape(state: RunState) -> str:
    (family,) = state.collect()
    (current,) = [sample.labels["state"] for sample in family.samples if sample.value]
    return str(current)


def test_a_long_run_is_starting_then_running_then_ending_then_over() -> None:
    clock = Clock()
    state = RunState(20, clock)
    told = [_scrape(state)]
    clock.now = 10.0
    told.append(_scrape(state))
    state.began()
    for round in range(1, 21):
        clock.now += 10.0
        state.finished(round)
        told.append(_scrape(state))
    state.ended("completed")
    told.append(_scrape(state))
    assert [(name, len(list(group))) for name, group in itertools.groupby(told)] == [
        ("starting", 3),
        ("running", 17),
        ("ending", 2),
        ("completed", 1),
    ]


def test_a_first_round_that_takes_long_is_a_run_that_goes_on() -> None:
    clock = Clock()
    state = RunState(3, clock)
    state.began()
    assert _scrape(state) == "starting"
    clock.now = 15.0
    assert _scrape(state) == "starting"
    clock.now = 30.0
    assert _scrape(state) == "running"


@pytest.mark.parametrize(("rounds", "finished"), [(1, 0), (7, 6)])
def test_the_only_round_that_is_played_may_be_over_at_any_time(rounds: int, finished: int) -> None:
    clock = Clock()
    state = RunState(rounds, clock)
    if finished:
        state.resumed(finished)
    state.began()
    told = []
    for clock.now in (0.0, 15.0, 30.0, 45.0):
        told.append(_scrape(state))
    assert told == ["starting", "starting", "ending", "ending"]


def test_a_round_that_takes_longer_than_all_the_rest_does_not_end_the_run() -> None:
    clock = Clock()
    state = RunState(50, clock)
    state.began()
    for round in range(1, 11):
        clock.now += 1.0
        state.finished(round)
    told = []
    for _ in range(100):
        clock.now += 5.0
        told.append(_scrape(state))
    assert told == ["starting", *["running"] * 99]


@pytest.mark.parametrize("gap", [1.0, 2.0, 15.0, 60.0])
def test_a_run_that_ends_between_two_scrapes_was_not_running_at_the_last(gap: float) -> None:
    """Also where rounds differ in length and the first one is slow."""
    draw = random.Random(7)
    for _ in range(50):
        clock, rounds = Clock(), draw.randint(1, 60)
        state = RunState(rounds, clock)
        offset, mean = draw.uniform(0.0, gap), draw.uniform(0.05, 5.0)
        ends = [3.0 + mean]
        for _ in range(rounds - 1):
            ends.append(ends[-1] + mean * draw.uniform(0.6, 1.4))
        scrapes = (
            [(offset + gap * n, 0) for n in range(int((ends[-1] - offset) // gap) + 1)] if ends[-1] > offset else []
        )
        last = "none"
        for at, round in sorted([*scrapes, (2.0, -1), *((end, n + 1) for n, end in enumerate(ends))]):
            clock.now = at
            if round == 0:
                last = _scrape(state)
            elif round < 0:
                state.began()
            else:
                state.finished(round)
        assert last != "running"


def test_every_state_has_a_sample_and_registering_is_no_scrape() -> None:
    registry = CollectorRegistry()
    state = RunState(5, Clock())
    registry.register(state)
    assert len(state._scrapes) == 0
    values = [registry.get_sample_value("fedemu_run_state", {"state": name}) for name in STATES]
    assert values == [1.0, *[0.0] * (len(STATES) - 1)]


def test_two_monitors_may_scrape_at_the_same_time() -> None:
    meanwhile: list[Callable[[], object]] = []

    class Moment(float):
        """A time that takes so long to subtract from that something else happens meanwhile."""

        def __sub__(self, other: float) -> float:
            while meanwhile:
                meanwhile.pop()()
            return float(self) - other

    moments = itertools.count(0.0, 10.0)
    state = RunState(20, lambda: Moment(next(moments)))
    for _ in range(3):
        _scrape(state)
        state.finished(1)
    meanwhile += [state.collect, lambda: state.finished(2)]
    assert _scrape(state) == "running"
