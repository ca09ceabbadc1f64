"""On-line times that the coordinator computes: the same as devices would announce, whatever is asked in between."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

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


def test_planned_times_are_those_that_devices_would_announce() -> None:
    planned, known = PlannedTimes(DEVICES, intervals), announced()
    for time in (0.0, 3.5, 3.5, 40.0, 41.0, 700.0, 1e6):
        planned.reach(time)
        assert planned.online(time).tolist() == known.online(time).tolist()


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
