"""What differs when something is built again."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.built_again import difference


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
