"""What is said of a program that returns something else than it must."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fedemu.algorithms.interface import Outcome
from fedemu.device.compute.executors.promises import as_leaf, broken, finished, stepped
from fedemu.device.compute.tapes.private_torch import tree_flatten


class Carry(NamedTuple):
    variables: dict[str, Any]
    more: Any = ()


ONE = torch.ones(1)
SPEC = tree_flatten(Carry({"w": ONE, "b": ONE}))[1]


def test_a_step_returns_a_carry_of_the_same_form_and_numbers() -> None:
    measures = {"loss": torch.ones(()), "count": 2, "share": np.float32(0.5)}
    assert stepped((Carry({"w": ONE, "b": ONE}), measures), SPEC) == (Carry({"w": ONE, "b": ONE}), measures)


def test_the_order_of_names_in_a_carry_does_not_matter() -> None:
    after, _ = stepped((Carry({"b": ONE * 2, "w": ONE}), {}), SPEC)
    assert list(after.variables) == ["w", "b"]
    assert after.variables["b"] == 2


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "step returned a NoneType; it must return two things, the next carry and measures by name"),
        ((Carry({"w": ONE, "b": ONE}), None), "step returned a tuple; it must return two things"),
        (({"w": ONE, "b": ONE}, {}), "of another form than it was given: carry is a dict, and was a Carry"),
        ((Carry({"w": ONE}), {}), "of another form than it was given: carry.variables['b'] is missing"),
        ((Carry({"w": ONE, "b": ONE, "c": ONE}), {}), "than it was given: carry.variables['c'] is new"),
        ((Carry({"w": ONE, "b": [ONE]}), {}), "than it was given: carry.variables['b'] is a list, and was a Tensor"),
        ((Carry({"w": ONE, "b": ONE}, (ONE,)), {}), "than it was given: carry.more[0] is new"),
        (
            (Carry({"w": ONE, "b": ONE}), {"each": torch.ones(3)}),
            "the measure 'each' of the shape [3]; a measure is one",
        ),
        ((Carry({"w": ONE, "b": ONE}), {"name": "x"}), "the measure 'name' of the type str; a measure is one number"),
    ],
)
def test_what_else_a_step_returns_is_told_in_one_line(result: Any, said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)) as caught:
        stepped(result, SPEC)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "said"), [(None, "begin returned a NoneType where"), ("x", "begin returned a str where")]
)
def test_what_is_no_tensor_among_what_a_program_returns_is_told(value: Any, said: str) -> None:
    assert [as_leaf(number, "begin").item() for number in (ONE, 1, np.ones(()))] == [1, 1, 1]
    with pytest.raises(TypeError, match=said):
        as_leaf(value, "begin")


@pytest.mark.parametrize("name", [3, "n" * 257])
def test_a_measure_whose_name_cannot_travel_is_told(name: Any) -> None:
    with pytest.raises(TypeError, match="it must be text of at most 256 signs"):
        stepped((Carry({"w": ONE, "b": ONE}), {name: ONE[0]}), SPEC)


@pytest.mark.parametrize("result", [None, ({"delta": {}}, {}), Outcome({"delta": ONE}, {}), Outcome({}, ONE)])  # type: ignore[dict-item, arg-type]
def test_what_finish_must_return_is_told(result: Any) -> None:
    assert finished(outcome := Outcome({"delta": {"w": ONE}}, {})) is outcome
    with pytest.raises(
        TypeError, match="it must return an Outcome of the payload, which has trees by name, and of the"
    ):
        finished(result)


def test_a_tensor_that_is_not_as_it_was_told_is_named() -> None:
    assert broken("payload", {"w": ONE}, {"w": torch.zeros(1)}) is None
    said = "returns 'w' from ask as torch.int64 [1], but its payload tells torch.float32 [1] of it; let payload return"
    assert str(broken("payload", {"w": ONE}, {"w": ONE.long()}, "ask")).startswith(said)
