"""Replay buffers beside the methods for class-incremental streams, whose devices are sent more than the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.registry import build_algorithm
from fedemu.algorithms.replay.replay import with_replay
from fedemu.algorithms.replay.settings import ReplaySettings
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")

SHAPE = (1, 8, 8)
SHORT: dict[str, dict[str, Any]] = {
    "mfcl": {"iterations": 2, "generator_batch": 4, "noise": 6, "synthetic_batch": 3},
    "fedlwf_2t": {},
    "target": {
        "synthesis_rounds": 2,
        "warm_up": 0,
        "synthesis_steps": 1,
        "generator_batch": 4,
        "noise": 6,
        "synthetic_batch": 3,
        "student_steps": 1,
        "student_batch": 4,
    },
    "fedcil": {"noise": 6, "server_iterations": 2, "server_samples": 4},
}
# Labels go 0, 1, 2, 3, 0, ...: the first task brings 2 and 0, the second 3 and 1.
STREAM = [[np.arange(start + task, start + 24, 2) for start in (0, 40, 80)] for task in (0, 1)]


class Normalised(nn.Module):
    """A network that refuses variables that it does not have, as a user might write one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.top = nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.norm(self.body(x.flatten(1))).relu()
        return self.top(features), features


MODEL = growing(from_module(Normalised), ClassTasks.of(4, 2, [2, 0, 3, 1]), SHAPE)
INGREDIENTS = Ingredients(MODEL, cross_entropy, 4, 1, 5, 0.05, devices=3, input_shape=SHAPE)


@pytest.mark.parametrize("strategy", ["herding", "coordinated"])
@pytest.mark.parametrize("name", SHORT)
def test_a_device_that_comes_back_selects_with_the_model_that_it_is_sent(
    name: str, strategy: str, little_fleet: Callable[..., Any], corpus: Corpus
) -> None:
    method = build_algorithm(name, SHORT[name], INGREDIENTS)
    settings = ReplaySettings(strategy, budget=4, iterations=1, periods=2)
    fleet = little_fleet(with_replay(method, settings, INGREDIENTS), MODEL.init(0), [], stream=STREAM, budget=4)
    split = replace(corpus.train, x=np.ascontiguousarray(corpus.train.x[:, :, 2:10, 2:10]))
    fleet.corpus = replace(corpus, train=split, input_shape=SHAPE)
    # Device 2 is away when the first task ends.
    fleet.play([0, 1, 2], online=[[0, 1]] * 2)
    assert {device: len(buffer) for device, buffer in fleet.buffers.items()} == {0: 4, 1: 4, 2: 0}
    fleet.play([0, 2])
    kept = fleet.buffers[2]
    assert len(kept) == 4
    assert {*kept.indices} <= {*STREAM[0][2]}
    assert kept.period == 1
    assert fleet.results[2].examples == 4 + len(STREAM[1][2])
    assert all(bool(torch.isfinite(leaf).all()) for leaf in fleet.model.values())
