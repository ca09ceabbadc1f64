"""What methods that rehearse from synthetic samples have in common: their generator's precision, their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedemu.algorithms.incremental.data_free.lander import lander
from fedemu.algorithms.incremental.data_free.rehearsal import SampleRehearsal
from fedemu.algorithms.incremental.data_free.target import target
from fedemu.algorithms.interface import Context, ServerJob, Tree
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.models.low_precision import Precision, precision_of, with_precision
from fedemu.algorithms.models.resnet import resnet18
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


FEW: dict[str, Any] = {
    "synthesis_rounds": 3,
    "warm_up": 1,
    "synthesis_steps": 2,
    "generator_batch": 8,
    "noise": 5,
    "student_steps": 2,
    "student_batch": 4,
}
OTHERS: dict[str, Any] = {
    "synthesis_rounds": 4,
    "warm_up": 0,
    "synthesis_steps": 3,
    "generator_batch": 7,
    "noise": 4,
    "generator_lr": 0.1,
    "cross_entropy": 0.0,
    "batch_statistics": 0.0,
    "divergence": 0.0,
    "statistics_momentum": 0.0,
    "student_steps": 3,
    "student_batch": 5,
    "student_lr": 0.01,
    "student_decay": 0.1,
    "student_temperature": 1.0,
}


@pytest.mark.parametrize(("build", "own"), [(target, {"latent_lr": 0.1}), (lander, {"anchoring": 0.0, "radius": 9.0})])
def test_every_option_changes_the_samples_or_the_student(
    build: Callable[..., SampleRehearsal], own: dict[str, float]
) -> None:
    torch.set_num_threads(1)

    def made(**options: Any) -> Tree:
        method = build(INGREDIENTS, **{**FEW, **options})
        state = method.init(MODEL.init(0), Context(1, 0, 7, 4))
        job = next(method.round(state, Context(2, 1, 7, 4)))
        assert isinstance(job, ServerJob)
        carry = job.init()
        for index in range(job.steps):
            carry, _ = job.step(carry, index)
        return {name: leaf for name, leaf in carry.items() if name.startswith(("pool/x", "student/"))}

    def same(one: Tree, other: Tree) -> bool:
        return all(torch.equal(leaf, other[name]) for name, leaf in one.items())

    plain = made()
    assert same(plain, made())
    assert [option for option, value in {**OTHERS, **own}.items() if same(plain, made(**{option: value}))] == []
