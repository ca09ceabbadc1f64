"""Recordings: what a function has made lives no longer than the function needs it, and is told apart all the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedemu.device.compute.tapes.private_torch import (
    MemoryReference,
    OperationWatcher,
    reference_to_memory,
)
from fedemu.device.compute.tapes.recording import CONSTANT_BYTES, Recording
from fedemu.device.compute.tapes.tracing import trace

LARGE = CONSTANT_BYTES // 4 + 1
"""So many numbers of 4 bytes are too large to be kept as a constant."""


def test_a_recording_keeps_no_result_alive() -> None:
    memories: list[MemoryReference] = []

    def doubled_often(x: Tensor) -> list[Tensor]:
        for _ in range(10):
            x = x * 2
            memories.append(reference_to_memory(x))
        assert sum(not memory.expired() for memory in memories) == 1
        return [x]

    traced = trace(doubled_often, [torch.ones(LARGE)])
    assert traced(torch.full((LARGE,), 3.0))[0].unique().tolist() == [3 * 2.0**10]


def test_a_recording_of_gradients_keeps_no_large_result_alive() -> None:
    memories: list[MemoryReference] = []
    living: list[int] = []

    def note(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        recording.note(operator, args, kwargs, result)
        if result.untyped_storage().nbytes() > CONSTANT_BYTES:
            memories.append(reference_to_memory(result))

    def step(w: Tensor, x: Tensor) -> list[Tensor]:
        def loss(w: Tensor, x: Tensor) -> Tensor:
            return (w * x).sin().square().sum()

        for _ in range(5):
            w = w - 0.1 * torch.func.vmap(torch.func.grad(loss))(w, x)
            living.append(len({memory for memory in memories if not memory.expired()}))
        return [w]

    given = [torch.rand(2, LARGE), torch.rand(2, LARGE)]
    recording = Recording(given)
    with torch.no_grad(), OperationWatcher(note):
        step(*given)
    assert len(memories) > 40
    assert living == [1] * 5


def test_results_that_had_the_same_memory_one_after_the_other_are_told_apart() -> None:
    addresses: list[int] = []

    def sums(x: Tensor) -> list[Tensor]:
        found = []
        for factor in range(1, 51):
            multiple = x * factor
            addresses.append(multiple.data_ptr())
            found.append(multiple.view(2, -1).sum(1))
            del multiple
        return found

    traced = trace(sums, [torch.ones(2 * LARGE)])
    assert len(set(addresses)) < len(addresses), "no memory was used twice, so this shows nothing"
    found = traced(torch.full((2 * LARGE,), 2.0))
    assert [one.tolist() for one in found] == [[2.0 * factor * LARGE] * 2 for factor in range(1, 51)]


def test_constants_and_tensors_from_outside_are_held_and_large_constants_are_made_anew() -> None:
    table = torch.arange(3.0)
    x = torch.ones(3)
    recording = Recording([x])
    with torch.no_grad(), OperationWatcher(recording.note):
        weights = torch.ones_like(x) + 1  # depends on the shape of x alone
        many = torch.zeros(LARGE)
        total = x * weights * table + many[:3]
    held = {
        id(value.held) for operation in recording.operations for value in operation.inputs if value.held is not None
    }
    assert {id(weights), id(table)} <= held
    assert recording.value(many).held is None
    assert recording.value(total).held is None
    assert recording.value(x).held is None
