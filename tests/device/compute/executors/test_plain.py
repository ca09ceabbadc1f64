"""Programs run by torch's ordinary means: gradients of autograd, and generators that are seeded by the step's key."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from fedemu.algorithms.models.randomness.draws import keys
from fedemu.algorithms.models.randomness.random_functions import seeded_alike
from fedemu.device.compute.executors.plain import looping, plain


def key(step: int) -> Tensor:
    return torch.from_numpy(keys(np.zeros(1, np.uint64), np.array([step])))[0]


def test_gradients_are_those_of_torch_func() -> None:
    tree = {"w": torch.tensor([1.0, -2.0]), "unused": torch.ones(3)}

    def value(tree: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return (tree["w"] ** 3).sum(), tree["w"] * 2

    expected, also = torch.func.grad(value, has_aux=True)(tree)
    with torch.no_grad(), plain(key(0)):
        found, aux = torch.func.grad(value, has_aux=True)(tree)
    assert {name: leaf.tolist() for name, leaf in found.items()} == {"w": [3.0, 12.0], "unused": [0.0] * 3}
    assert all(torch.equal(found[name], leaf) for name, leaf in expected.items())
    assert torch.equal(aux, also)
    assert not aux.requires_grad


def test_what_a_function_puts_in_the_place_of_a_variables_values_is_there_after_it() -> None:
    tree = {"w": torch.tensor([1.0, -2.0]), "v": torch.ones(1)}

    def value(tree: dict[str, Tensor]) -> Tensor:
        tree["w"].data = tree["w"].data.clamp(-0.5, 0.5)
        return (tree["w"] ** 2).sum() * tree["v"].sum()

    with torch.no_grad(), plain(key(0)):
        found = torch.func.grad(value)(tree)
    assert {name: leaf.tolist() for name, leaf in found.items()} == {"w": [1.0, -1.0], "v": [0.5]}
    assert {name: leaf.tolist() for name, leaf in tree.items()} == {"w": [0.5, -0.5], "v": [1.0]}


def test_a_gradient_of_a_gradient_and_one_under_vmap_work_too() -> None:
    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: x**3)(x)  # type: ignore[no-any-return]

    x = torch.tensor([1.0, 2.0])
    with torch.no_grad(), plain(key(0)):
        assert torch.func.grad(lambda x: slope(x) * 2)(x[1]).item() == 24.0
        assert torch.func.vmap(slope)(x).tolist() == [3.0, 12.0]


def test_a_gradient_of_a_gradient_by_variables_that_the_inner_function_was_not_given() -> None:
    x, w = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0])

    def penalty(w: Tensor) -> Tensor:
        # By x, (w x)³ has the gradient 3 w³ x², whose squares have the gradient 54 w⁵ x⁴ by w; by w, w² has 2 w.
        slopes, squares = torch.func.grad(lambda x: (((w * x) ** 3).sum(), (w**2).sum()), has_aux=True)(x)
        return slopes.square().sum() + squares  # type: ignore[no-any-return]

    def broken(w: Tensor) -> Tensor:
        torch.func.grad(lambda x: x.sum() if w is None else 1 / 0)(x)
        return w.sum()

    with torch.no_grad(), plain(key(0)):
        assert torch.func.grad(penalty)(w).tolist() == [2.6875, -866.0]
        with pytest.raises(ZeroDivisionError):
            torch.func.grad(broken)(w)
        assert not torch.func.grad(lambda x: x.sum())(x).requires_grad


def test_all_generators_follow_the_key_and_are_as_before_afterwards() -> None:
    def drawn(step: int) -> tuple[float, float, float]:
        with plain(key(step)):
            return random.random(), float(np.random.rand()), float(torch.rand(()))

    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    assert drawn(1) == drawn(1)
    assert not {*drawn(1)} & {*drawn(2)}
    assert states == (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())


def test_who_seeds_the_generators_meanwhile_in_another_thread_waits() -> None:
    def evaluate() -> None:
        with seeded_alike(torch.device("cpu")):
            entered.set()

    entered, thread = threading.Event(), threading.Thread(target=evaluate)
    with plain(key(0)):
        thread.start()
        assert not entered.wait(0.2)
    thread.join(60)
    assert entered.is_set()


def test_a_process_that_is_forked_meanwhile_does_not_wait() -> None:
    with plain(key(0)):
        thread = threading.Thread(target=lambda: children.append(os.fork() or _end_of_child()))
        children: list[int] = []
        thread.start()
        thread.join(60)
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7


def _end_of_child() -> int:
    with seeded_alike(torch.device("cpu")):
        os._exit(7)


def test_what_cannot_be_mapped_is_called_row_by_row() -> None:
    def branching(x: Tensor) -> dict[str, Tensor]:
        return {"y": x * 2 if x.sum() > 0 else x}

    x = torch.tensor([[1.0, 2.0], [-1.0, -2.0]], requires_grad=True)
    original = torch.func.vmap
    with looping():
        found = torch.func.vmap(branching)(x)["y"]
        assert torch.func.vmap(torch.sin)(x).shape == (2, 2)
    assert torch.func.vmap is original
    assert found.tolist() == [[2.0, 4.0], [-1.0, -2.0]]
    assert torch.autograd.grad(found.sum(), x)[0].tolist() == [[2.0, 2.0], [1.0, 1.0]]
