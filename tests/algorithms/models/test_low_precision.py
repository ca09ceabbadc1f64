"""Models whose products of matrices are rounded to bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedemu.algorithms.interface import Tree
from fedemu.algorithms.methods.fedavg import FedAvg
from fedemu.algorithms.models.feed_forward import lenet, mlp
from fedemu.algorithms.models.growing import Growing, growing
from fedemu.algorithms.models.layer_statistics import observed
from fedemu.algorithms.models.layers import Linear
from fedemu.algorithms.models.low_precision import LowPrecision, with_precision
from fedemu.algorithms.models.resnet import resnet18
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.algorithms.trees import only, without
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped

SHAPE = (1, 8, 8)
X = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(1))


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


def test_inputs_and_results_of_a_product_are_rounded_and_outputs_are_float32() -> None:
    exact = from_module(lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3, bias=False)))
    model = with_precision(exact, "bfloat16")
    variables = model.init(0)
    outputs, _ = model.apply(variables, X, True)
    expected = rounded(X.flatten(1)).double() @ rounded(variables["1.weight"]).t().double()
    assert outputs.logits.dtype == torch.float32
    # The product itself is rounded once: by half of the last of 8 bits.
    assert torch.allclose(outputs.logits.double(), expected, rtol=2**-8, atol=0)
    assert torch.equal(outputs.logits, rounded(outputs.logits))
    assert not torch.equal(outputs.logits, exact.apply(variables, X, True)[0].logits)


def test_float32_is_the_model_itself_and_so_is_tf32_which_gpus_turn_on() -> None:
    model = mlp(SHAPE, 4, (6,))
    assert with_precision(model, "float32") is model
    assert with_precision(model, "tf32") is model


def test_gradients_and_variables_stay_float32_and_devices_can_be_stacked() -> None:
    model = with_precision(mlp(SHAPE, 4, (6,)), "bfloat16")

    def loss(variables: Tree, x: Tensor) -> Tensor:
        return model.apply(variables, x, True)[0].logits.log_softmax(-1)[:, 0].mean()

    variables = model.init(3)
    one = grad(loss)(variables, X)
    stack = {name: torch.stack([leaf, leaf]) for name, leaf in variables.items()}
    two = vmap(grad(loss))(stack, torch.stack([X, X]))
    for name, leaf in one.items():
        assert leaf.dtype == torch.float32
        assert torch.allclose(two[name][1], leaf, rtol=2**-6, atol=1e-3)


NORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "layers": lambda: torch.nn.LayerNorm(64),
    "batches": lambda: torch.nn.BatchNorm1d(64),
    "batches without variables": lambda: torch.nn.BatchNorm1d(64, affine=False, track_running_stats=False),
    "instances": lambda: torch.nn.Sequential(
        torch.nn.Unflatten(1, (4, 16)), torch.nn.InstanceNorm1d(4, affine=True), torch.nn.Flatten()
    ),
    "groups": lambda: torch.nn.GroupNorm(2, 64),
}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_normalisations_of_modules_can_be_stacked(norm: Callable[[], torch.nn.Module], half: bool) -> None:
    """By rounded products between variables of float32, and in a module whose variables are of half precision."""

    class Normalised(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = torch.nn.Linear(64, 64), norm(), torch.nn.Linear(64, 4)
            if half:
                self.bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.norm(self.first(x.flatten(1).bfloat16() if half else x.flatten(1)))
            logits: Tensor = self.last(hidden.tanh())
            return logits

    model = with_precision(from_module(Normalised), "float32" if half else "bfloat16")

    def loss(trained: Tree, buffers: Tree, x: Tensor) -> Tensor:
        return model.apply({**trained, **buffers}, x, True)[0].logits.float().log_softmax(-1)[:, 0].mean()

    variables = model.init(3)
    trained, buffers = without(variables, model.buffers), only(variables, model.buffers)
    one = grad(loss)(trained, buffers, X)
    stack = [{name: torch.stack([leaf, leaf]) for name, leaf in tree.items()} for tree in (trained, buffers)]
    two = vmap(grad(loss))(*stack, torch.stack([X + 1, X]))
    largest = max(float(leaf.abs().max()) for leaf in one.values())
    for name, leaf in one.items():
        assert two[name].dtype == leaf.dtype
        torch.testing.assert_close(two[name][1].float(), leaf.float(), rtol=2**-6, atol=2**-6 * largest)


@pytest.mark.parametrize("executor", [Serial(), Vmapped(2)])
def test_batch_normalisation_keeps_running_statistics_in_float32(
    executor: Any, little_fleet: Callable[..., Any]
) -> None:
    whole = resnet18((1, 12, 12), 4, norm="batch", width=4)
    exact = replace(whole, blocks=whole.blocks[:3], head=Linear("head", 8, 4))
    fleets = []
    for model in (with_precision(exact, "bfloat16"), exact):
        method = FedAvg(Ingredients(model, cross_entropy, 4, 1, 8, 0.01, input_shape=(1, 12, 12)))
        fleet = little_fleet(method, exact.init(0), [np.arange(16), np.arange(20, 44)], executor=executor)
        fleet.play([0, 1])
        fleets.append(fleet.model)
    low, high = fleets
    for name in sorted(exact.buffers):
        assert low[name].dtype == torch.float32
        torch.testing.assert_close(low[name], high[name], rtol=0.1, atol=0.05)
    assert not torch.equal(low["stem.norm.running_mean"], high["stem.norm.running_mean"])


def test_a_growing_model_stays_one_with_an_exact_classifier() -> None:
    exact = growing(mlp(SHAPE, 4, (6,)), ClassTasks.of(4, 2, [2, 0, 3, 1]), SHAPE)
    model = with_precision(exact, "bfloat16")
    assert isinstance(model, Growing)
    assert isinstance(model.model, LowPrecision)
    variables, features = model.init(0), torch.randn(2, 6)
    assert torch.equal(model.classify(variables, features), exact.classify(variables, features))


@pytest.mark.parametrize("build", [lambda: mlp(SHAPE, 4, (6,)), lambda: lenet((1, 28, 28), 10)])
def test_statistics_of_layers_are_float32_and_close_to_the_exact_ones(build) -> None:
    exact = build()
    model = observed(with_precision(exact, "bfloat16"))
    variables = model.init(0)
    x = torch.randn(16, *((1, 28, 28) if "conv1.weight" in variables else SHAPE))
    low, high = (each.apply(variables, x, False)[0].statistics for each in (model, observed(exact)))
    assert low
    assert low.keys() == high.keys()
    for name, leaf in low.items():
        assert leaf.dtype == torch.float32
        assert torch.allclose(leaf, high[name], rtol=0.05, atol=0.02)
