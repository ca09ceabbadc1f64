"""FedKD: plain distillation in the local loss, the control of FedNTD."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedemu.algorithms.interface import Batch, Outputs, Tree
from fedemu.algorithms.methods.fedavg import fedavg
from fedemu.algorithms.methods.fedkd import fedkd, imitation
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.losses import distillation
from fedemu.algorithms.training.objective import Pass, cross_entropy
from fedemu.algorithms.trees import model_digest

MLP = mlp((1, 12, 12), 4, (8,))
UNEVEN = [np.arange(0, 40, 4), np.arange(1, 70, 2)]


def ingredients(**settings: Any) -> Ingredients:
    return Ingredients(MLP, cross_entropy, **{"classes": 4, "epochs": 2, "batch_size": 8, "lr": 0.05, **settings})


class Louder:
    """A model with the logits ``w·x``, twice as large in training. ``w [classes]``, ``x [batch, 1]``."""

    kind = "dense"
    buffers: frozenset[str] = frozenset()

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        logits = x * variables["w"] * (2 if train else 1)
        return Outputs(logits, x, {}), {}


def test_distillation_by_hand() -> None:
    # The student is (1/4, 3/4), the teacher (1/2, 1/2): KL = 1/2 log 2 + 1/2 log 2/3. The second row is padding.
    student = torch.tensor([[0.0, math.log(3)], [7.0, 1.0]], dtype=torch.float64)
    teacher = torch.zeros(2, 2, dtype=torch.float64)
    value = distillation(student, teacher, 1.0, torch.tensor([1.0, 0.0]))
    assert float(value) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-12)
    # At temperature 2 logits that are twice as large have the same softmax, and the factor is 4.
    assert float(distillation(2 * student, teacher, 2.0, torch.tensor([1.0, 0.0]))) == pytest.approx(4 * float(value))
    assert float(distillation(student, student, 3.0)) == 0


def test_the_true_class_is_distilled_too() -> None:
    """Its logit has a gradient: T times the student's probability minus the teacher's, at temperature T."""
    logits, teacher = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    gradient = torch.func.grad(lambda z: distillation(z, teacher, 2.0))(logits)
    torch.testing.assert_close(gradient, 2.0 * ((logits / 2).softmax(-1) - (teacher / 2).softmax(-1)))


def test_the_teacher_is_the_sent_model_in_evaluation_mode_on_the_same_batch() -> None:
    model: Any = Louder()
    batch = Batch(torch.tensor([[1.0], [3.0], [-1.0]]), torch.tensor([0, 2, 1]), torch.tensor([1.0, 1.0, 0.0]))
    sent, trained = {"w": torch.tensor([1.0, -0.5, 2.0])}, {"w": torch.tensor([0.0, 1.0, 0.5])}
    facts: Any = None
    at = Pass(trained, model.apply(trained, batch.x, True)[0], batch, {"model": sent}, {}, facts)
    expected = distillation(2 * batch.x * trained["w"], batch.x * sent["w"], 3.0, batch.weight)
    torch.testing.assert_close(imitation(0.7, 3.0)(model, at), 0.7 * expected)


def test_without_distillation_fedkd_is_fedavg_to_the_bit(little_fleet: Callable[..., Any]) -> None:
    plain, distilled = (
        little_fleet(algorithm, MLP.init(0), UNEVEN)
        for algorithm in (fedavg(ingredients()), fedkd(ingredients(), beta=0.0))
    )
    for fleet in (plain, distilled):
        fleet.play([0, 1])
    assert model_digest(plain.model) == model_digest(distilled.model)


def test_a_strong_teacher_keeps_the_model_where_it_was(little_fleet: Callable[..., Any]) -> None:
    def moved(beta: float) -> float:
        before = MLP.init(0)
        fleet = little_fleet(fedkd(ingredients(lr=0.01), beta=beta), before, UNEVEN)
        fleet.play([0, 1])
        return sum(float((leaf - before[name]).square().sum()) for name, leaf in fleet.model.items())

    assert moved(5.0) < 0.6 * moved(0.0)
