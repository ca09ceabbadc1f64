"""On-line times that the coordinator computes: the same as devices would announce, whatever is asked in between."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from fedemu.coordinator.fleet import planned_times
from fedemu.coordinator.fleet.online_times import AnnouncedTimes, OnlineTimes
from fedemu.coordinator.fleet.planned_times import PlannedTimes

DEVICES = 40
SPELLS = {device: np.cumsum(np.random.default_rng(device).exponential(10.0, 200)).tolist() for device in range(DEVICES)}


def intervals(device: int) -> Iterator[tuple[float, float]]:
    if device % 10 == 9:
        return iter(())
    return zip(SPELLS[device][::2], SPELLS[device][1::2], strict=True)


def announced() -> AnnouncedTimes:
    times = AnnouncedTimes(DEVICES)
    for device in range(DEVICES):
        times.announce(device, OnlineTimes(math.inf, [*intervals(device)]))
    return times


def test_an_announcement_counts_if_it_reaches_as_far_as_the_one_before() -> None:
    times = AnnouncedTimes(3)
    reaching = [OnlineTimes(until, [(start, 9.0)]) for until, start in ((10.0, 1.0), (10.0, 2.0), (20.0, 3.0))]
    assert [times.announce(1, each) for each in reaching] == [True, True, True]
    assert not times.announce(1, reaching[0])
    assert (times.of(0), times.of(1)) == (None, reaching[2])
    times.announce(2, OnlineTimes(math.inf, []))
    assert [times.lacking(until) for until in (20.0, 20.5)] == [[0], [0, 1]]
    assert [times.used_up(time) for time in (19.5, 20.0)] == [[], [1]]
    assert times.next_arrival([0, 1, 2], [0.0, 0.0, 0.0]) == 3.0
    assert times.next_arrival([0, 2], [0.0, 0.0]) is None


@pytest.mark.parametrize("followed", [DEVICES, 7])
def test_planned_times_are_those_that_devices_would_announce(followed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_times, "MOST_FOLLOWED", followed)
    planned, known = PlannedTimes(DEVICES, intervals), announced()
    for time in (0.0, 3.5, 3.5, 40.0, *range(41, 700, 3), 1e6, 1e6 + 1):
        planned.reach(time)
        assert planned.online(time).tolist() == known.online(time).tolist()
    assert known.online(40.0).tolist() == announced().online(40.0).tolist(), "a look back"


def test_a_new_announcement_replaces_the_spell_that_was_looked_up() -> None:
    times = AnnouncedTimes(2)
    times.announce(0, OnlineTimes(10.0, [(0.0, 9.0)]))
    assert times.online(5.0).tolist() == [True, False]
    times.announce(0, OnlineTimes(20.0, [(7.0, 9.0)]))
    times.announce(1, OnlineTimes(20.0, [(5.0, 6.0)]))
    assert times.online(5.0).tolist() == [False, True]


def test_the_intervals_of_a_device_are_read_once_however_long_the_experiment_lasts() -> None:
    read = []

    def endless(device: int) -> Iterator[tuple[float, float]]:
        for start in itertools.count(0.0, 2.0):
            read.append((device, start))
            yield start, start + 1.0

    planned = PlannedTimes(3, endless)
    for time in range(1000):
        planned.reach(float(time))
        assert planned.online(float(time)).tolist() == [time % 2 == 0] * 3
    assert len(read) == len({*read}) == 3 * 501


def test_of_a_very_large_fleet_few_devices_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_times, "MOST_FOLLOWED", 4)
    begun = Counter[int]()

    def followed(device: int) -> Iterator[tuple[float, float]]:
        begun[device] += 1
        return intervals(device)

    planned = PlannedTimes(8, followed)
    for time in range(0, 300, 50):
        planned.reach(float(time))
    assert [begun[device] for device in range(4)] == [1] * 4
    assert all(begun[device] > 1 for device in range(4, 8))


def test_the_next_arrival_is_the_same_also_of_devices_that_stay_away_for_a_while() -> None:
    planned, known = PlannedTimes(DEVICES, intervals), announced()
    for time in (0.0, 25.0, 300.0):
        planned.reach(time)
        for devices in ([*range(DEVICES)], [3], [9], [9, 4, 30]):
            for wait in (0.0, 17.0, math.inf):
                since = [time if device % 3 else time + wait for device in devices]
                assert planned.next_arrival(devices, since) == known.next_arrival(devices, since)


def test_devices_that_are_always_on_line_cost_nothing_to_follow() -> None:
    planned = PlannedTimes(1_000_000, None)
    planned.reach(1e9)
    assert planned.online(1e9).all()
    assert planned.next_arrival([7], [2e9]) == 2e9
