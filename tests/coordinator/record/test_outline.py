"""States of algorithms, taken apart into an outline with tensors and put together again."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fedemu.coordinator.record.outline import put_together, taken_apart
from fedemu.protocol.errors import ConfigurationError


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


@dataclass(frozen=True)
class Newer:
    weights: torch.Tensor
    task: int = 0


@dataclass(frozen=True)
class Chain:
    value: int
    rest: "Chain | None" = None


@dataclass(frozen=True)
class Generator:
    weights: Mapping[str, torch.Tensor]
    temperature: float


@dataclass(frozen=True)
class State:
    variables: Mapping[str, torch.Tensor]
    generator: Generator | None = None
    by_device: Mapping[int, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()
    scalars: tuple[float | int | str | bool | None, ...] = ()


@dataclass(frozen=True)
class Untyped:
    inner: "LaterOnly"  # noqa: F821 - as a name that only type checkers import


@dataclass(frozen=True)
class Derived:
    value: int
    doubled: int = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "doubled", 2 * self.value)


def there_and_back(state, example):
    tensors = {}
    outline = json.loads(json.dumps(taken_apart(state, tensors)))
    return put_together(outline, tensors, example)


EMPTY = State({})


def test_fields_that_the_example_leaves_empty_are_found_by_type_hints():
    weight = torch.tensor([1.5])
    state = State({"w": weight}, Generator({"g": weight}, 0.1), {12: {"c": weight}}, (Pair(weight, 3),))
    back = there_and_back(state, EMPTY)
    assert isinstance(back.generator, Generator)
    assert back.generator.temperature == 0.1
    assert list(back.by_device) == [12]
    assert isinstance(back.pairs[0], Pair)
    assert torch.equal(back.pairs[0].left, weight)


def test_scalars_keep_their_type_and_every_bit():
    scalars = (1, 1.0, True, None, "text", 0.1 + 0.2, math.inf, -0.0, 2**70)
    back = there_and_back(State({}, scalars=scalars), EMPTY).scalars
    assert [(type(value), repr(value)) for value in back] == [(type(value), repr(value)) for value in scalars]
    assert math.isnan(there_and_back(State({}, scalars=(math.nan,)), EMPTY).scalars[0])


def test_numpy_scalars_become_plain_ones():
    back = there_and_back(State({}, None, {np.int64(12): {}}, scalars=(np.float64(0.1), np.int32(4))), EMPTY)
    assert back.scalars == (0.1, 4)
    assert [type(value) for value in (*back.scalars, *back.by_device)] == [float, int, int]


def test_lists_and_tuples_stay_what_they_are():
    assert there_and_back(State({}, scalars=([1, (2,)], ([3],))), EMPTY).scalars == ([1, (2,)], ([3],))


def test_a_class_may_hold_itself():
    assert there_and_back(Chain(1, Chain(2)), Chain(0)) == Chain(1, Chain(2))


def test_the_order_of_mappings_is_kept():
    tree = {name: torch.zeros(1) for name in ("z", "a", "m")}
    assert list(there_and_back(State(tree), EMPTY).variables) == ["z", "a", "m"]


def test_tensors_keep_dtype_shape_and_bits():
    bits = torch.tensor([0x7FC00001, -1, 0, -(2**31)], dtype=torch.int32)
    tree = {"nan": bits.view(torch.float32), "scalar": torch.tensor(7), "half": torch.ones(2, 1, dtype=torch.bfloat16)}
    back = there_and_back(State(tree), EMPTY).variables
    assert torch.equal(back["nan"].view(torch.int32), bits)
    assert back["scalar"].shape == ()
    assert back["half"].dtype == torch.bfloat16
    assert back["half"].shape == (2, 1)


def test_a_flattened_tensor_shares_no_memory_and_needs_no_gradient():
    weight = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    tensors = {}
    taken_apart(State({"w": weight}), tensors)
    (kept,) = tensors.values()
    assert kept.is_contiguous()
    assert not kept.requires_grad
    assert kept.data_ptr() != weight.data_ptr()
    assert torch.equal(kept, weight)


def test_names_that_look_alike_stay_apart():
    @dataclass(frozen=True)
    class Mixed:
        values: Mapping[str | int, object]

    state = Mixed({"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 1: torch.tensor(3), "1": torch.tensor(4)})
    back = there_and_back(state, state).values
    assert [back["a/b"], back["a"]["b"], back[1], back["1"]] == [1, 2, 3, 4]


def test_a_class_within_a_function_is_found_by_the_example():
    @dataclass(frozen=True)
    class Inner:
        value: int

    @dataclass(frozen=True)
    class Local:
        inner: "Inner"

    for wrap in (Inner, lambda value: {"a": Inner(value)}, lambda value: (Inner(value),), lambda value: [Inner(value)]):
        assert there_and_back(Local(wrap(3)), Local(wrap(0))) == Local(wrap(3))


def test_a_class_that_neither_the_example_nor_a_hint_shows_is_found_in_its_module():
    state = Untyped(Generator({"g": torch.tensor([1.5])}, 0.1))
    assert there_and_back(state, Untyped(None)) == state


def test_two_classes_of_one_name_are_told_apart_by_their_modules():
    inner = dataclasses.make_dataclass("State", ["age"], frozen=True)
    inner.__module__ = "another_method"
    state = State({}, scalars=(inner(3),))
    back = there_and_back(state, state)
    assert type(back) is State
    assert back.scalars == (inner(3),)


def test_a_class_whose_module_has_another_name_now_is_found_by_its_own_name():
    outline = taken_apart(Newer(torch.ones(2), 7), tensors := {})
    del outline["module"]  # as earlier versions wrote it
    assert put_together(outline, tensors, Newer(torch.zeros(2))).task == 7
    assert put_together({**outline, "module": "moved"}, tensors, Newer(torch.zeros(2))).task == 7


def test_a_field_that_the_constructor_does_not_take_comes_back():
    state = Derived(2)
    assert there_and_back(state, Derived(0)).doubled == 4
    object.__setattr__(state, "doubled", 5)
    assert there_and_back(state, Derived(0)).doubled == 5


def test_what_a_checkpoint_cannot_hold_is_named():
    with pytest.raises(ConfigurationError, match="state/variables/w of the algorithm is an object"):
        taken_apart(State({"w": object()}), {})
    for tensor in (torch.eye(2).to_sparse(), torch.zeros(2, device="meta")):
        with pytest.raises(ConfigurationError, match="state/variables/w of the algorithm is a tensor that is sparse"):
            taken_apart(State({"w": tensor}), {})
    for key in (1.5, True):
        with pytest.raises(ConfigurationError, match=f"state/variables of the algorithm has the key {key}"):
            taken_apart(State({key: torch.zeros(1)}), {})


def test_a_state_of_another_algorithm_is_refused():
    unknown = dataclasses.make_dataclass("Unknown", ["value"])
    with pytest.raises(ConfigurationError, match=r"holds a Unknown, which .* does not know; undo what was changed"):
        there_and_back(unknown(1), Pair(torch.zeros(1), 1))
    with pytest.raises(ConfigurationError, match="holds a Generator, but this experiment needs a Pair; undo"):
        there_and_back(Generator({}, 1.0), Pair(torch.zeros(1), 1))
    with pytest.raises(ConfigurationError, match="holds a Generator, but this experiment needs a State"):
        there_and_back(Generator({}, 1.0), EMPTY)


def test_a_state_of_another_version_is_refused_by_the_differing_field():
    tensors = {}
    outline = taken_apart(Generator({}, 1.0), tensors)
    outline["fields"]["heat"] = outline["fields"].pop("temperature")
    with pytest.raises(
        ConfigurationError, match="another version: it differs in 'heat'; resume the run with the version"
    ):
        put_together(outline, tensors, Generator({}, 1.0))


def test_a_field_with_a_default_may_be_newer_than_the_checkpoint():
    tensors = {}
    outline = taken_apart(Newer(torch.ones(2), 7), tensors)
    del outline["fields"]["task"]
    restored = put_together(outline, tensors, Newer(torch.zeros(2), 5))
    assert restored.task == 0
    assert torch.equal(restored.weights, torch.ones(2))
    del outline["fields"]["weights"]
    with pytest.raises(ConfigurationError, match="another version: it differs in 'weights'"):
        put_together(outline, tensors, Newer(torch.zeros(2), 5))
