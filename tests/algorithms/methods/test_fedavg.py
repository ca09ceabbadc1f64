"""FedAvg and FedProx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedemu.algorithms.interface import Ask, Context, DeviceReply, Reply, weighted_mean
from fedemu.algorithms.methods.fedavg import FedAvg, FedAvgState, fedprox
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.objective import Objective, cross_entropy
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.ids import DeviceId

CONTEXT = Context(round=1, task=0, seed=1, classes=3)


@pytest.fixture
def method() -> FedAvg:
    model = mlp((4,), 3, (2,))
    return FedAvg(LocalSGD(model, Objective(model), epochs=1, batch_size=2, lr=0.1))


def test_a_round_asks_once_and_moves_by_the_mean(method: FedAvg) -> None:
    state = method.init({"w": torch.tensor([1.0, 2.0])}, CONTEXT)
    script = method.round(state, CONTEXT)
    ask = next(script)
    assert ask == Ask("train", shared={"model": state.variables}, reduce={"delta": weighted_mean})
    reply = Reply({"delta": {"w": torch.tensor([0.5, -1.0])}}, (DeviceReply(DeviceId(3), 10, 5, {}, None),))
    with pytest.raises(StopIteration) as end:
        script.send(reply)
    after: FedAvgState = end.value.value
    assert after.variables["w"].tolist() == [1.5, 1.0]
    assert state.variables["w"].tolist() == [1.0, 2.0]


def test_the_global_model_is_the_state(method: FedAvg) -> None:
    variables = {"w": torch.tensor([1.0])}
    assert method.variables(method.init(variables, CONTEXT)) is variables
    assert set(method.programs) == {"train"}


@pytest.mark.parametrize("distance", ["squared", "tensors"])
def test_fedprox_holds_local_models_near_the_global_one(little_fleet: Callable[..., Any], distance: Any) -> None:
    """Both executors take the same steps, and the first step, which begins at the global model, has no pull."""
    model = mlp((1, 12, 12), 4, (6,))
    shares = [np.arange(20), np.arange(20, 35)]

    def moved(mu: float, epochs: int, batch_size: int) -> dict[str, torch.Tensor]:
        ingredients = Ingredients(model, cross_entropy, 4, epochs, batch_size, 0.05)
        executor = Checked(Serial(), Vmapped(2))
        fleet = little_fleet(fedprox(ingredients, mu, distance), model.init(0), shares, executor=executor)
        fleet.play([0, 1])
        return {name: leaf - model.init(0)[name] for name, leaf in fleet.model.items()}

    def length(way: dict[str, torch.Tensor]) -> float:
        return float(sum(leaf.square().sum() for leaf in way.values()))

    free, held = moved(0.0, 3, 5), moved(2.0, 3, 5)
    assert 0 < length(held) < 0.9 * length(free)
    for name, leaf in moved(0.0, 1, 20).items():
        torch.testing.assert_close(moved(2.0, 1, 20)[name], leaf)


class Switched(nn.Module):
    """A linear layer with a switch, which training turns off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(144, 4)
        self.new: Tensor
        self.register_buffer("new", torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.new = torch.zeros_like(self.new)
        logits: Tensor = self.layer(x.flatten(1))
        return logits


def test_a_truth_value_that_all_devices_turn_off_is_off(little_fleet: Callable[..., Any]) -> None:
    model = from_module(Switched)
    method = FedAvg(Ingredients(model, cross_entropy, 4, 1, 10, 0.1, input_shape=(1, 12, 12)))
    fleet = little_fleet(method, model.init(0), [np.arange(20), np.arange(20, 60)])
    for _ in range(2):
        fleet.play([0, 1])
        assert not fleet.model["new"]


class OwnPrograms(FedAvg):
    """Somebody's own method, which does not call the constructor of FedAvg."""

    def __init__(self, local: LocalSGD) -> None:
        self.programs = {"train": local}


def test_a_method_with_a_constructor_of_its_own_averages_by_examples(method: FedAvg) -> None:
    program = method.programs["train"]
    assert isinstance(program, LocalSGD)
    assert next(OwnPrograms(program).round(FedAvgState({}), CONTEXT)) == next(method.round(FedAvgState({}), CONTEXT))
