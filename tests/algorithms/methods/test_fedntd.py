"""FedNTD: the not-true distillation in the local loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedemu.algorithms.interface import Batch, Model, Outputs, Tree
from fedemu.algorithms.methods.fedavg import FedAvg, fedavg
from fedemu.algorithms.methods.fedntd import fedntd, preservation
from fedemu.algorithms.models.feed_forward import cnn, mlp
from fedemu.algorithms.models.growing import SEEN, growing
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.losses import not_true_distillation
from fedemu.algorithms.training.objective import Pass, cross_entropy
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped

SHAPE = (1, 12, 12)
MLP = mlp(SHAPE, 4, (8,))
UNEVEN = [np.arange(0, 40, 4), np.arange(1, 70, 2), np.arange(0, 3), np.arange(0)]


def ingredients(model: Model = MLP, **settings: Any) -> Ingredients:
    return Ingredients(model, cross_entropy, **{"classes": 4, "epochs": 2, "batch_size": 8, "lr": 0.05, **settings})


def same(left: Tree, right: Tree) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class Louder:
    """A model with the logits ``w·x``, twice as large in training. ``w [classes]``, ``x [batch, 1]``."""

    kind = "dense"
    buffers: frozenset[str] = frozenset()

    def init(self, seed: int) -> Tree:
        return {"w": torch.tensor([1.0, -0.5, 2.0])}

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        logits = x * variables["w"] * (2 if train else 1)
        return Outputs(logits, x, {}), {}


def test_the_teacher_is_the_sent_model_in_evaluation_mode_on_the_same_batch() -> None:
    model: Any = Louder()
    batch = Batch(torch.tensor([[1.0], [3.0], [-1.0]]), torch.tensor([0, 2, 1]), torch.tensor([1.0, 1.0, 0.0]))
    sent, trained = model.init(0), {"w": torch.tensor([0.0, 1.0, 0.5])}
    facts: Any = None
    at = Pass(trained, model.apply(trained, batch.x, True)[0], batch, {"model": sent}, {}, facts)
    expected = not_true_distillation(2 * batch.x * trained["w"], batch.x * sent["w"], batch.y, 3.0, batch.weight)
    torch.testing.assert_close(preservation(0.7, 3.0)(model, at), 0.7 * expected)


def test_classes_that_have_not_come_take_no_part_however_sure_a_model_is_of_the_true_class() -> None:
    """Their logits lie 50 below the highest one. Here that is 10 above the other classes that have come."""
    model = growing(mlp((2,), 4, ()), ClassTasks.of(4, 2, [0, 1, 2, 3]), (2,))
    weight = torch.zeros(4, 2)
    weight[0, 0] = 60.0
    sent = {**model.init(0), "fc1.weight": weight, "fc1.bias": torch.zeros(4)}
    batch = Batch(torch.tensor([[1.0, 0.5]]), torch.tensor([0]), torch.ones(1))

    def value(trained: Tensor, seen: list[int]) -> Tensor:
        begun = {**sent, SEEN: torch.tensor(seen).float()}
        variables = {**begun, "fc1.weight": trained}
        facts: Any = None
        at = Pass(variables, model.apply(variables, batch.x, True)[0], batch, {"model": begun}, {}, facts)
        return preservation(1.0, 3.0)(model, at)

    # The student's logits of the classes are 60, 0, 3.5 and 9.
    student = (weight + torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 1.0], [0.0, 18.0]])).requires_grad_()
    # If two classes have come, without the true one nothing is left to compare.
    assert value(student, [1, 0, 1, 0]).item() == 0
    (gradient,) = torch.autograd.grad(value(student, [1, 0, 1, 0]), student)
    assert torch.equal(gradient, torch.zeros(4, 2))
    # If three have come, the teacher says 1/2 and 1/2 of the others.
    sure = 1 / (1 + math.exp(-3.5 / 3))
    expected = 9 * (math.log(1 / 2) - math.log(sure * (1 - sure)) / 2)
    assert value(student, [1, 1, 1, 0]).item() == pytest.approx(expected)


def test_without_distillation_fedntd_is_fedavg_to_the_bit(little_fleet: Callable[..., Any]) -> None:
    plain, distilled = (
        little_fleet(algorithm, MLP.init(0), UNEVEN)
        for algorithm in (fedavg(ingredients()), fedntd(ingredients(), beta=0.0))
    )
    for _ in range(2):
        plain.play([0, 1, 2])
        distilled.play([0, 1, 2])
    assert same(plain.model, distilled.model)


def test_a_first_step_is_fedavgs_because_the_student_is_its_teacher(little_fleet: Callable[..., Any]) -> None:
    once = ingredients(epochs=1, batch_size=40)
    plain, distilled = (little_fleet(algorithm, MLP.init(0), UNEVEN) for algorithm in (fedavg(once), fedntd(once)))
    plain.play([0, 1])
    distilled.play([0, 1])
    for name, leaf in plain.model.items():
        torch.testing.assert_close(distilled.model[name], leaf)


def test_fedntd_keeps_the_local_model_nearer_to_the_teachers_other_classes(little_fleet: Callable[..., Any]) -> None:
    variables = MLP.init(0)
    one_class = [np.arange(0, 160, 4)]

    def divergence(algorithm: FedAvg) -> float:
        fleet = little_fleet(algorithm, variables, one_class)
        fleet.play([0])
        x, y = fleet.corpus.batch(fleet.corpus.train, one_class[0])
        student, teacher = (MLP.apply(tree, x, False)[0].logits for tree in (fleet.model, variables))
        return float(not_true_distillation(student, teacher, y, 1.0))

    assert divergence(fedntd(ingredients(), beta=5.0)) < 0.5 * divergence(fedavg(ingredients()))


def test_fedntd_sends_and_keeps_what_fedavg_does(little_fleet: Callable[..., Any]) -> None:
    fleet = little_fleet(fedntd(ingredients()), MLP.init(0), UNEVEN)
    fleet.play([0, 1])
    assert [payload.keys() for payload in fleet.payloads.values()] == [{"delta"}] * 2
    assert fleet.own == {}
    assert fleet.asks[0].shared.keys() == {"model"}


def test_serial_and_vmapped_agree_on_a_cnn(little_fleet: Callable[..., Any]) -> None:
    model = cnn(SHAPE, 4)
    executor = Checked(Serial(), Vmapped(2))
    few = [share[:9] for share in UNEVEN]
    fleet = little_fleet(fedntd(ingredients(model), tau=2.0), model.init(0), few, executor=executor)
    fleet.play([0, 1, 2, 3])
    assert all(leaf.isfinite().all() for leaf in fleet.model.values())
