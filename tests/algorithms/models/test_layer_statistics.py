"""Statistics of a model's layers, of one batch and running ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedemu.algorithms.models.feed_forward import cnn, mlp
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.models.gru import gru
from fedemu.algorithms.models.layer_statistics import observed, running_statistics, watched
from fedemu.algorithms.models.resnet import resnet18
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.protocol.errors import ConfigurationError

SHAPE = (1, 8, 8)


def images(count: int) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(count))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def test_hidden_layers_tell_mean_and_biased_variance_before_their_relu() -> None:
    model = mlp(SHAPE, 3, (2,))
    variables, x = model.init(0), images(5)
    hidden = x.flatten(1) @ variables["fc1.weight"].t() + variables["fc1.bias"]
    statistics = observed(model).apply(variables, x, False)[0].statistics
    assert statistics.keys() == {"fc1.mean", "fc1.var"}
    torch.testing.assert_close(statistics["fc1.mean"], hidden.mean(0))
    torch.testing.assert_close(statistics["fc1.var"], hidden.var(0, correction=0))
    assert not model.apply(variables, x, False)[0].statistics


def test_convolutions_tell_them_by_channel() -> None:
    model = observed(cnn(SHAPE, 3))
    statistics = model.apply(model.init(0), images(2), True)[0].statistics
    assert {name: len(leaf) for name, leaf in statistics.items() if name.endswith("mean")} == {
        "conv1.mean": 32,
        "conv2.mean": 64,
        "fc1.mean": 512,
    }


def test_a_module_tells_what_its_batch_normalisation_is_given() -> None:
    model = from_module(normalised)
    variables, x = model.init(0), images(5)
    given = x.flatten(1) @ variables["1.weight"].t() + variables["1.bias"]
    for train in (False, True):
        outputs, buffers = observed(model).apply(variables, x, train)
        torch.testing.assert_close(outputs.statistics["2.mean"], given.mean(0))
        torch.testing.assert_close(outputs.statistics["2.var"], given.var(0, correction=0))
        assert torch.equal(outputs.logits, model.apply(variables, x, train)[0].logits)
        assert buffers.keys() == model.buffers


def test_a_watched_layer_moves_a_tenth_towards_each_batch_in_training_and_not_in_evaluation() -> None:
    model = watched(mlp(SHAPE, 3, (2,)), SHAPE)
    variables, x = model.init(0), images(5)
    outputs, buffers = model.apply(variables, x, True)
    assert model.buffers == {"watched.fc1.mean", "watched.fc1.var"}
    torch.testing.assert_close(buffers["watched.fc1.mean"], 0.1 * outputs.statistics["fc1.mean"])
    torch.testing.assert_close(buffers["watched.fc1.var"], 0.9 + 0.1 * outputs.statistics["fc1.var"])
    _, still = model.apply(variables, x, False)
    assert all(torch.equal(leaf, variables[name]) for name, leaf in still.items())


def test_a_batch_of_one_sample_changes_no_running_statistics_also_if_padding_repeats_it() -> None:
    model = watched(mlp(SHAPE, 3, (2,)), SHAPE)
    variables, x = model.init(0), images(2)
    for batch in (x[:1], x[:1].expand(5, *SHAPE)):
        _, buffers = model.apply(variables, batch, True)
        assert buffers.keys() == model.buffers
        assert all(torch.equal(leaf, variables[name]) for name, leaf in buffers.items())
    _, buffers = model.apply(variables, x, True)
    assert not any(torch.equal(leaf, variables[name]) for name, leaf in buffers.items())


def test_running_statistics_of_a_frozen_layer_in_half_precision_are_float32() -> None:
    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4)).bfloat16().requires_grad_(False)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.body(x.flatten(1).bfloat16()).float())
            return logits

    model = watched(from_module(Tuned), SHAPE)
    outputs, buffers = model.apply(model.init(0), images(5), True)
    newest = outputs.statistics["body.1.mean"]
    assert newest.dtype == torch.bfloat16
    torch.testing.assert_close(buffers["watched.body.1.mean"], 0.1 * newest.float())


def test_only_layers_without_running_statistics_are_watched() -> None:
    batch, group = (watched(resnet18(SHAPE, 3, norm, width=2), SHAPE) for norm in ("batch", "group"))
    assert not batch.added
    assert len(group.added) == 2 * 20
    names = {name: leaf.shape for name, leaf in running_statistics(batch.init(0)).items()}
    assert names == {name: leaf.shape for name, leaf in running_statistics(group.init(0)).items()}
    outputs, _ = group.apply(group.init(0), images(2), True)
    assert names == {name: leaf.shape for name, leaf in outputs.statistics.items()}


def test_a_growing_model_is_watched_like_the_one_within() -> None:
    model = watched(growing(mlp(SHAPE, 4, (2,)), ClassTasks.of(4, 2, range(4)), SHAPE), SHAPE)
    assert model.added == {"watched.fc1.mean", "watched.fc1.var"}
    assert model.init(0).keys() >= model.buffers


def test_models_without_statistics_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no layers that report any; give it hidden layers"):
        watched(mlp(SHAPE, 3, ()), SHAPE)
    with pytest.raises(ConfigurationError, match=r"reports none; .*algorithm\.options\.batch_statistics = 0"):
        watched(gru((2, 8), 12), (2, 8))
