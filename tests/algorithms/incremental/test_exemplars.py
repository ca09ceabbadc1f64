"""iCaRL and GLFC: their losses, the means of exemplars, and the best model of a task."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.incremental.exemplars import old_classes, sigmoid_cross_entropy
from fedemu.algorithms.incremental.glfc import CompensatedLoss, glfc, gradient_compensation, mean_accuracy
from fedemu.algorithms.incremental.icarl import RepresentationLoss, icarl
from fedemu.algorithms.incremental.remembering import TaskSGD
from fedemu.algorithms.incremental.task_by_task import TaskByTask
from fedemu.algorithms.interface import Batch, Context, Facts
from fedemu.algorithms.methods.fedavg import fedavg
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import SEEN, Head, growing
from fedemu.algorithms.replay.replay import COMPUTES_GRADIENTS, with_replay
from fedemu.algorithms.replay.settings import ReplaySettings
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.algorithms.trees import SUM_UNIT
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.errors import ConfigurationError

SHAPE = (1, 12, 12)
MODEL = growing(mlp(SHAPE, 4, (6,)), ClassTasks.of(4, 2, [2, 0, 3, 1]), SHAPE)
INGREDIENTS = Ingredients(MODEL, cross_entropy, 4, 2, 5, 0.05, 0.5, devices=3, input_shape=SHAPE)
# Labels go 0, 1, 2, 3, 0, ...: task 0 brings 2 and 0, task 1 brings 3 and 1.
STREAM = [[np.arange(start, start + 40, 2) for start in (0, 40, 80)], [np.arange(i, i + 40, 2) for i in (1, 41, 81)]]
FACTS = Facts(*[torch.tensor(0)] * 4, torch.tensor(1), torch.tensor(False), torch.zeros(4))
BATCH = Batch(
    torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(0)),
    torch.tensor([3, 0, 1, 2, 3]),
    torch.tensor([1.0, 1, 1, 1, 0]),
)
PREVIOUS = {name: leaf + 0.1 if name != SEEN else leaf for name, leaf in MODEL.init(1).items()}
VARIABLES = MODEL.entered(MODEL.init(0), 1, 7)
OLD, NEW = [0, 2], [1, 3]
CONTEXT = Context(round=1, task=0, seed=7, classes=4)


@pytest.fixture
def played(little_fleet: Callable[..., Any]) -> Callable[..., Any]:
    def make(method: Any, **fields: Any) -> Any:
        algorithm = with_replay(method, ReplaySettings("herding", budget=6, periods=2), INGREDIENTS)
        settings = {"stream": STREAM, "rounds_per_period": 2, "budget": 6, **fields}
        return little_fleet(algorithm, MODEL.init(0), [], **settings)

    return make


def logits_of(variables: Any) -> Tensor:
    """The four rows that are no padding."""
    return MODEL.apply(variables, BATCH.x[:4], False)[0].logits


def decisions(logits: Tensor, targets: Tensor) -> Tensor:
    """Sigmoid cross-entropy of each sample, added over the classes."""
    chance = logits.sigmoid()
    return -(targets * chance.log() + (1 - targets) * (1 - chance).log()).sum(1)


def test_sigmoid_cross_entropy_on_numbers_worked_out_by_hand() -> None:
    logits = torch.tensor([[0.0, np.log(3.0), 5.0], [9.0, 9.0, 9.0]])
    targets = torch.tensor([[1.0, 0.25, 1.0], [0.0, 0.0, 0.0]])
    classes, weight = torch.tensor([True, True, False]), torch.tensor([1.0, 0.0])
    expected = np.log(2) - 0.25 * np.log(0.75) - 0.75 * np.log(0.25)
    found = sigmoid_cross_entropy(logits, targets, classes, weight)
    torch.testing.assert_close(float(found), float(expected))
    assert sigmoid_cross_entropy(logits, targets, classes, weight * 0) == 0
    torch.testing.assert_close(sigmoid_cross_entropy(logits, targets, classes, weight, weight * 3), 3 * found)


def test_icarl_learns_labels_of_new_classes_and_the_previous_answers_for_old_ones(louder: Callable[[Any], Any]) -> None:
    loss = RepresentationLoss(louder(MODEL), distilling=True)(VARIABLES, BATCH, {"previous": PREVIOUS}, {}, FACTS)
    targets = functional.one_hot(BATCH.y[:4], 4).float()
    targets[:, OLD] = logits_of(PREVIOUS)[:, OLD].sigmoid()
    # The model in training is louder, the previous one is in evaluation mode.
    torch.testing.assert_close(loss.value, decisions(2 * logits_of(VARIABLES), targets).mean())
    assert loss.metrics["loss"] == loss.value
    begins, distils = (RepresentationLoss(MODEL, distilling) for distilling in (False, True))
    programs = icarl(INGREDIENTS).programs.items()
    losses = {name: program.loss for name, program in programs if isinstance(program, TaskSGD)}
    assert losses == {"train": begins, "rehearse": distils}
    first = begins(MODEL.init(0), BATCH, {}, {}, FACTS)
    labels = functional.one_hot(BATCH.y[:4], 4).float()[:, OLD]
    torch.testing.assert_close(first.value, decisions(logits_of(MODEL.init(0))[:, OLD], labels).mean())


def test_with_own_orders_a_class_of_the_present_task_is_new_also_if_the_previous_model_has_seen_it() -> None:
    tasks = replace(MODEL.tasks, own=np.array([[1, 0], [0, 1]]))
    model, facts = replace(MODEL, tasks=tasks), FACTS._replace(device=torch.tensor(0))
    everything = {**PREVIOUS, SEEN: torch.ones(4)}
    assert old_classes(model, everything, facts).tolist() == [False, True, False, True]
    assert old_classes(MODEL, everything, facts).tolist() == [True, False, True, False]
    assert old_classes(MODEL, {**PREVIOUS, SEEN: torch.tensor([1.0, 0, 0, 0])}, facts).tolist() == [True, *[False] * 3]
    loss = RepresentationLoss(model, distilling=True)(VARIABLES, BATCH, {"previous": everything}, {}, facts)
    targets = functional.one_hot(BATCH.y[:4], 4).float()
    targets[:, NEW] = logits_of(everything)[:, NEW].sigmoid()
    torch.testing.assert_close(loss.value, decisions(logits_of(VARIABLES), targets).mean())


def test_gradient_compensation_gives_old_and_new_classes_the_same_mean_weight() -> None:
    # The sigmoids of 0, log 3, log 9 and log 4 are 0.5, 0.75, 0.9 and 0.8, so the measures are 0.5, 0.25, 0.1 and 0.2.
    values = [0.0, np.log(3.0), np.log(9.0), np.log(4.0)]
    logits = torch.diag(torch.tensor(values, dtype=torch.float64))
    labels, old = torch.arange(4), torch.tensor([True, False, True, False])
    found = gradient_compensation(logits, labels, old, torch.ones(4))
    torch.testing.assert_close(found, torch.tensor([0.5 / 0.3, 0.25 / 0.225, 0.1 / 0.3, 0.2 / 0.225]).double())
    alone = gradient_compensation(logits, labels, old, torch.tensor([1.0, 0, 0, 1]))
    assert alone.tolist() == [1, 0, 0, 1]
    assert gradient_compensation(logits, labels, old, torch.zeros(4)).tolist() == [0] * 4


def test_glfc_learns_the_first_task_by_its_own_loss_and_later_ones_by_both(played: Callable[..., Any]) -> None:
    def learned(method: Any, *cohorts: list[int]) -> Tensor:
        fleet = played(method)
        for cohort in cohorts:
            fleet.play(cohort)
        return torch.cat([leaf.double().flatten() for leaf in fleet.model.values()])

    begun = learned(glfc(INGREDIENTS), [0, 1])
    assert torch.equal(begun, learned(glfc(INGREDIENTS, 0.1, 0.9), [0, 1]))
    assert not torch.allclose(begun, learned(TaskByTask(fedavg(INGREDIENTS), MODEL), [0, 1]))
    models = [
        learned(glfc(INGREDIENTS, *weights), [0, 1], [0, 1], [1, 2]) for weights in ((0.5, 0.5), (0.5, 0), (0, 0.5))
    ]
    assert all(not torch.allclose(one, other) for one, other in combinations(models, 2))


def test_glfc_weighs_its_two_losses(louder: Callable[[Any], Any]) -> None:
    weights, loud = (0.3, 0.9), louder(MODEL)
    loss = CompensatedLoss(loud, *weights, first=False)(VARIABLES, BATCH, {"previous": PREVIOUS}, {}, FACTS)
    # The model in training is louder, the previous one is in evaluation mode.
    logits, labels = 2 * logits_of(VARIABLES), functional.one_hot(BATCH.y[:4], 4).float()
    measure = 1 - logits.sigmoid()[torch.arange(4), BATCH.y[:4]]
    groups = [measure[[1, 3]].mean(), measure[[0, 2]].mean()]  # the labels are 3, 0, 1, 2
    importance = measure / torch.stack([groups[1], groups[0], groups[1], groups[0]])
    compensated = (importance * decisions(logits, labels)).mean()
    relations = labels.clone()
    relations[:, OLD] = logits_of(PREVIOUS)[:, OLD].sigmoid()
    expected = weights[0] * compensated + weights[1] * decisions(logits, relations).mean()
    torch.testing.assert_close(loss.value, expected)
    torch.testing.assert_close(loss.metrics["loss"], compensated)
    begun = CompensatedLoss(loud, *weights, first=True)(MODEL.init(0), BATCH, {}, {}, FACTS)
    torch.testing.assert_close(begun.value, decisions(2 * logits_of(MODEL.init(0))[:, OLD], labels[:, OLD]).mean())
    assert begun.metrics["loss"] == begun.value
    programs = glfc(INGREDIENTS, *weights).programs
    losses = [getattr(programs[name], "loss", None) for name in ("train", "rehearse")]
    assert losses == [CompensatedLoss(MODEL, *weights, first) for first in (True, False)]

    def value(trained: Any) -> Tensor:
        whole = {**trained, SEEN: VARIABLES[SEEN]}
        return CompensatedLoss(loud, 1.0, 0.0, first=False)(whole, BATCH, {"previous": PREVIOUS}, {}, FACTS).value

    def weighted(trained: Any) -> Tensor:
        return (importance * decisions(2 * logits_of({**trained, SEEN: VARIABLES[SEEN]}), labels)).mean()

    trained = {name: leaf for name, leaf in VARIABLES.items() if name != SEEN}
    slopes, by_hand = torch.func.grad(value)(trained), torch.func.grad(weighted)(trained)
    for name, leaf in by_hand.items():  # the weights pass no gradient
        torch.testing.assert_close(slopes[name], leaf)


@pytest.mark.parametrize("builder", [icarl, glfc])
def test_both_methods_run_alike_on_every_executor_with_exemplars(
    builder: Callable[..., Any], played: Callable[..., Any]
) -> None:
    fleet = played(builder(INGREDIENTS), executor=Checked(Serial(), Vmapped(2)))
    for cohort in [[0, 1], [0], [0, 2], [0, 1, 2]]:
        fleet.play(cohort)
    programs = [ask.program for ask in fleet.asks]
    assert programs == ["train", "survey", "train", "survey", "select", *["rehearse", "survey"] * 2]
    assert list(fleet.asks[5].shared) == ["model", "previous"]
    assert all(bool(torch.isfinite(leaf).all()) for leaf in fleet.model.values())
    assert [len(fleet.buffers[device]) for device in range(3)] == [6] * 3


def test_icarl_answers_with_the_nearest_mean_of_what_devices_hold(played: Callable[..., Any]) -> None:
    fleet = played(icarl(INGREDIENTS))
    for online in ([[0, 1, 2]], [[0, 1, 2], [0, 1, 2]], [[0, 2]]):
        fleet.play([0, 1], online=online)
    held = np.concatenate([*(fleet.buffers[i].indices for i in (0, 2)), STREAM[1][0], STREAM[1][2]])
    x, y = fleet.corpus.batch(fleet.corpus.train, held)
    rows = functional.normalize(MODEL.apply(fleet.model, x, False)[0].features.double())
    means = functional.normalize(torch.stack([rows[y == label].mean(0) for label in range(4)]))
    torch.testing.assert_close(fleet.model["fc2.weight"], means.float())
    assert fleet.model["fc2.bias"].tolist() == [0] * 4
    queries, _ = fleet.corpus.batch(fleet.corpus.train, np.arange(300, 400))
    outputs, _ = MODEL.apply(fleet.model, queries, False)
    nearest = torch.cdist(functional.normalize(outputs.features.double()), means).argmin(1)
    assert torch.equal(outputs.logits.argmax(1), nearest)
    before = fleet.model["fc2.weight"]
    fleet.play([0, 1], online=[[]])
    assert torch.equal(fleet.model["fc2.weight"], before)


def test_icarl_trains_with_a_classifier_of_its_own(played: Callable[..., Any]) -> None:
    fleet = played(icarl(INGREDIENTS))
    fleet.play([0, 1])
    evaluated = fleet.model["fc2.weight"]
    fleet.play([0, 1])
    sent = fleet.asks[2].shared["model"]["fc2.weight"]
    assert not torch.allclose(sent, evaluated)
    torch.testing.assert_close(fleet.asks[1].shared["model"]["fc2.weight"], sent)


def test_a_class_that_nobody_online_holds_keeps_its_last_mean_also_in_the_next_task() -> None:
    algorithm = icarl(INGREDIENTS)
    script_state = algorithm.init(MODEL.init(0), CONTEXT)
    assert algorithm.variables(script_state) == script_state.variables, "its own classifier answers without means"
    with pytest.raises(StopIteration) as end:
        next(algorithm.remember(script_state, None))  # type: ignore[arg-type]
    assert end.value.value == {"previous": script_state.variables}
    sums = {"features": torch.eye(4, 6).double(), "counts": torch.tensor([2.0, 0, 1, 0]).double()}
    state = replace(script_state, kept=algorithm.surveyed(script_state, sums))
    later = {"features": 3 * torch.ones(4, 6).double(), "counts": torch.tensor([0.0, 4, 1, 0]).double()}
    kept = algorithm.surveyed(state, later)["means"]
    assert kept["counts"].tolist() == [2, 4, 1, 0]
    assert kept["features"][:, 1].tolist() == [0, 3, 3, 0]
    with pytest.raises(StopIteration) as end:
        next(algorithm.remember(state, None))  # type: ignore[arg-type]
    assert end.value.value["means"] is state.kept["means"]


def test_without_a_bias_a_class_of_which_nobody_held_a_sample_is_not_the_answer() -> None:
    algorithm = icarl(replace(INGREDIENTS, model=replace(MODEL, head=Head("fc2.weight", None))))
    state = algorithm.init(MODEL.init(0), CONTEXT)
    sums = {"features": torch.eye(4, 6).double(), "counts": torch.tensor([2.0, 0, 1, 0]).double()}
    model = algorithm.variables(replace(state, kept=algorithm.surveyed(state, sums)))
    cosines = model["fc2.weight"] @ torch.tensor([-1.0, 0, -3, 0, 0, 0])
    assert cosines.argmax() == 0, "all cosines with means are negative"


def test_glfc_teaches_with_the_best_model_of_the_last_task(played: Callable[..., Any]) -> None:
    algorithm = glfc(INGREDIENTS)
    fleet = played(algorithm, rounds_per_period=3)
    found = []
    for _ in range(3):
        fleet.play([0, 1])
        found.append((float(mean_accuracy(added(fleet.sent[1]))), fleet.model))
        assert fleet.algorithm.remarks(fleet.state)["best_old_model"] == max(score for score, _ in found)
    best = max(range(3), key=lambda place: found[place][0])
    fleet.play([0, 1])
    teacher = fleet.asks[-2].shared["previous"]
    assert all(torch.equal(leaf, teacher[name]) for name, leaf in found[best][1].items())


def test_the_best_of_a_tasks_models_is_the_earliest_with_the_highest_mean_accuracy() -> None:
    algorithm = glfc(INGREDIENTS)
    state = algorithm.init(MODEL.init(0), CONTEXT)
    assert algorithm.remarks(state) == {}
    best = []
    for round, right in enumerate((1.0, 3.0, 2.0, 3.0)):
        state = replace(state, variables={"round": torch.tensor(round)})
        sums = {"right": torch.tensor([right, 0, 2.0, 0]), "counts": torch.tensor([4.0, 0, 2, 0])}
        state = replace(state, kept=algorithm.surveyed(state, sums))
        best.append((int(state.kept["best"]["round"]), json.dumps(algorithm.remarks(state)["best_old_model"])))
    assert best == [(0, "0.625"), (1, "0.875"), (1, "0.875"), (1, "0.875")]
    with pytest.raises(StopIteration) as end:
        next(algorithm.remember(state, None))  # type: ignore[arg-type]
    assert end.value.value == {"previous": {"round": torch.tensor(1)}}, "the next task begins without a best model"


def added(sent: Any) -> dict[str, Tensor]:
    trees = [payload["sums"] for payload in sent.values()]
    return {name: torch.stack([tree[name] for tree in trees]).sum(0) * SUM_UNIT for name in trees[0]}


def test_mean_accuracy_counts_all_classes_alike() -> None:
    sums = {"right": torch.tensor([9.0, 0, 1, 0]), "counts": torch.tensor([10.0, 0, 1, 5])}
    torch.testing.assert_close(mean_accuracy(sums), torch.tensor([(0.9 + 1 + 0) / 3]))
    assert mean_accuracy({"right": torch.tensor([3.0, 0]), "counts": torch.tensor([4.0, 0])}).tolist() == [0.75]
    assert mean_accuracy({"right": torch.zeros(4), "counts": torch.zeros(4)}).tolist() == [0]


@pytest.mark.parametrize("builder", [icarl, glfc])
def test_methods_with_exemplars_are_refused_without_replay(builder: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"set replay\.strategy = 'herding'"):
        builder(replace(INGREDIENTS, kept=0))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        *(({"strategy": name}, f"'{name}' needs .*'herding'") for name in COMPUTES_GRADIENTS),
        (
            {"strategy": "gss_iqp", "objective": "never"},
            r"replay\.strategy = 'gss_iqp' needs gradients of samples, but",
        ),
        (
            {"strategy": "herding", "objective": "always"},
            r"objective = 'always' needs .*set replay\.objective = 'cheap'$",
        ),
    ],
)
def test_icarl_refuses_gradients_because_its_classifier_is_not_the_trained_one(
    settings: dict[str, Any], sentence: str
) -> None:
    wanted = ReplaySettings(**settings, budget=6, capacity=6)
    with pytest.raises(ConfigurationError, match=sentence):
        with_replay(icarl(INGREDIENTS), wanted, INGREDIENTS)
    with_replay(glfc(INGREDIENTS), wanted, INGREDIENTS)
