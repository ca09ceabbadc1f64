"""FedCBDR's exchange: what leaves a device, balanced classes over the fleet, and devices that come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.interface import Batch, Memory
from fedemu.algorithms.methods.fedavg import fedavg
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.replay.balance import BalancedSelect
from fedemu.algorithms.replay.exchange import EACH, marked
from fedemu.algorithms.replay.queries import Census
from fedemu.algorithms.replay.replay import with_replay
from fedemu.algorithms.replay.selection.leverage import keys_of_a_draw, leverage_scores
from fedemu.algorithms.replay.settings import ReplaySettings
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.algorithms.trees import SUM_UNIT, flatten, scale
from fedemu.device.compute.executors.query import PURPOSE
from fedemu.protocol.seeds import generator

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")

WIDTH, BUDGET, ROOM = 6, 4, 8
MODEL = mlp((1, 12, 12), 4, (WIDTH,))
INGREDIENTS = Ingredients(MODEL, cross_entropy, 4, 1, 4, 0.05, devices=4, input_shape=(1, 12, 12))
# The label of a sample is its index modulo 4: devices 0 and 1 have one class, device 2 two, and device 3 nothing.
SHARES = [np.arange(0, 80, 4), np.arange(81, 161, 4), np.sort([*range(162, 200, 4), *range(163, 175, 4)]), np.arange(0)]
STREAM = [SHARES, *([np.arange(200 + 40 * t + 8 * i, 206 + 40 * t + 8 * i) for i in range(4)] for t in (0, 1))]


@pytest.fixture
def fleet(little_fleet: Callable[..., Any]) -> Callable[..., Any]:
    """Every round ends a period. A device may keep ROOM samples, twice its part of the fleet's budget."""

    def begin(**fields: Any) -> Any:
        settings = replace(ReplaySettings("fedcbdr", BUDGET, ROOM, periods=3), **fields)
        algorithm = with_replay(fedavg(INGREDIENTS), settings, INGREDIENTS)
        return little_fleet(algorithm, MODEL.init(0), [], stream=STREAM, budget=settings.capacity)

    return begin


def labels(fleet: Any) -> list[int]:
    indices = np.concatenate([buffer.indices for buffer in fleet.buffers.values()])
    return np.bincount(indices % 4, minlength=4).tolist()


def test_the_fleet_keeps_its_budget_with_even_classes_though_no_device_has_them_all(fleet: Any) -> None:
    played = fleet()
    played.play([0])
    assert [ask.program for ask in played.asks] == ["train", "feature_moments", "leverage_keys", "select"]
    # There are three samples of class 3, which leaves 13 for the other classes.
    assert labels(played)[3] == 3
    assert sorted(labels(played)) == [3, 4, 4, 5]
    assert played.algorithm.remarks(played.state)["balance"] == {"devices": 4, "labels": labels(played)}
    assert max(len(buffer) for buffer in played.buffers.values()) <= ROOM
    played.play([0])
    assert sum(labels(played)) == 4 * BUDGET
    assert max(labels(played)) - min(labels(played)) <= 1


def test_a_device_keeps_the_samples_with_the_largest_keys_of_each_class(fleet: Any, corpus: Corpus) -> None:
    played = fleet()
    played.play([0])
    variables = played.asks[-1].shared["model"]
    features = {
        i: MODEL.apply(variables, corpus.batch(corpus.train, s)[0], False)[0].features
        for i, s in enumerate(SHARES)
        if len(s)
    }
    rows = {i: own.double().numpy() for i, own in features.items()}
    moments = sum(own.T @ own for own in rows.values())
    for device, own in rows.items():
        keys = keys_of_a_draw(leverage_scores(own, moments), generator(5, round=0, device=device, purpose=PURPOSE))
        kept = {*played.buffers[device].indices.tolist()}
        for label in range(4):
            members = SHARES[device][SHARES[device] % 4 == label]
            order = sorted(members.tolist(), key=lambda index, d=device, k=keys: -k[SHARES[d].tolist().index(index)])
            count = len(kept & {*members.tolist()})
            assert {*order[:count]} == kept & {*members.tolist()}


def test_moments_and_keys_are_all_that_leaves_a_device(fleet: Any, corpus: Corpus) -> None:
    played = fleet()
    played.play([0])
    assert all(ask.optional for ask in played.asks[1:])
    x, _ = corpus.batch(corpus.train, SHARES[0])
    features = MODEL.apply(played.asks[1].shared["model"], x, False)[0].features.double()
    moments = scale(played.sent[1][0]["feature_moments"], SUM_UNIT)["features"]
    torch.testing.assert_close(moments, features.T @ features)
    shapes = [{name: tuple(leaf.shape) for name, leaf in flatten(sent[0]).items()} for sent in played.sent[1:3]]
    assert shapes == [{"feature_moments/features": (WIDTH, WIDTH)}, {"leverage_keys/keys": (4, ROOM)}]
    for ask, answers in zip(played.asks[1:], played.sent[1:], strict=True):
        promised = flatten(played.algorithm.programs[ask.program].payload(ask.shared))
        for payload in answers.values():
            sent = flatten(payload)
            assert {name: (leaf.shape, leaf.dtype) for name, leaf in sent.items()} == {
                name: (leaf.shape, leaf.dtype) for name, leaf in promised.items()
            }


def test_with_a_capacity_of_the_budget_every_device_is_full(fleet: Any) -> None:
    played = fleet(capacity=BUDGET)
    played.play([0])
    assert [len(buffer) for _, buffer in sorted(played.buffers.items())] == [4, 4, 4, 0]


def test_devices_that_were_not_told_numbers_balance_their_own_classes(fleet: Any) -> None:
    played = fleet()
    played.play([0], online=[[0, 1, 2], [0, 1], [0, 1, 2, 3]])
    assert len(played.buffers[2]) == BUDGET
    assert np.bincount(played.buffers[2].indices % 4, minlength=4).tolist() == [0, 0, 2, 2]
    assert len(played.buffers[0]) + len(played.buffers[1]) == 2 * BUDGET
    away = fleet()
    away.play([0], online=[[0, 1, 2], [0, 1, 2], [0, 1]])
    away.play([0, 2], online=[[], []])
    assert np.bincount(away.buffers[2].indices % 4, minlength=4).tolist() == [0, 0, 2, 2]
    assert away.buffers[2].period == 1
    assert away.algorithm.remarks(away.state)["balance"] == {"devices": 0}


def test_samples_that_arrive_after_the_keys_come_after_all_samples_with_keys() -> None:
    select: Any = BalancedSelect(None, None, Census(), True, classes=2, budget=2)  # type: ignore[arg-type]
    batch = Batch(torch.zeros(6, 1), torch.tensor([0, 0, 1, 1, 0, 1]), torch.ones(6))
    fresh, periods = np.ones(6, dtype=bool), np.zeros(6, dtype=np.int64)
    memory = Memory(batch, np.arange(6), fresh, periods, 0, BUDGET, 6, np.random.default_rng(0))
    own = {"keys": torch.tensor([0.2, 0.9, 0.4], dtype=torch.float64)}
    assert select.choose(memory, {}, own, None).tolist() == [1, 2]
    told = {EACH: {"counts": torch.tensor([0, 2])}}
    assert select.choose(memory, {**told, **marked(0)}, own, None).tolist() == [2, 3]
    assert select.choose(memory, {**told, **marked(1)}, own, None).tolist() == [1, 2], "numbers of another period"


def test_an_exchange_whose_second_question_nobody_answers_ends(fleet: Any) -> None:
    played = fleet()
    played.play([0], online=[[0], [], []])
    assert played.algorithm.remarks(played.state)["balance"] == {"devices": 0, "labels": [0, 0, 0, 0]}


def test_the_same_devices_keep_the_same_each_time(fleet: Any) -> None:
    first, second = fleet(), fleet()
    for played in (first, second):
        played.play([0])
        played.play([0, 1])
    assert {d: b.indices.tolist() for d, b in first.buffers.items()} == {
        d: b.indices.tolist() for d, b in second.buffers.items()
    }
