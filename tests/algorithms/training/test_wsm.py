"""The re-weighted softmax as a criterion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.interface import Batch, Facts, Model
from fedemu.algorithms.methods.fedavg import FedAvg, fedavg, fedprox
from fedemu.algorithms.methods.fedntd import fedntd
from fedemu.algorithms.models.feed_forward import cnn, mlp
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.losses import reweighted_cross_entropy
from fedemu.algorithms.training.objective import Criterion, cross_entropy
from fedemu.algorithms.training.wsm import reweighted_softmax
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped

SHAPE = (1, 12, 12)
MLP = mlp(SHAPE, 4, (8,))
EVEN = [np.arange(0, 40)]
TWO_CLASSES = [np.concatenate([np.arange(1, 40, 4), np.arange(2, 24, 4)])]
ONE_CLASS = [np.arange(3, 40, 4)]


def ingredients(criterion: Criterion = reweighted_softmax, model: Model = MLP) -> Ingredients:
    return Ingredients(model, criterion, classes=4, epochs=2, batch_size=8, lr=0.05)


def test_classes_weigh_by_the_counts_of_the_devices_own_data() -> None:
    torch.manual_seed(0)
    logits, zero = torch.randn(4, 3), torch.tensor(0)
    batch = Batch(logits, torch.tensor([0, 2, 0, 2]), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    facts = Facts(zero, zero, torch.tensor(0.1), zero, zero, torch.tensor(True), torch.tensor([30, 0, 10]))
    expected = reweighted_cross_entropy(logits[:3], batch.y[:3], torch.tensor([0.75, 0.0, 0.25]))
    torch.testing.assert_close(reweighted_softmax(logits, batch, facts), expected)
    assert reweighted_softmax(logits, batch, facts).dtype == logits.dtype


def test_a_device_with_all_classes_evenly_trains_by_cross_entropy(little_fleet: Callable[..., Any]) -> None:
    plain, reweighted = (
        little_fleet(fedavg(ingredients(criterion)), MLP.init(0), EVEN)
        for criterion in (cross_entropy, reweighted_softmax)
    )
    plain.play([0])
    reweighted.play([0])
    for name, leaf in plain.model.items():
        torch.testing.assert_close(reweighted.model[name], leaf)


def test_the_rows_of_absent_classes_are_left_alone(little_fleet: Callable[..., Any]) -> None:
    variables = MLP.init(0)
    fleet = little_fleet(fedavg(ingredients()), variables, TWO_CLASSES)
    fleet.play([0])
    for name in ("fc2.weight", "fc2.bias"):
        moved = (fleet.model[name] - variables[name]).abs().reshape(4, -1).sum(1) > 0
        assert moved.tolist() == [False, True, True, False]


def test_a_device_with_one_class_has_nothing_to_tell_apart(little_fleet: Callable[..., Any]) -> None:
    variables = MLP.init(0)
    fleet = little_fleet(fedavg(ingredients()), variables, ONE_CLASS)
    fleet.play([0])
    assert fleet.results[0].metrics["loss"] == 0.0
    assert all(torch.equal(fleet.model[name], leaf) for name, leaf in variables.items())


@pytest.mark.parametrize("method", [fedprox, fedntd])
def test_the_loss_goes_with_the_terms_of_other_methods(
    little_fleet: Callable[..., Any], method: Callable[..., FedAvg]
) -> None:
    models = []
    for algorithm in (method(ingredients(cross_entropy)), method(ingredients()), fedavg(ingredients())):
        fleet = little_fleet(algorithm, MLP.init(0), TWO_CLASSES)
        fleet.play([0])
        models.append(fleet.model)
    for other in (models[0], models[2]):
        assert any((other[name] - leaf).abs().max() > 1e-5 for name, leaf in models[1].items())


def test_serial_and_vmapped_agree_on_a_cnn(little_fleet: Callable[..., Any]) -> None:
    model = cnn(SHAPE, 4)
    shares = [EVEN[0][:10], TWO_CLASSES[0], ONE_CLASS[0], np.arange(0)]
    executor = Checked(Serial(), Vmapped(2))
    fleet = little_fleet(fedavg(ingredients(model=model)), model.init(0), shares, executor=executor)
    fleet.play([0, 1, 2, 3])
    assert all(leaf.isfinite().all() for leaf in fleet.model.values())
