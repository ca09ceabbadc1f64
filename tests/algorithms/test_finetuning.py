from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedemu.algorithms.distillation import predict
from fedemu.algorithms.fedavg import fedavg
from fedemu.algorithms.ingredients import Ingredients
from fedemu.algorithms.models import mlp
from fedemu.algorithms.objective import cross_entropy
from fedemu.algorithms.public import PublicData
from fedemu.algorithms.registry import build_algorithm
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


def test_without_epochs_at_the_server_it_is_fedavg(little_fleet: Callable[..., Any], public: PublicData) -> None:
    method = build_algorithm("fedavg_finetuned", {"server_epochs": 0}, ingredients())
    fleet = little_fleet(method, MODEL.init(0), SHARES, public=public)
    plain = little_fleet(fedavg(ingredients()), MODEL.init(0), SHARES)
    for _ in range(2):
        fleet.play([0, 1])
        plain.play([0, 1])
    assert model_digest(fleet.model) == model_digest(plain.model)


def test_it_is_refused_without_public_data() -> None:
    with pytest.raises(ConfigurationError, match="'fedavg_finetuned' needs public data"):
        build_algorithm("fedavg_finetuned", {}, ingredients(public=False))
