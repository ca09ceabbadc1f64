"""Models around another one: what they tell of themselves is what the model inside tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from fedemu.algorithms.incremental.data_free.anchors import Mapped
from fedemu.algorithms.interface import Kind, Model, Outputs, Tree, mixes, pure
from fedemu.algorithms.models.around import extended, stripped
from fedemu.algorithms.models.frozen import frozen_of
from fedemu.algorithms.models.growing import Growing, Head
from fedemu.algorithms.models.layer_statistics import Watched
from fedemu.algorithms.models.low_precision import LowPrecision
from fedemu.algorithms.streams.tasks import ClassTasks


@dataclass(frozen=True)
class Inside:
    """A model of two variables that tells what few models tell."""

    kind: ClassVar[Kind] = "sequence"
    buffers: ClassVar[frozenset[str]] = frozenset({"seen"})
    frozen: ClassVar[Tree] = {"table": torch.ones(2)}
    pure: ClassVar[bool] = True

    def mixes(self, train: bool) -> bool:
        return train

    def init(self, seed: int) -> Tree:
        return {"weight": torch.full((2, 3), float(seed)), "seen": torch.zeros(1)}

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        raise AssertionError("nobody applies it here")


TASKS = ClassTasks.of(2, 2, [0, 1])
AROUND: list[Model] = [
    Growing(Inside(), TASKS, Head("weight", None)),
    Watched(Inside(), (("layer", 4),)),
    LowPrecision(Inside(), torch.bfloat16),
    Mapped(Inside(), 3, 5),
]


@pytest.mark.parametrize("model", AROUND, ids=lambda model: type(model).__name__)
def test_a_model_around_another_one_tells_what_the_inner_one_tells(model: Model) -> None:
    assert model.kind == "sequence"
    assert "seen" in model.buffers
    assert frozen_of(model) is Inside.frozen
    assert pure(model)
    assert [mixes(model, train) for train in (False, True)] == [False, True]
    assert model.init(7)["weight"].tolist() == [[7.0] * 3] * 2


@pytest.mark.parametrize("model", [AROUND[1], Mapped(AROUND[1], 3, 5)], ids=["Watched", "Mapped and Watched"])
def test_what_a_model_has_beside_the_experiments_own_comes_and_goes(model: Model) -> None:
    variables = Inside().init(7)
    whole = extended(model, variables, 7)
    assert whole.keys() == model.init(7).keys()
    assert whole.keys() > variables.keys()
    assert stripped(model, whole) == variables


def test_a_model_that_has_nothing_beside_keeps_its_variables_as_they_are() -> None:
    variables = AROUND[0].init(7)
    assert extended(AROUND[0], variables, 7) is variables
    assert stripped(AROUND[0], variables) is variables
