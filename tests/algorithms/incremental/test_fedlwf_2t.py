"""FedProx⁺ and FedLwF-2T: the previous task's model, the two teachers, and what devices keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.incremental.fedlwf_2t import TwoTeachers, fedlwf_2t
from fedemu.algorithms.incremental.fedprox_plus import anchored, fedprox_plus
from fedemu.algorithms.incremental.task_by_task import TaskByTask
from fedemu.algorithms.interface import Batch, Facts, Outputs, Revealing, Tree
from fedemu.algorithms.methods.fedavg import fedavg
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import SEEN, growing
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import Pass, cross_entropy
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.errors import ConfigurationError

SHAPE = (1, 12, 12)
MODEL = growing(mlp(SHAPE, 4, (6,)), ClassTasks.of(4, 2, [2, 0, 3, 1]), SHAPE)
INGREDIENTS = Ingredients(MODEL, cross_entropy, 4, 2, 5, 0.05, 0.5, devices=3, input_shape=SHAPE)
# Labels go 0, 1, 2, 3, 0, ...: task 0 brings 2 and 0, task 1 brings 3 and 1.
STREAM = [[np.arange(start, start + 40, 2) for start in (0, 40, 80)], [np.arange(i, i + 40, 2) for i in (1, 41, 81)]]


def played(method: Any, little_fleet: Callable[..., Any], *cohorts: list[int], **fields: Any) -> Any:
    fleet = little_fleet(method, MODEL.init(0), [], stream=STREAM, rounds_per_period=2, **fields)
    for cohort in cohorts:
        fleet.play(cohort)
    return fleet


def facts(task: int, *, first: bool = False) -> Facts:
    zero = torch.tensor(0)
    counts = torch.tensor([0] * 4)
    return Facts(torch.tensor(4), zero, torch.tensor(0.5), zero, torch.tensor(task), torch.tensor(first), counts)


@pytest.mark.parametrize("builder", [fedprox_plus, fedlwf_2t])
def test_both_methods_run_alike_on_every_executor_while_devices_come_and_go(
    builder: Callable[..., Any], little_fleet: Callable[..., Any]
) -> None:
    """Device 2 joins in the second task."""
    executor = Checked(Serial(), Vmapped(2))
    fleet = played(builder(INGREDIENTS), little_fleet, [0, 1], [1], [0, 2], [0, 1, 2], executor=executor)
    assert [ask.program for ask in fleet.asks] == ["train", "train", "rehearse", "rehearse"]
    assert all(bool(torch.isfinite(leaf).all()) for leaf in fleet.model.values())
    assert fleet.model[SEEN].tolist() == [1, 1, 1, 1]
    assert all(isinstance(program, Revealing) for program in fleet.algorithm.programs.values())


@pytest.mark.parametrize(
    "builder", [lambda made: fedprox_plus(made, 0.0), lambda made: fedlwf_2t(made, 1.0, 0.0)], ids=["prox+", "lwf"]
)
def test_with_a_weight_of_0_both_methods_are_federated_averaging(
    builder: Callable[..., Any], little_fleet: Callable[..., Any]
) -> None:
    cohorts = [0, 1], [0, 1], [1, 2]
    plain = played(TaskByTask(fedavg(INGREDIENTS), MODEL), little_fleet, *cohorts)
    found = played(builder(INGREDIENTS), little_fleet, *cohorts)
    for name, leaf in plain.model.items():
        torch.testing.assert_close(found.model[name], leaf)


def test_a_larger_weight_holds_devices_nearer_to_the_previous_model(little_fleet: Callable[..., Any]) -> None:
    moved = []
    for mu in (0.0, 0.5, 5.0):
        fleet = played(fedprox_plus(INGREDIENTS, mu), little_fleet, [0, 1], [0, 1])
        before = fleet.model
        fleet.play([0, 1])
        moved.append(float((fleet.model["fc1.weight"] - before["fc1.weight"]).norm()))
    assert moved[0] > moved[1] > moved[2]


def test_devices_learn_from_both_teachers_by_their_weights(little_fleet: Callable[..., Any]) -> None:
    def learned(*options: float) -> Tensor:
        fleet = played(fedlwf_2t(INGREDIENTS, *options), little_fleet, [0, 1], [0, 1], [0, 1])
        return torch.cat([leaf.double().flatten() for leaf in fleet.model.values()])

    models = [learned(*options) for options in ((1.0, 0.0), (0.5, 0.5), (0.5, 0.0), (0.5, 0.0, 9.0))]
    assert all(not torch.allclose(one, other) for one, other in combinations(models, 2))


def test_the_previous_model_holds_all_but_the_rows_of_new_classes() -> None:
    previous = MODEL.init(0)
    variables = {name: leaf + 0.5 for name, leaf in MODEL.entered(previous, 1, 7).items()}
    nothing = Outputs(torch.zeros(0), torch.zeros(0), {})
    batch = Batch(torch.zeros(0), torch.zeros(0), torch.zeros(0))

    def term(trained: Tree) -> Tensor:
        at = Pass({**trained, SEEN: torch.ones(4)}, nothing, batch, {"previous": previous}, {}, facts(1))
        return anchored(3.0, MODEL)(MODEL, at)

    trained = {name: leaf for name, leaf in variables.items() if name != SEEN}
    held = sum(leaf.numel() for name, leaf in trained.items() if name.startswith("fc1")) + 2 * 6 + 2
    torch.testing.assert_close(term(trained), torch.tensor(3.0 / 2 * held * 0.25))
    slopes = torch.func.grad(term)(trained)
    assert slopes["fc2.weight"][[1, 3]].abs().max() == 0
    torch.testing.assert_close(slopes["fc2.weight"][[0, 2]], torch.full((2, 6), 1.5))


def test_a_device_keeps_its_last_model_of_an_earlier_task(little_fleet: Callable[..., Any]) -> None:
    fleet = played(fedlwf_2t(INGREDIENTS), little_fleet, [0, 1], [0])
    after = {i: part(fleet.own[i], "last") for i in (0, 1)}
    assert [float(fleet.own[i]["known"]) for i in (0, 1)] == [0, 0]
    for _ in range(2):
        fleet.play([0, 1, 2])
        for i in (0, 1):
            assert float(fleet.own[i]["known"]) == 1
            assert int(fleet.own[i]["task"]) == 1
            assert all(torch.equal(leaf, after[i][name]) for name, leaf in part(fleet.own[i], "past").items())
        assert float(fleet.own[2]["known"]) == 0
    assert list(fleet.asks[-1].shared) == ["model"]


def part(own: Tree, key: str) -> Tree:
    return {name.removeprefix(f"{key}/"): leaf for name, leaf in own.items() if name.startswith(f"{key}/")}


def test_teachers_are_asked_in_evaluation_mode_about_the_classes_they_have_seen(
    louder: Callable[[Any], Any],
) -> None:
    past, last = MODEL.init(1), MODEL.init(0)
    model = MODEL.entered(last, 1, 7)
    variables = {name: leaf * 1.1 if name != SEEN else leaf for name, leaf in model.items()}
    x = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0))
    batch = Batch(x, torch.tensor([3, 1, 3]), torch.ones(3))
    own = {
        **{f"last/{name}": leaf for name, leaf in last.items()},
        **{f"past/{name}": leaf for name, leaf in past.items()},
        "task": torch.tensor(1),
        "known": torch.tensor(1.0),
    }
    loud = louder(MODEL)
    loss = TwoTeachers(loud, cross_entropy, 0.2, 0.5, 2.0)

    def logits(of: Tree, train: bool) -> Tensor:
        found: Tensor = loud.apply(of, x, train)[0].logits / 2
        return found

    def divergence(teacher: Tree, classes: list[int]) -> Tensor:
        both = logits(variables, True), logits(teacher, False)
        student, taught = (each[:, classes].log_softmax(1) for each in both)
        return functional.kl_div(student, taught, reduction="batchmean", log_target=True)

    surprise = functional.cross_entropy(2 * logits(variables, True), batch.y)
    server = 0.3 * divergence(model, [0, 1, 2, 3])
    # In the task of the last visit, the past model teaches. In a later task, the last model teaches.
    for task, teacher in ((1, past), (2, last)):
        value, _, metrics, _ = loss(variables, batch, {"model": model}, own, facts(task))
        torch.testing.assert_close(metrics["loss"], surprise)
        torch.testing.assert_close(value, 0.2 * surprise + 0.5 * divergence(teacher, [0, 2]) + server)
    nothing = {name: torch.zeros_like(leaf) for name, leaf in own.items()}
    newcomer = loss(variables, batch, {"model": model}, nothing, facts(2, first=True)).value
    torch.testing.assert_close(newcomer, 0.7 * surprise + server)


def test_unsuitable_settings_are_refused() -> None:
    for builder in (fedprox_plus, fedlwf_2t):
        with pytest.raises(ConfigurationError, match="remembers classes of earlier tasks, but the stream brings none"):
            builder(replace(INGREDIENTS, model=mlp(SHAPE, 4)))
    with pytest.raises(ConfigurationError, match=r"alpha \+ beta = 1\.1 leaves less than nothing"):
        fedlwf_2t(INGREDIENTS, 0.6, 0.5)
