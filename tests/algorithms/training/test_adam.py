"""Adam against torch's own."""

from __future__ import annotations

import pytest
import torch

from fedemu.algorithms.training.adam import Adam


def test_three_steps_are_those_of_torch() -> None:
    torch.manual_seed(0)
    start, lr = {"w": torch.randn(3, 2), "b": torch.randn(2)}, 0.05
    theirs = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
    optimiser = torch.optim.Adam(theirs.values(), lr=lr)
    ours, adam = start, Adam()
    memory = adam.begin(start)
    for _ in range(3):
        gradients = {name: torch.randn_like(leaf) for name, leaf in start.items()}
        for name, leaf in theirs.items():
            leaf.grad = gradients[name].clone()
        optimiser.step()
        ours, memory = adam.step(ours, gradients, memory, torch.tensor(lr))
    for name, leaf in theirs.items():
        torch.testing.assert_close(ours[name], leaf.detach())
    assert float(memory["steps"]) == 3


def test_nothing_is_changed_in_place() -> None:
    start, adam = {"w": torch.ones(2)}, Adam()
    memory = adam.begin(start)
    adam.step(start, {"w": torch.ones(2)}, memory, torch.tensor(0.1))
    assert start["w"].tolist() == [1.0, 1.0]
    assert float(memory["steps"]) == 0
    assert memory["mean/w"].tolist() == memory["square/w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_moves_as_single_precision_does(dtype: torch.dtype) -> None:
    adam, lr = Adam(), torch.tensor(0.25)
    start = {"w": torch.tensor([1.0, 1.0, 1.0], dtype=dtype)}
    memory = adam.begin(start)
    ours = start
    for _ in range(2):
        # Squares of these are less than the least float16, and ε is, too.
        ours, memory = adam.step(ours, {"w": torch.tensor([2**-14, -(2**-14), 0.0], dtype=dtype)}, memory, lr)
    assert ours["w"].dtype == dtype
    assert ours["w"].tolist() == [0.5, 1.5, 1.0]
