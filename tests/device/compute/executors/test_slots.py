"""Slot plans: which device's steps run in which slot of a stack."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedemu.device.compute.executors.slots import IDLE, plan_slots


def test_the_longest_device_goes_first_and_free_slots_are_filled_again() -> None:
    plan = plan_slots(first=np.array([0, 1, 4]), steps=np.array([1, 3, 2]), slots=2)
    assert plan.devices.tolist() == [[1, 2], [1, 2], [1, 0]]
    assert plan.lines.tolist() == [[1, 4], [2, 5], [3, 0]]
    assert [(change.time, change.leaving.tolist(), change.entering.tolist()) for change in plan.changes] == [
        (0, [], [1, 2]),
        (2, [2], [0]),
        (3, [1, 0], []),
    ]


def test_devices_without_steps_take_no_slot() -> None:
    plan = plan_slots(first=np.array([0, 0]), steps=np.array([0, 0]), slots=4)
    assert plan.lines.shape == (0, 4)
    assert plan.changes == []


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(2, 5))
def test_every_line_runs_once_in_order_in_one_slot_of_its_device(steps: list[int], slots: int) -> None:
    counts = np.array(steps, np.int64)
    first = np.cumsum(counts) - counts
    plan = plan_slots(first, counts, slots)
    busy = plan.lines[plan.lines != IDLE]
    assert sorted(busy.tolist()) == list(range(int(counts.sum())))
    for device, count in enumerate(steps):
        times, taken = np.nonzero(plan.devices == device)
        assert len(set(taken.tolist())) == min(1, count)
        assert plan.lines[times, taken].tolist() == list(range(first[device], first[device] + count))
        assert times.tolist() == list(range(times[0], times[0] + count)) if count else not len(times)
    assert len(plan.lines) <= max(steps, default=0) + -(-sum(steps) // slots)
