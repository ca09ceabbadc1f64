"""The slots of a stack: the plan, and the rows of devices by the two ways that processors and GPUs take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedemu.device.compute.executors.arguments import Arguments
from fedemu.device.compute.executors.slots import (
    IDLE,
    Gathered,
    Leaving,
    SlotPlan,
    Written,
    entered,
    entered_by_choice,
    first_stack,
    leaving,
    plan_slots,
)

DEVICES = [pytest.param("cpu", id="processor"), pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)]


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


def brought(devices: int, where: str = "cpu") -> Arguments:
    """What devices bring: every row tells the number of its device."""
    numbers = torch.arange(devices, device=where)
    carry = [numbers[:, None, None].expand(-1, 2, 3).float().clone(), numbers.clone()]
    return Arguments([torch.ones(1)], [], [numbers + 100], [numbers, numbers.double()], [], carry=carry)


def played(plan: SlotPlan, given: Arguments, slots: int, left: Leaving, choose: bool) -> list[Tensor]:
    """Take the devices through their slots; each step adds 1000 to the carry."""
    enter = entered_by_choice if choose else entered
    stack: Arguments | None = None
    for change, end in zip(plan.changes, [change.time for change in plan.changes[1:]], strict=False):
        if stack is None:
            stack = first_stack(given, change, slots)
        else:
            left.keep(change, stack.carry)
            stack = enter(stack, given, change, slots) if len(change.entering) else stack
        busy = plan.devices[change.time] >= 0
        for leaf in (stack.own[0] - 100, *stack.facts, stack.carry[1] % 1000):
            assert leaf.cpu().numpy()[busy].tolist() == plan.devices[change.time][busy].tolist()
        stack = stack._replace(carry=[leaf + 1000 * (end - change.time) for leaf in stack.carry])
    if stack is not None:
        left.keep(plan.changes[-1], stack.carry)
    return left.by_device()


def expected_of(steps: Sequence[int]) -> list[float]:
    return [device + 1000.0 * count for device, count in enumerate(steps)]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(2, 5))
def test_every_device_ends_with_its_own_row_after_its_own_steps(steps: list[int], slots: int) -> None:
    plan = plan_slots(np.zeros(len(steps), np.int64), np.array(steps, np.int64), slots)
    for collects, choose in ((Written, False), (Gathered, True)):
        given = brought(len(steps))
        after = played(plan, given, slots, collects(given.carry), choose)
        assert [leaf.data_ptr() for leaf in after] == [leaf.data_ptr() for leaf in given.carry]
        assert after[1].tolist() == expected_of(steps)
        assert after[0].tolist() == [[[value] * 3] * 2 for value in expected_of(steps)]


@pytest.mark.parametrize("where", DEVICES)
def test_a_processor_and_a_gpu_move_the_same_rows(where: str) -> None:
    steps = [3, 0, 1, 1, 2, 1, 0, 4]
    given = brought(len(steps), where)
    plan = plan_slots(np.zeros(len(steps), np.int64), np.array(steps, np.int64), 3)
    after = played(plan, given, 3, leaving(given.carry), choose=False)
    assert isinstance(leaving(given.carry), Gathered) == (where == "cuda")
    assert after[1].tolist() == expected_of(steps)


def test_a_program_may_carry_nothing() -> None:
    assert leaving([]).by_device() == []
