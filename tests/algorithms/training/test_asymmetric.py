"""The asymmetric cross-entropy: new samples among the classes of new samples, replayed ones among all classes seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.interface import REPLAYED, Batch, Facts
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.registry import build_algorithm, find_criterion
from fedemu.algorithms.replay.replay import with_replay
from fedemu.algorithms.replay.settings import ReplaySettings
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped

SHAPE, CLASSES = (1, 12, 12), 4
PLAIN = mlp(SHAPE, CLASSES, (6,))
GROWING = growing(PLAIN, ClassTasks.of(CLASSES, 2, [2, 0, 3, 1]), SHAPE)
LOGITS = torch.tensor([[1.0, 2.0, 0.0, -1.0], [0.5, 0.0, 1.0, 3.0], [2.0, 1.0, -1.0, 0.0], [0.0, 0.0, 5.0, 0.0]])


def facts(task: int) -> Facts:
    zero = torch.tensor(0)
    return Facts(zero, zero, torch.tensor(0.1), zero, torch.tensor(task), torch.tensor(True), torch.ones(CLASSES))


def surprise(row: int, label: int, classes: list[int]) -> float:
    """The cross-entropy of one row in float64, among these classes."""
    powers = np.exp(LOGITS[row].double().numpy())
    return float(-np.log(powers[label] / powers[classes].sum()))


def test_without_tasks_the_classes_of_new_samples_are_those_of_the_batch() -> None:
    criterion = find_criterion("er_ace", PLAIN)
    y, weight = torch.tensor([1, 3, 0, 2]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    batch = Batch(torch.zeros(4, 1), y, weight, {REPLAYED: torch.tensor([0.0, 0.0, 1.0, 0.0])})
    rows = [surprise(0, 1, [1, 3]), surprise(1, 3, [1, 3]), surprise(2, 0, [0, 1, 2, 3])]
    assert float(criterion(LOGITS, batch, facts(0))) == pytest.approx(sum(rows) / 3, rel=1e-6)
    # If nothing is noted of rows, all classes compete.
    rows = [surprise(0, 1, [0, 1, 2, 3]), surprise(1, 3, [0, 1, 2, 3]), rows[2]]
    assert float(criterion(LOGITS, Batch(torch.zeros(4, 1), y, weight), facts(0))) == pytest.approx(sum(rows) / 3)


def test_devices_note_which_samples_are_replayed_unless_tasks_tell_it() -> None:
    for model, notes in ((PLAIN, {REPLAYED: ()}), (GROWING, {})):
        given = Ingredients(model, find_criterion("er_ace", model), CLASSES, 1, 5, 0.1, input_shape=SHAPE)
        assert given.local_sgd().notes == notes


def test_on_a_stream_of_tasks_they_are_the_classes_of_the_task() -> None:
    criterion = find_criterion("er_ace", GROWING)
    batch = Batch(torch.zeros(3, 1), torch.tensor([1, 3, 0]), torch.ones(3))
    rows = [surprise(0, 1, [1, 3]), surprise(1, 3, [1, 3]), surprise(2, 0, [0, 1, 2, 3])]
    assert float(criterion(LOGITS[:3], batch, facts(1))) == pytest.approx(sum(rows) / 3, rel=1e-6)
    padding = batch._replace(weight=torch.zeros(3))
    assert float(criterion(LOGITS[:3], padding, facts(1))) == 0


def test_no_gradient_reaches_the_rows_of_classes_that_new_samples_do_not_have() -> None:
    criterion = find_criterion("er_ace", PLAIN)
    batch = Batch(torch.zeros(2, 1), torch.tensor([1, 3]), torch.ones(2), {REPLAYED: torch.zeros(2)})
    slopes = torch.func.grad(lambda logits: criterion(logits, batch, facts(0)))(LOGITS[:2])
    assert (slopes != 0).any(0).tolist() == [False, True, False, True]


@pytest.mark.parametrize("model", [PLAIN, GROWING], ids=["drift", "tasks"])
def test_both_executors_agree(model: Any, little_fleet: Callable[..., Any]) -> None:
    stream = [[np.arange(start + task, start + 24, 2) for start in (0, 40, 80)] for task in (0, 1)]
    given = Ingredients(model, find_criterion("er_ace", model), CLASSES, 1, 5, 0.05, input_shape=SHAPE)
    settings = ReplaySettings("naive_uniform", budget=6, periods=2)
    algorithm = with_replay(build_algorithm("fedavg", {}, given), settings, given)
    executor = Checked(Serial(), Vmapped(2))
    fleet = little_fleet(algorithm, model.init(0), [], stream=stream, budget=6, executor=executor)
    fleet.play([0, 1, 2])
    before = fleet.model
    fleet.play([0, 2])
    assert any(not torch.equal(leaf, before[name]) for name, leaf in fleet.model.items())
    assert all(bool(torch.isfinite(leaf).all()) for leaf in fleet.model.values())
