"""Which device sits in which slot of a stack at which step, so that few steps of the stack serve all devices."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IDLE = -1


@dataclass(frozen=True)
class Change:
    """Before step ``time`` of the stack the ``leaving`` devices are done, and the ``entering`` ones take slots."""

    time: int
    leaving: NDArray[np.int64]
    leaving_slots: NDArray[np.int64]
    entering: NDArray[np.int64]
    entering_slots: NDArray[np.int64]


@dataclass(frozen=True)
class SlotPlan:
    """``lines [time, slots]`` is the line that a slot runs, or ``IDLE``; ``devices`` alike. Ends at the last change."""

    lines: NDArray[np.int64]
    devices: NDArray[np.int64]
    changes: Sequence[Change]


def plan_slots(first: NDArray[np.int64], steps: NDArray[np.int64], slots: int) -> SlotPlan:
    """Longest device first, each into the slot that is free first; devices without a step take none."""
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
