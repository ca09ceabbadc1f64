"""MOON: the contrastive term, and the previous model that a device keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedemu.algorithms.interface import Batch, Facts, Model, Outputs, Tree
from fedemu.algorithms.methods.fedavg import fedavg
from fedemu.algorithms.methods.moon import contrast, moon
from fedemu.algorithms.models.feed_forward import cnn, mlp
from fedemu.algorithms.models.low_precision import Precision, with_precision
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.losses import model_contrastive
from fedemu.algorithms.training.objective import Pass, cross_entropy
from fedemu.algorithms.trees import add
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.errors import ConfigurationError

SHAPE = (1, 12, 12)
MLP = mlp(SHAPE, 4, (8,))
UNEVEN = [np.arange(0, 40, 4), np.arange(1, 70, 2), np.arange(0, 3), np.arange(0)]


def ingredients(model: Model = MLP, **settings: Any) -> Ingredients:
    defaults: dict[str, Any] = {"classes": 4, "epochs": 2, "batch_size": 8, "lr": 0.05, "input_shape": SHAPE}
    return Ingredients(model, cross_entropy, **{**defaults, **settings})


def facts(first_visit: bool) -> Facts:
    zero = torch.tensor(0)
    return Facts(zero, zero, torch.tensor(0.1), zero, zero, torch.tensor(first_visit), torch.ones(3))


def same(left: Tree, right: Tree) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class Shifted:
    """A model with the features ``x + w``, larger by 1 in training."""

    kind = "dense"
    buffers: frozenset[str] = frozenset()

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        features = x + variables["w"] + (1 if train else 0)
        return Outputs(features.sum(1, keepdim=True), features, {}), {}


def passed(first_visit: bool) -> tuple[Any, Pass]:
    model: Any = Shifted()
    x = torch.tensor([[1.0, 2.0], [0.0, -3.0], [5.0, 5.0]])
    batch = Batch(x, torch.zeros(3, dtype=torch.int64), torch.tensor([1.0, 1.0, 0.0]))
    variables, sent, own = ({"w": torch.tensor(leaf)} for leaf in ([1.0, 0.0], [0.0, 1.0], [-2.0, 0.5]))
    if first_visit:
        own = {"w": torch.zeros(2)}
    outputs = model.apply(variables, x, True)[0]
    return model, Pass(variables, outputs, batch, {"model": sent}, own, facts(first_visit))


def test_features_are_compared_with_those_of_the_sent_and_the_kept_model_in_evaluation_mode() -> None:
    model, at = passed(first_visit=False)
    sent, kept = at.batch.x + at.shared["model"]["w"], at.batch.x + at.own["w"]
    expected = model_contrastive(at.outputs.features, sent, kept, 0.5, at.batch.weight)
    torch.testing.assert_close(contrast(0.3, 0.5)(model, at), 0.3 * expected)


def test_on_a_first_visit_the_previous_model_is_the_sent_one() -> None:
    model, at = passed(first_visit=True)
    assert float(contrast(0.3, 0.5)(model, at)) == pytest.approx(0.3 * math.log(2))


def test_without_contrast_moon_is_fedavg_to_the_bit(little_fleet: Callable[..., Any]) -> None:
    plain, contrasted = (
        little_fleet(algorithm, MLP.init(0), UNEVEN)
        for algorithm in (fedavg(ingredients()), moon(ingredients(), mu=0.0))
    )
    for _ in range(3):
        plain.play([0, 1, 2])
        contrasted.play([0, 1, 2])
    assert same(plain.model, contrasted.model)


def test_a_first_visit_is_fedavgs_and_a_second_is_not(little_fleet: Callable[..., Any]) -> None:
    plain, contrasted = (
        little_fleet(algorithm, MLP.init(0), UNEVEN)
        for algorithm in (fedavg(ingredients()), moon(ingredients(), mu=5.0))
    )
    plain.play([0, 1])
    contrasted.play([0, 1])
    for name, leaf in plain.model.items():
        torch.testing.assert_close(contrasted.model[name], leaf)
    plain.play([0, 1])
    contrasted.play([0, 1])
    assert any((contrasted.model[name] - leaf).abs().max() > 1e-3 for name, leaf in plain.model.items())


def test_a_device_keeps_its_local_model_and_sends_the_delta_only(little_fleet: Callable[..., Any]) -> None:
    fleet = little_fleet(moon(ingredients()), MLP.init(0), UNEVEN)
    for _ in range(2):
        sent = fleet.model
        fleet.play([0, 1])
        for device in (0, 1):
            assert fleet.payloads[device].keys() == {"delta"}
            for name, leaf in add(sent, fleet.payloads[device]["delta"]).items():
                torch.testing.assert_close(fleet.own[device][name], leaf)


def test_after_a_lost_result_the_previous_model_is_still_the_older_one(little_fleet: Callable[..., Any]) -> None:
    fleet = little_fleet(moon(ingredients()), MLP.init(0), UNEVEN)
    fleet.play([0, 1])
    kept = {name: leaf.clone() for name, leaf in fleet.own[0].items()}
    fleet.play([0, 1], lost=[0])
    assert same(fleet.own[0], kept)
    fleet.play([0, 1])
    assert not same(fleet.own[0], kept)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The gradient of a bias before the normalisation is only a rounding error, which differs between executors.
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(144, 6, bias=False), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x).relu()
        return self.head(features), features


def test_running_statistics_belong_to_the_kept_model(little_fleet: Callable[..., Any]) -> None:
    model = from_module(Normalised)
    fleet = little_fleet(moon(ingredients(model)), model.init(0), UNEVEN, executor=Checked(Serial(), Vmapped(2)))
    fleet.play([0, 1])
    fleet.play([0, 1])
    assert fleet.own[0].keys() == model.init(0).keys()
    assert fleet.own[0]["body.2.running_mean"].abs().sum() > 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_model_without_features_is_refused(precision: Precision) -> None:
    model = from_module(lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 4), nn.Tanh()))
    with pytest.raises(ConfigurationError, match="the method 'moon' needs a model with features"):
        moon(ingredients(with_precision(model, precision)))


@pytest.mark.parametrize("model", [mlp(SHAPE, 4, (8,), 5), cnn(SHAPE, 4)], ids=["projection", "cnn"])
def test_serial_and_vmapped_agree(little_fleet: Callable[..., Any], model: Model) -> None:
    few = [share[:9] for share in UNEVEN]
    fleet = little_fleet(moon(ingredients(model)), model.init(0), few, executor=Checked(Serial(), Vmapped(2)))
    fleet.play([0, 1, 3])
    fleet.play([0, 1, 2])
    assert all(leaf.isfinite().all() for leaf in fleet.model.values())
