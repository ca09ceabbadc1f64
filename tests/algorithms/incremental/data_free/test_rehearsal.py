"""What methods that rehearse from synthetic samples have in common: their generator's precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fedemu.algorithms.incremental.data_free.lander import lander
from fedemu.algorithms.incremental.data_free.rehearsal import SampleRehearsal
from fedemu.algorithms.incremental.data_free.target import target
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.models.low_precision import Precision, precision_of, with_precision
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy

SHAPE = (1, 8, 8)
MODEL = growing(mlp(SHAPE, 4, (6,)), ClassTasks.of(4, 2, [2, 0, 3, 1]), SHAPE)
INGREDIENTS = Ingredients(MODEL, cross_entropy, 4, 2, 5, 0.05, devices=3, input_shape=SHAPE)


@pytest.mark.parametrize("build", [target, lander])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_generator_has_the_precision_of_the_model(
    build: Callable[..., SampleRehearsal], precision: Precision
) -> None:
    method = build(replace(INGREDIENTS, model=with_precision(MODEL, precision)))
    assert precision_of(method._synthesis.maker.generator.model) == precision
