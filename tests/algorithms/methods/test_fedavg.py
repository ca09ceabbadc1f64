"""FedAvg and FedProx."""

from __future__ import annotations

import pytest
import torch

from fedemu.algorithms.interface import Ask, Context, DeviceReply, Reply, weighted_mean
from fedemu.algorithms.methods.fedavg import FedAvg, FedAvgState
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.objective import Objective
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
