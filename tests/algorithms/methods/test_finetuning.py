"""FedAvg with fine-tuning on the public data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedemu.algorithms.interface import Labelled, PublicData
from fedemu.algorithms.methods.fedavg import fedavg
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.registry import build_algorithm
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.algorithms.training.server_training import predict
from fedemu.algorithms.trees import model_digest
from fedemu.protocol.errors import ConfigurationError

MODEL = mlp((1, 12, 12), 4, (8,))
SHARES = [np.arange(0, 80, 4), np.arange(1, 80, 4)]


def ingredients(public: bool = True) -> Ingredients:
    return Ingredients(MODEL, cross_entropy, 4, epochs=1, batch_size=5, lr=0.05, devices=2, public=public)


def test_the_average_is_tuned_on_the_public_labels(little_fleet: Callable[..., Any], public: PublicData) -> None:
    fleet = little_fleet(build_algorithm("fedavg_finetuned", {}, ingredients()), MODEL.init(0), SHARES, public=public)
    plain = little_fleet(fedavg(ingredients()), MODEL.init(0), SHARES)
    fleet.play([0, 1])
    plain.play([0, 1])
    assert fleet.jobs == ["fine-tuning"]

    def right(model: Any) -> int:
        answers = predict(MODEL, model, public.validation.x).argmax(-1)
        return int((answers == public.validation.y).sum())

    assert right(fleet.model) > right(plain.model)


def test_without_server_epochs_the_method_is_fedavg(little_fleet: Callable[..., Any], public: PublicData) -> None:
    method = build_algorithm("fedavg_finetuned", {"server_epochs": 0}, ingredients())
    fleet = little_fleet(method, MODEL.init(0), SHARES, public=public)
    plain = little_fleet(fedavg(ingredients()), MODEL.init(0), SHARES)
    for _ in range(2):
        fleet.play([0, 1])
        plain.play([0, 1])
    assert model_digest(fleet.model) == model_digest(plain.model)


def test_the_method_is_refused_without_public_data() -> None:
    with pytest.raises(ConfigurationError, match="'fedavg_finetuned' needs public data"):
        build_algorithm("fedavg_finetuned", {}, ingredients(public=False))


def test_public_labels_of_classes_that_have_yet_to_come_are_not_read(
    little_fleet: Callable[..., Any], public: PublicData
) -> None:
    model = growing(MODEL, ClassTasks.of(4, 2, [2, 0, 3, 1]), (1, 12, 12))
    made = replace(ingredients(), model=model)
    # Labels go 0, 1, 2, 3, 0, ...: the first task brings the even ones.
    stream = [[np.arange(first, 80, 2)] for first in (0, 1)]

    def after(rounds: int, method: str, labels: slice) -> str:
        parts = (Labelled(part.x[labels], part.y[labels]) for part in (public.train, public.validation))
        fleet = little_fleet(
            build_algorithm(method, {}, made), model.init(0), [], stream=stream, public=PublicData(*parts)
        )
        for _ in range(rounds):
            fleet.play([0])
        return model_digest(fleet.model)

    everything, even, odd = slice(None), slice(0, None, 2), slice(1, None, 2)
    assert after(1, "fedavg_finetuned", everything) == after(1, "fedavg_finetuned", even)
    assert after(1, "fedavg_finetuned", odd) == after(1, "fedavg", odd)
    assert after(2, "fedavg_finetuned", everything) != after(2, "fedavg_finetuned", even)
