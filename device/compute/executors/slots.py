"""The slot plan of a stack: which device's steps run in which slot, so that few steps of the stack serve all."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IDLE = -1
"""The line and the device of a slot that has nothing to do."""


@dataclass(frozen=True)
class Change:
    """A change of slots before step ``time`` of the stack: ``leaving`` devices are done, ``entering`` ones begin.

    Each has its slot at the same place of ``leaving_slots`` or ``entering_slots``.
    """

    time: int
    leaving: NDArray[np.int64]
    leaving_slots: NDArray[np.int64]
    entering: NDArray[np.int64]
    entering_slots: NDArray[np.int64]


@dataclass(frozen=True)
class SlotPlan:
    """What each slot runs at each step of the stack.

    ``lines [time, slots]`` holds the line that a slot runs, and ``devices [time, slots]`` the device that it belongs
    to; both are ``IDLE`` for a slot without one. ``changes`` ascend in time. At the last change all devices are done.
    """

    lines: NDArray[np.int64]
    devices: NDArray[np.int64]
    changes: Sequence[Change]


def plan_slots(first: NDArray[np.int64], steps: NDArray[np.int64], slots: int) -> SlotPlan:
    """A plan that takes the device with the most steps first, and puts each device into the slot that is free first.

    Device ``d`` has ``steps[d]`` lines, from line ``first[d]`` on. A device without a step takes no slot.
    """
    free = [(0, slot) for slot in range(slots)]
    order = np.argsort(-steps, kind="stable")[: int(np.count_nonzero(steps))].tolist()
    placed: list[tuple[int, int, int, int]] = []
    for device in order:
        start, slot = heapq.heappop(free)
        end = start + int(steps[device])
        heapq.heappush(free, (end, slot))
        placed.append((device, slot, start, end))
    total = max((end for _, _, _, end in placed), default=0)
    lines = np.full((total, slots), IDLE, np.int64)
    devices = np.full((total, slots), IDLE, np.int64)
    entering: dict[int, list[tuple[int, int]]] = {}
    leaving: dict[int, list[tuple[int, int]]] = {}
    for device, slot, start, end in placed:
        lines[start:end, slot] = np.arange(first[device], first[device] + end - start)
        devices[start:end, slot] = device
        entering.setdefault(start, []).append((device, slot))
        leaving.setdefault(end, []).append((device, slot))
    changes = [
        Change(time, *_columns(leaving.get(time, [])), *_columns(entering.get(time, [])))
        for time in sorted({*entering, *leaving})
    ]
    return SlotPlan(lines, devices, changes)


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])
