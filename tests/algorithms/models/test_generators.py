"""The generators of Python, numpy and torch, seeded for a while."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from fedemu.algorithms.models.randomness.generators import all_seeded, generators_for

CPU = torch.device("cpu")


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


@pytest.mark.parametrize("fails", [False, True])
def test_all_draw_by_the_seed_and_go_on_as_if_nothing_had_been(fails: bool) -> None:
    with all_seeded(1, generators_for(CPU)):
        before = draws()
    with all_seeded(1, generators_for(CPU)):
        with suppress(KeyError), all_seeded(2, generators_for(CPU)):
            inside = draws()
            if fails:
                raise KeyError
        assert draws() == before
    with all_seeded(2, generators_for(CPU)):
        assert draws() == inside


def test_torch_may_have_a_seed_of_its_own_and_draws_by_it_as_torch_does() -> None:
    with all_seeded(5, generators_for(CPU), torch_seed=7):
        python, _, drawn = draws()
    assert python == random.Random(5).random()
    assert drawn == float(torch.rand((), generator=torch.Generator().manual_seed(7)))
