"""What differs when something is built again."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedemu.algorithms import built_again
from fedemu.algorithms.built_again import LARGE, Original, difference
from fedemu.algorithms.methods.fedavg import FedAvgState


def around(value: Any) -> Callable[[], Any]:
    return lambda: value


CONTENTS: dict[str, Callable[[int], Any]] = {
    "generator of numpy": np.random.default_rng,
    "older generator of numpy": np.random.RandomState,
    "generator of Python": random.Random,
    "generator of torch": lambda seed: torch.Generator().manual_seed(seed),
    "array": lambda seed: np.full((2, 2), seed, np.float32),
    "tensor": lambda seed: torch.full((2, 2), seed, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("made", CONTENTS.values(), ids=CONTENTS)
def test_contents_are_found_in_attributes_items_and_around_functions(made: Callable[[int], Any]) -> None:
    def built(seed: int) -> Any:
        return SimpleNamespace(name=f"not looked at {seed}", inner={"deep": [0, around((made(1), made(seed)))]})

    assert difference(built(1), built(1)) is None
    assert difference(built(1), built(2)) == "value"


def test_an_item_of_a_list_has_the_name_of_the_list_and_shapes_count() -> None:
    one, other = (SimpleNamespace(shares=[torch.zeros(size)]) for size in (2, 3))
    assert difference(one, other) == "shares"


def test_what_differs_by_rounding_alone_is_the_same() -> None:
    one, other = (SimpleNamespace(basis=torch.tensor([1.0 + rounded, torch.nan])) for rounded in (0.0, 2**-22))
    assert difference(one, other) is None


def test_objects_that_hold_each_other_and_what_cannot_be_compared_are_no_difference() -> None:
    def built() -> Any:
        one, other = SimpleNamespace(), SimpleNamespace(chance=random.SystemRandom(), things=np.array([object()]))
        one.other, other.one = other, one
        return one

    assert difference(built(), built()) is None


class Keeping:
    """A method that may keep all sorts of things in itself."""

    momentum: Any = None
    history: ClassVar[dict[int, float]] = {}

    def __init__(self) -> None:
        self.velocity: Any = None
        self.rounds = 0
        self.seen: list[int] = []
        self.memory: dict[int, float] = {3: 0.5}
        self.known: set[str] = set()
        self.mean = torch.zeros(2)
        self.total = np.zeros(2)
        self.random = np.random.default_rng(0)
        self.count = counting()
        self.of_fedemu = FedAvgState({"w": torch.zeros(1)})
        self.network = torch.nn.Linear(1, 1)
        self.large = np.zeros(LARGE + 1, np.uint8)


def counting() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda method: setattr(method, "velocity", torch.ones(1)), "velocity"),
        (lambda method: setattr(method, "rounds", 1), "rounds"),
        (lambda method: method.seen.append(1), "seen"),
        (lambda method: method.memory.update({4: 1.0}), "memory"),
        (lambda method: method.memory.update({3: 1.0}), "memory.3"),
        (lambda method: method.known.add("a"), "known"),
        (lambda method: method.mean.add_(1), "mean"),
        (lambda method: setattr(method, "mean", torch.zeros(2)), "mean"),
        (lambda method: np.add(method.total, 1, out=method.total), "total"),
        (lambda method: method.random.normal(), "random"),
        (lambda method: method.count(), "count.calls"),
        (lambda method: setattr(method, "cache", 1), None),
        (lambda method: setattr(method, "total", np.zeros(2)), None),
        (lambda method: method.of_fedemu.variables.update(w=torch.ones(1)), None),
        (lambda method: method.network.requires_grad_(False), None),
        (lambda method: np.add(method.large, 1, out=method.large), None),
        (lambda method: None, None),
    ],
)
def test_what_an_own_object_has_changed_in_itself_is_named(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], object], name: str | None
) -> None:
    monkeypatch.setattr(built_again, "is_own", lambda file: file == __file__)
    method = Keeping()
    original = Original(method)
    change(method)
    assert original.changed(method) == name


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda method: setattr(method, "momentum", torch.ones(1)), "momentum"),
        (lambda method: method.history.update({1: 0.5}), "history"),
    ],
)
def test_what_its_class_holds_counts_too(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], object], name: str
) -> None:
    monkeypatch.setattr(built_again, "is_own", lambda file: file == __file__)
    monkeypatch.setattr(Keeping, "history", {})
    method = Keeping()
    original = Original(method)
    assert original.changed(method) is None
    change(method)
    assert original.changed(method) == name


def test_what_was_added_later_has_changed_once_it_is_another_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_again, "is_own", lambda file: file == __file__)
    method: Any = Keeping()
    original = Original(method)
    method.later = {"w": torch.zeros(1)}
    assert [original.changed(method) for _ in range(2)] == [None, None]
    method.later["w"].add_(1)
    assert original.changed(method) == "later.w"


def test_a_state_is_watched_whatever_it_is_made_of() -> None:
    for state, change, name in (
        ({"w": torch.zeros(1)}, lambda state: state["w"].mul_(2), "w"),
        ({"w": torch.zeros(1)}, lambda state: state.update(v=1), "its size"),
        (FedAvgState({"w": torch.zeros(1)}), lambda state: state.variables["w"].add_(1), "variables.w"),
        ([np.zeros(2)], lambda state: np.add(state[0], 1, out=state[0]), "0"),
        ({"w": torch.zeros(1)}, lambda state: state["w"].add(1), None),
    ):
        before = Original(state, everything=True)
        change(state)
        assert before.changed(state) == name


class Layer(torch.nn.Linear):
    """A module that may keep all sorts of things beside its tensors."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 0
        self.shape: tuple[int, ...] = (2,)
        self.last = torch.zeros(2)
        self.large = torch.zeros(LARGE)
        self.table = torch.eye(2).to_sparse()
        self.turn = torch.tensor([1j, 2j]).conj()
        self.register_buffer("seen", torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda layer: setattr(layer, "calls", 1), "1.calls"),
        (lambda layer: setattr(layer, "shape", (3,)), "1.shape.0"),
        (lambda layer: layer.last.add_(1), "1.last"),
        (lambda layer: setattr(layer, "last", torch.zeros(2)), None),
        (lambda layer: setattr(layer, "last", torch.zeros(3)), "1.last"),
        (lambda layer: setattr(layer, "turn", torch.tensor([complex(0, -1), complex(0, -2)])), None),
        (lambda layer: setattr(layer, "turn", torch.tensor([1j, 2j])), "1.turn"),
        (lambda layer: setattr(layer, "cache", [1]), None),
        (lambda layer: layer.large.add_(1), None),
        (lambda layer: layer.table.mul_(2), None),
        (lambda layer: layer.weight.data.add_(1), None),
        (lambda layer: layer.seen.add_(1), None),
        (lambda layer: layer.eval(), None),
        (lambda layer: setattr(layer, "out_features", 3), "1.out_features"),
    ],
)
def test_what_an_own_module_has_changed_in_itself_is_named(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], object], name: str | None
) -> None:
    monkeypatch.setattr(built_again, "is_own", lambda file: file == __file__)
    module = torch.nn.Sequential(torch.nn.ReLU(), Layer())
    original = Original(module, modules=True)
    change(module[1])
    assert original.changed(module) == name


def test_what_objects_of_fedemu_change_in_themselves_is_theirs() -> None:
    method = Keeping()
    original = Original(method)
    method.rounds = 1
    assert original.changed(method) is None
