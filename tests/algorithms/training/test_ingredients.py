"""What a method is built from, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedemu.algorithms.interface import Model
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import Head, growing
from fedemu.algorithms.models.layer_statistics import watched
from fedemu.algorithms.models.resnet import resnet18
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.registry import build_algorithm
from fedemu.algorithms.replay.replay import with_replay
from fedemu.algorithms.replay.settings import ReplaySettings
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.protocol.errors import ConfigurationError

SHAPE = (1, 8, 8)


def ingredients(model: Model, batch_size: int) -> Ingredients:
    return Ingredients(model, cross_entropy, 3, 1, batch_size, 0.1, input_shape=SHAPE)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


@pytest.mark.parametrize("model", [resnet18(SHAPE, 3, norm="batch", width=2), from_module(normalised)])
def test_batches_of_one_sample_are_refused_if_the_model_normalises_by_batches(model: Model) -> None:
    with pytest.raises(ConfigurationError, match=r"batch normalisation can't work with local\.batch_size = 1"):
        ingredients(model, 1).local_sgd()
    assert ingredients(model, 2).local_sgd().batch_size == 2


def test_batches_of_one_sample_are_refused_if_the_model_keeps_statistics_of_its_layers() -> None:
    model = watched(mlp(SHAPE, 3), SHAPE)
    with pytest.raises(ConfigurationError, match=r"^the statistics of a model's layers can't be taken with"):
        ingredients(model, 1).local_sgd()
    assert ingredients(model, 2).local_sgd().batch_size == 2


@pytest.mark.parametrize("model", [resnet18(SHAPE, 3, norm="group", width=2), mlp(SHAPE, 3)])
def test_batches_of_one_sample_are_accepted_by_other_models(model: Model) -> None:
    assert ingredients(model, 1).local_sgd().batch_size == 1


def test_the_learning_rate_begins_anew_with_each_task_if_the_rounds_of_tasks_are_given() -> None:
    plain = replace(ingredients(mlp(SHAPE, 3), 2), lr_decay=0.5)
    assert plain.local_sgd().learning_rate(4, 1) == 0.0125
    assert replace(plain, rounds_per_task=3).local_sgd().learning_rate(4, 1) == 0.1


class Words(nn.Module):
    """Labels of texts: the mean of a table's rows, and a linear layer. Fractions are no tokens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(9, 5), nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.top(self.table(tokens).mean(1))
        return logits


@pytest.mark.parametrize(("name", "program"), [("moon", "train"), ("ncm", "sums"), ("afl", "sums")])
def test_methods_with_features_take_models_of_tokens(name: str, program: str) -> None:
    given = Ingredients(from_module(Words), cross_entropy, 3, 1, 4, 0.1, input_shape=(6,), tokens=True)
    assert program in build_algorithm(name, {}, given).programs
    assert given.feature_width() == 5


@pytest.mark.parametrize("strategy", ["herding", "fedcbdr"])
def test_replay_by_features_takes_models_of_tokens(strategy: str) -> None:
    given = Ingredients(from_module(Words), cross_entropy, 3, 1, 4, 0.1, input_shape=(6,), tokens=True)
    replayed = with_replay(build_algorithm("fedavg", {}, given), ReplaySettings(strategy, 2, 3), given)
    assert "select" in replayed.programs


def test_the_classifier_of_a_model_of_tokens_grows() -> None:
    model = growing(from_module(Words), ClassTasks.of(3, 2, [2, 0, 1]), (6,), tokens=True)
    assert model.head == Head("top.weight", "top.bias")
    tokens = torch.tensor([[0, 8, 3, 3, 0, 0]])
    assert model.apply(model.init(0), tokens, False)[0].logits.argmax().item() in (2, 0)


@pytest.mark.parametrize(
    ("name", "option"),
    [("fedkd", "tau"), ("feddf", "temperature"), ("flashback", "temperature")],
)
def test_temperatures_at_which_classes_of_later_tasks_would_be_noticed_are_refused(name: str, option: str) -> None:
    plain = mlp((1, 4, 4), 4, (6,))
    grown = growing(plain, ClassTasks.of(4, 2, [0, 1, 2, 3]), (1, 4, 4))
    fields = {"criterion": cross_entropy, "classes": 4, "epochs": 1, "batch_size": 4, "lr": 0.1, "public": True}
    for model, temperature in ((grown, 3.0), (plain, 3.5)):
        build_algorithm(name, {option: temperature}, Ingredients(model, input_shape=(1, 4, 4), **fields))
    with pytest.raises(ConfigurationError, match=rf"{name}.* algorithm.options.{option} = 3.5; set it to 3 or less"):
        build_algorithm(name, {option: 3.5}, Ingredients(grown, input_shape=(1, 4, 4), **fields))
