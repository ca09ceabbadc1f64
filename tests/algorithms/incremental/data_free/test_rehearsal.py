"""What methods that rehearse from synthetic samples have in common: their generator's precision, their batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from fedemu.algorithms.incremental.data_free.lander import lander
from fedemu.algorithms.incremental.data_free.rehearsal import SampleRehearsal
from fedemu.algorithms.incremental.data_free.target import target
from fedemu.algorithms.incremental.mfcl import MOST_BYTES
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.models.low_precision import Precision, precision_of, with_precision
from fedemu.algorithms.models.resnet import resnet18
from fedemu.algorithms.registry import build_algorithm
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.protocol.errors import ConfigurationError

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


@pytest.mark.parametrize("build", [target, lander])
def test_single_synthetic_samples_are_refused_if_the_model_normalises_by_batches(
    build: Callable[..., SampleRehearsal],
) -> None:
    normalised = growing(resnet18(SHAPE, 4, "batch", width=2), MODEL.tasks, SHAPE)
    with pytest.raises(ConfigurationError, match=r"can't work with algorithm\.options\.synthetic_batch = 1, because"):
        build(replace(INGREDIENTS, model=normalised), synthetic_batch=1)
    assert "rehearse" in build(replace(INGREDIENTS, model=normalised), synthetic_batch=2).programs
    assert "rehearse" in build(INGREDIENTS, synthetic_batch=1).programs


@pytest.mark.parametrize("build", [target, lander])
def test_without_the_loss_of_statistics_a_model_needs_none_and_as_many_samples_as_may_be_made_are_accepted(
    build: Callable[..., SampleRehearsal],
) -> None:
    silent = growing(mlp(SHAPE, 4, ()), MODEL.tasks, SHAPE)
    many = {"synthesis_rounds": 2**16, "warm_up": 0, "generator_batch": 2**8}
    method = build(replace(INGREDIENTS, model=silent), batch_statistics=0.0, **many)
    assert method._synthesis.settings.samples * math.prod(SHAPE) * 4 == MOST_BYTES


def test_numbers_outside_of_their_range_are_refused() -> None:
    build_algorithm("target", {"statistics_momentum": 0.0, "generator_batch": 2, "divergence": 0.0}, INGREDIENTS)
    for name, value in (("statistics_momentum", -0.1), ("statistics_momentum", 1.0), ("generator_batch", 1)):
        with pytest.raises(ConfigurationError, match=rf"algorithm\.options\.{name}"):
            build_algorithm("target", {name: value}, INGREDIENTS)
