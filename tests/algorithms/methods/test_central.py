"""Central training on the public data alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedemu.algorithms.interface import Labelled, PublicData
from fedemu.algorithms.methods.central import Central, central
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.algorithms.training.server_training import predict
from fedemu.algorithms.trees import model_digest
from fedemu.protocol.errors import ConfigurationError

MODEL = mlp((1, 12, 12), 4, (8,))


def method(public: bool = True) -> Central:
    return central(Ingredients(MODEL, cross_entropy, 4, 1, 5, 0.05, devices=2, public=public), server_epochs=3)


def test_no_device_is_asked_and_the_model_learns_from_round_to_round(
    little_fleet: Callable[..., Any], public: PublicData
) -> None:
    fleet = little_fleet(method(), MODEL.init(0), [np.arange(8)], public=public)
    right = []
    for _ in range(4):
        answers = predict(MODEL, fleet.model, public.validation.x).argmax(-1)
        right.append(int((answers == public.validation.y).sum()))
        fleet.play([0])
    assert fleet.jobs == ["central training"] * 4
    assert fleet.asks == []
    assert right[-1] > right[0] + 10


def test_a_round_goes_on_where_the_last_one_ended_also_if_nothing_got_better(
    little_fleet: Callable[..., Any], public: PublicData
) -> None:
    """With one sample to judge by, most rounds bring no better accuracy."""
    few = PublicData(public.train, Labelled(public.validation.x[:1], public.validation.y[:1]))
    fleet = little_fleet(method(), MODEL.init(0), [np.arange(8)], public=few)
    digests = []
    for _ in range(3):
        fleet.play([0])
        digests.append(model_digest(fleet.model))
    assert len({*digests}) == 3


def test_the_devices_data_change_nothing(little_fleet: Callable[..., Any], public: PublicData) -> None:
    digests = set()
    for share in (np.arange(8), np.arange(60, 90)):
        fleet = little_fleet(method(), MODEL.init(0), [share], public=public)
        fleet.play([0])
        digests.add(model_digest(fleet.model))
    assert len(digests) == 1


def test_public_data_are_needed() -> None:
    with pytest.raises(ConfigurationError, match="'central' needs public data"):
        method(public=False)
