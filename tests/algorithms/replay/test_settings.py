"""Settings and methods that replay refuses before a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedemu.algorithms.methods.fedavg import fedavg
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.gru import gru
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.replay.replay import with_replay
from fedemu.algorithms.replay.settings import ReplaySettings
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.protocol.errors import ConfigurationError


def ingredients(**fields: Any) -> Ingredients:
    shape = (1, 12, 12)
    return replace(Ingredients(mlp(shape, 4, (6,)), cross_entropy, 4, 1, 4, 0.05, input_shape=shape), **fields)


@pytest.mark.parametrize("strategy", ["class_balanced", "herding", "fedcbdr"])
def test_strategies_by_class_are_refused_without_labels(strategy: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^replay.strategy = '{strategy}' needs labels, [^.]+$"):
        with_replay(fedavg(ingredients()), ReplaySettings(strategy), ingredients(labelled=False))


def test_herding_is_refused_without_features() -> None:
    model = from_module(lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 4), torch.nn.Tanh()))
    with pytest.raises(ConfigurationError, match=r"^the strategy 'herding' needs a model with features"):
        with_replay(fedavg(ingredients()), ReplaySettings("herding"), ingredients(model=model))


def test_herding_is_refused_for_texts() -> None:
    texts = ingredients(model=gru((2, 8), 20), input_shape=(2, 8))
    with pytest.raises(ConfigurationError, match=r"^the strategy 'herding' needs .*; choose another strategy$"):
        with_replay(fedavg(texts), ReplaySettings("herding"), texts)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("strategy", "best"),
        ("targets", "none"),
        ("final", "top"),
        ("budget", -1),
        ("capacity", -1),
        ("restarts", -1),
        ("iterations", -1),
        ("memory", 0),
        ("periods", 0),
        ("proportion", 1.0),
    ],
)
def test_options_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{field} is {value!r}"):
        ReplaySettings(**{"strategy": "coordinated", field: value})


def test_a_method_whose_program_has_replays_name_is_refused() -> None:
    class Own:
        programs: Mapping[str, Any] = {"select": None}

    inner: Any = Own()
    with pytest.raises(ConfigurationError, match="has a program 'select', but replay has a program of that name"):
        with_replay(inner, ReplaySettings("reservoir"), ingredients())
