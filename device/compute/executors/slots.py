"""The slots of a stack: which device's steps run in which slot, and how a device's rows come into it and leave it.

The plan needs few steps of the stack to serve all devices. Rows are those of stacked tensors. A processor writes rows
to the places that an index names. A GPU sorts these places first, in case two of them are equal, and that takes longer
than most steps. So there rows are only gathered, which gives the same values.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.device.compute.executors.arguments import Arguments

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


def first_stack(given: Arguments, change: Change, slots: int) -> Arguments:
    """The stack of the devices that enter ``slots`` slots. A slot without one has the rows of some device.

    ``given`` holds what every device brings, as leaves ``[devices, ...]``.
    """
    index = _index(_occupants(change, slots), given)
    return given.per_device(lambda leaf: leaf.index_select(0, index))


def entered(stack: Arguments, given: Arguments, change: Change, slots: int) -> Arguments:
    """The stack after the entering devices have taken their slots. ``stack`` stays as it is."""
    if not len(change.entering):
        return stack
    if len(change.entering) == slots:
        return first_stack(given, change, slots)
    if _device(given).type == "cpu":
        devices, places = _index(change.entering, given), _index(change.entering_slots, given)
        return stack.per_device(lambda held, leaf: held.index_copy(0, places, leaf.index_select(0, devices)), given)
    return entered_by_choice(stack, given, change, slots)


def entered_by_choice(stack: Arguments, given: Arguments, change: Change, slots: int) -> Arguments:
    """As ``entered``, without writing rows to places."""
    taken = np.zeros(slots, np.bool_)
    taken[change.entering_slots] = True
    enters, index = torch.from_numpy(taken).to(_device(given)), _index(_occupants(change, slots), given)

    def chosen(held: Tensor, leaf: Tensor) -> Tensor:
        return torch.where(enters.view(-1, *[1] * (leaf.dim() - 1)), leaf.index_select(0, index), held)

    return stack.per_device(chosen, given)


class Leaving(Protocol):
    """Collects the carry of the devices that a stage is done with."""

    def keep(self, change: Change, carry: Sequence[Tensor]) -> None:
        """Keep the rows of the leaving devices, from a carry ``[slots, ...]`` that will be written over."""
        ...

    def by_device(self) -> list[Tensor]:
        """The leaves ``[devices, ...]`` after the stage. Devices that had no step have what they had before."""
        ...


def leaving(carry: Sequence[Tensor]) -> Leaving:
    """What collects where the leaves ``[devices, ...]`` of ``carry`` lie. It may write over them."""
    return Gathered(carry) if carry and carry[0].device.type != "cpu" else Written(carry)


class Written:
    """Writes the rows of leaving devices to their places."""

    def __init__(self, carry: Sequence[Tensor]) -> None:
        self._carry = list(carry)

    def keep(self, change: Change, carry: Sequence[Tensor]) -> None:
        if len(change.leaving):
            devices, slots = torch.from_numpy(change.leaving), torch.from_numpy(change.leaving_slots)
            for kept, leaf in zip(self._carry, carry, strict=True):
                kept.index_copy_(0, devices, leaf.index_select(0, slots))

    def by_device(self) -> list[Tensor]:
        return self._carry


class Gathered:
    """Gathers the rows in the order in which devices leave, and writes them back sorted in the end."""

    def __init__(self, carry: Sequence[Tensor]) -> None:
        self._carry = carry
        self._rows = [torch.empty_like(leaf, memory_format=torch.contiguous_format) for leaf in carry]
        self._devices: list[int] = []

    def keep(self, change: Change, carry: Sequence[Tensor]) -> None:
        if len(change.leaving):
            self._gather(change.leaving, change.leaving_slots, carry)

    def by_device(self) -> list[Tensor]:
        absent = np.setdiff1d(np.arange(len(self._rows[0])), self._devices)
        if len(absent):
            self._gather(absent, absent, self._carry)
        places = torch.from_numpy(np.argsort(self._devices)).to(self._rows[0].device)
        # Into the memory that is there: a GPU holds the rows of all devices twice as it is.
        return [
            torch.index_select(leaf, 0, places, out=kept) for kept, leaf in zip(self._carry, self._rows, strict=True)
        ]

    def _gather(self, devices: NDArray[np.int64], places: NDArray[np.int64], carry: Sequence[Tensor]) -> None:
        index = torch.from_numpy(places).to(self._rows[0].device)
        for kept, leaf in zip(self._rows, carry, strict=True):
            torch.index_select(leaf, 0, index, out=kept.narrow(0, len(self._devices), len(devices)))
        self._devices += devices.tolist()


def _occupants(change: Change, slots: int) -> NDArray[np.int64]:
    occupants = np.zeros(slots, np.int64)
    occupants[change.entering_slots] = change.entering
    return occupants


def _index(values: NDArray[np.int64], given: Arguments) -> Tensor:
    return torch.from_numpy(values).to(_device(given))


def _device(given: Arguments) -> torch.device:
    return given.facts[0].device
