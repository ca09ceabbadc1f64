"""Classifiers that grow with the tasks of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedemu.algorithms.incremental.fedprox_plus import fedprox_plus
from fedemu.algorithms.incremental.task_by_task import TaskByTask, with_tasks
from fedemu.algorithms.interface import Batch, Context, Facts, Model, Picturing, Reply, Script, Tree
from fedemu.algorithms.methods.fedavg import FedAvg, FedAvgState, fedavg
from fedemu.algorithms.methods.scaffold import scaffold
from fedemu.algorithms.models.feed_forward import cnn, mlp
from fedemu.algorithms.models.growing import APART, SEEN, Head, growing, head_of
from fedemu.algorithms.models.resnet import resnet18
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.registry import build_algorithm, find_criterion
from fedemu.algorithms.replay.replay import with_replay
from fedemu.algorithms.replay.settings import ReplaySettings
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.errors import ConfigurationError

SHAPE = (1, 12, 12)
TASKS = ClassTasks.of(4, 2, [2, 0, 3, 1])
MODEL = growing(mlp(SHAPE, 4, (6,)), TASKS, SHAPE)
INGREDIENTS = Ingredients(MODEL, cross_entropy, 4, 2, 5, 0.05, 0.5, 0.01, devices=2, input_shape=SHAPE)
# Labels go 0, 1, 2, 3, 0, ...: task 0 brings 2 and 0, task 1 brings 3 and 1.
STREAM = [[np.arange(0, 40, 2), np.arange(40, 60, 2)], [np.arange(1, 40, 2), np.arange(41, 60, 2)]]


def images(count: int) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(count))


def logits(variables: Tree, x: Tensor) -> Tensor:
    return MODEL.apply(variables, x, False)[0].logits


def test_classes_that_have_not_come_lie_far_below_the_others_and_get_no_gradient() -> None:
    variables, x = MODEL.init(3), images(5)
    assert variables[SEEN].tolist() == [1, 0, 1, 0]
    plain, grown = MODEL.model.apply(variables, x, False)[0].logits, logits(variables, x)
    assert torch.equal(grown[:, [0, 2]], plain[:, [0, 2]])
    highest = plain[:, [0, 2]].amax(1, keepdim=True)
    assert torch.equal(grown[:, [1, 3]], (highest - APART).expand(5, 2))
    weight = variables["fc2.weight"]
    slope = torch.func.grad(lambda w: functional.cross_entropy(logits({**variables, "fc2.weight": w}, x), y))
    y = torch.tensor([0, 2, 0, 2, 0])
    assert slope(weight)[[1, 3]].abs().max() == 0
    assert slope(weight)[[0, 2]].abs().sum(1).min() > 0
    torch.testing.assert_close(
        functional.cross_entropy(grown, y), functional.cross_entropy(plain[:, [0, 2]], y // 2), rtol=0, atol=0
    )


def test_a_task_draws_its_rows_by_seed_and_task_and_leaves_the_others() -> None:
    before = MODEL.init(3)
    after = MODEL.entered(before, 1, 7)
    assert after[SEEN].tolist() == [1, 1, 1, 1]
    for name in ("fc2.weight", "fc2.bias"):
        assert torch.equal(after[name][[0, 2]], before[name][[0, 2]])
        assert not (after[name][[1, 3]] == before[name][[1, 3]]).any()
        assert after[name].abs().max() <= 6**-0.5
        assert torch.equal(MODEL.entered(before, 1, 7)[name], after[name])
        assert not torch.equal(MODEL.entered(before, 1, 8)[name], after[name])
    assert torch.equal(after["fc1.weight"], before["fc1.weight"])
    assert torch.equal(MODEL.entered(after, 1, 7)["fc2.weight"], after["fc2.weight"])


def test_a_task_draws_the_same_rows_whether_or_not_the_one_before_it_was_seen() -> None:
    model = growing(mlp(SHAPE, 4, (6,)), ClassTasks.of(4, 4, [2, 0, 3, 1]), SHAPE)
    before = model.init(0)
    through = model.entered(model.entered(model.entered(before, 1, 7), 2, 7), 3, 7)
    for name, leaf in model.entered(before, 3, 7).items():
        assert torch.equal(leaf, through[name])


def test_the_classifier_may_be_asked_alone() -> None:
    variables, x = MODEL.init(3), images(5)
    features = MODEL.apply(variables, x, False)[0].features
    torch.testing.assert_close(MODEL.classify(variables, features), logits(variables, x))


class Unbiased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.top = nn.Linear(144, 5), nn.Linear(5, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x.flatten(1)).tanh()
        return self.top(features), features


class ZeroBias(Unbiased):
    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(5, 4)
        nn.init.zeros_(self.top.bias)


class HalfBody(nn.Module):
    """A module in half precision; if ``exact``, below a float32 classifier."""

    def __init__(self, exact: bool = True, raised: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(144, 5).to(torch.bfloat16)
        self.top = nn.Linear(5, 4).to(torch.float32 if exact else torch.bfloat16)
        self.raised = raised

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x.flatten(1).to(torch.bfloat16)).tanh().to(self.top.weight.dtype)
        logits = self.top(features)
        return (logits.float(), features.float()) if self.raised else (logits, features)


@pytest.mark.parametrize(
    ("model", "head"),
    [
        (mlp(SHAPE, 4, (4, 4)), Head("fc3.weight", "fc3.bias")),
        (cnn(SHAPE, 4, projection=4), Head("fc2.weight", "fc2.bias")),
        (resnet18(SHAPE, 4, "batch", width=2), Head("head.weight", "head.bias")),
        (from_module(Unbiased), Head("top.weight", None)),
        (from_module(ZeroBias), Head("top.weight", "top.bias")),
        (from_module(HalfBody), Head("top.weight", "top.bias")),
    ],
)
def test_the_classifier_of_any_model_is_found(model: Model, head: Head) -> None:
    assert head_of(model, 4, SHAPE) == head


def test_a_model_without_a_linear_classifier_is_refused() -> None:
    bare = from_module(lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 4), nn.Tanh()))
    with pytest.raises(ConfigurationError, match="this one has no such layer that is trained"):
        growing(bare, TASKS, SHAPE)


@pytest.mark.parametrize(
    ("raised", "kinds"), [(False, "bfloat16, bfloat16, bfloat16"), (True, "float32, bfloat16, float32")]
)
def test_a_classifier_of_half_precision_is_refused(raised: bool, kinds: str) -> None:
    half = from_module(lambda: HalfBody(exact=False, raised=raised))
    with pytest.raises(ConfigurationError, match=f"those of this model are {kinds}; let"):
        growing(half, TASKS, SHAPE)


def test_a_body_of_half_precision_learns_task_after_task(little_fleet: Callable[..., Any]) -> None:
    model = growing(from_module(HalfBody), TASKS, SHAPE)
    before = model.init(0)
    method = TaskByTask(fedavg(replace(INGREDIENTS, model=model)), model)
    fleet = little_fleet(method, before, [], stream=STREAM)
    for _ in range(2):
        fleet.play([0, 1])
    assert {name: leaf.dtype for name, leaf in fleet.model.items()} == {
        name: leaf.dtype for name, leaf in before.items()
    }
    assert fleet.model[SEEN].tolist() == [1, 1, 1, 1]
    assert not torch.equal(fleet.model["body.weight"], before["body.weight"])


def test_a_growing_model_has_buffers_like_any_other() -> None:
    model = growing(resnet18(SHAPE, 4, "batch", width=2), TASKS, SHAPE)
    variables, x = model.init(0), images(4)
    _, buffers = model.apply(variables, x, True)
    assert buffers.keys() == model.buffers
    assert not torch.equal(buffers["stem.norm.running_mean"], variables["stem.norm.running_mean"])
    assert torch.equal(buffers[SEEN], variables[SEEN])


def played(method: Any, little_fleet: Callable[..., Any], **fields: Any) -> Any:
    fleet = little_fleet(method, MODEL.init(0), [], stream=STREAM, rounds_per_period=2, **fields)
    for _ in range(2):
        fleet.play([0, 1])
    return fleet


@pytest.mark.parametrize("builder", [fedavg, scaffold])
def test_a_method_learns_task_after_task_alike_on_every_executor(
    builder: Callable[..., Any], little_fleet: Callable[..., Any]
) -> None:
    fleet = played(TaskByTask(builder(INGREDIENTS), MODEL), little_fleet, executor=Checked(Serial(), Vmapped(2)))
    first = fleet.model
    assert first[SEEN].tolist() == [1, 0, 1, 0]
    fleet.play([0, 1])
    began = fleet.asks[-1].shared["model"]
    assert torch.equal(began["fc2.weight"], MODEL.entered(first, 1, fleet.seed)["fc2.weight"])
    fleet.play([0])
    assert fleet.model[SEEN].tolist() == [1, 1, 1, 1]
    x, y = fleet.corpus.batch(fleet.corpus.train, np.arange(100, 200))
    right = logits(fleet.model, x).argmax(1) == y
    assert right[y % 2 == 1].float().mean() > 0.5


def test_the_state_must_hold_the_model_where_it_can_be_changed() -> None:
    class Bare:
        programs: Any = {}  # noqa: RUF012

        def init(self, variables: Tree, context: Context) -> Tree:
            return variables

    method: Any = Bare()
    with pytest.raises(ConfigurationError, match="the field 'variables' of a method's state, but the state"):
        TaskByTask(method, MODEL).init({}, Context(0, 0, 0, 4))


@dataclass(frozen=True)
class Counted:
    inner: Any
    rounds: int


class Counting:
    """Plays the rounds of a built-in method inside its own, as ``docs/own_methods.md`` tells."""

    def __init__(self, ingredients: Ingredients, name: str) -> None:
        self._inner = build_algorithm(name, {}, ingredients)
        self.programs = self._inner.programs

    def init(self, variables: Tree, context: Context) -> Counted:
        return Counted(self._inner.init(variables, context), 0)

    def round(self, state: Counted, context: Context) -> Script[Counted]:
        inner = yield from self._inner.round(state.inner, context)
        return Counted(inner, state.rounds + 1)

    def variables(self, state: Counted) -> Tree:
        return self._inner.variables(state.inner)


@pytest.mark.parametrize("name", ["scaffold", "fedlwf_2t"])
def test_a_method_around_a_built_in_one_leaves_it_to_that_one_to_let_the_model_grow(
    name: str, little_fleet: Callable[..., Any]
) -> None:
    fleet = played(with_tasks(Counting(INGREDIENTS, name), MODEL), little_fleet)
    alone = played(build_algorithm(name, {}, INGREDIENTS), little_fleet)
    for each in (fleet, alone):
        each.play([0, 1])
    assert fleet.model[SEEN].sum() == 4
    assert all(torch.equal(leaf, alone.model[key]) for key, leaf in fleet.model.items())


@pytest.mark.parametrize("name", ["fedprox", "fedntd", "moon", "fedcurv", "fednova"])
def test_every_kind_of_state_can_grow(name: str, little_fleet: Callable[..., Any]) -> None:
    options = {"fedcurv": {"penalty": 0.01, "samples": 4}}.get(name, {})
    algorithm = build_algorithm(name, options, INGREDIENTS)
    assert isinstance(algorithm, TaskByTask)
    fleet = played(algorithm, little_fleet)
    fleet.play([0, 1])
    assert fleet.model[SEEN].sum() == 4
    assert all(bool(torch.isfinite(leaf).all()) for leaf in fleet.model.values())


@pytest.mark.parametrize("name", ["fedavg", "fedlwf_2t"])
def test_devices_have_no_say_in_which_classes_have_been_seen(name: str) -> None:
    algorithm, context = build_algorithm(name, {}, INGREDIENTS), Context(1, 0, 0, 4)
    state = algorithm.init(MODEL.init(0), context)
    script = algorithm.round(state, context)
    ask: Any = next(script)
    lie = {key: torch.full_like(leaf, -2.0) for key, leaf in ask.shared["model"].items()}
    with pytest.raises(StopIteration) as end:
        script.send(Reply({"delta": lie}, ()))
    after = algorithm.variables(end.value.value)
    assert after[SEEN].tolist() == [1, 0, 1, 0]
    assert torch.equal(after["fc1.bias"], ask.shared["model"]["fc1.bias"] - 2)


def test_methods_stay_as_they_are_if_the_model_does_not_grow_or_they_grow_it_themselves() -> None:
    plain = replace(INGREDIENTS, model=MODEL.model)
    assert isinstance(build_algorithm("fedavg", {}, plain), FedAvg)
    remembering = fedprox_plus(INGREDIENTS)
    assert with_tasks(remembering, MODEL) is remembering


class Painter(FedAvg):
    def pictures(self, state: FedAvgState, samples: int, seed: int) -> Tree:
        assert self.variables(state).keys() == MODEL.init(0).keys()
        return {"x": torch.zeros(samples, *SHAPE), "y": torch.full((samples,), seed)}


def test_pictures_are_shown_through_all_that_is_put_around_a_method() -> None:
    settings = ReplaySettings("reservoir", 5)

    def wrapped(method: Any) -> list[Any]:
        growing = TaskByTask(method, MODEL)
        return [growing, with_replay(method, settings, INGREDIENTS), with_replay(growing, settings, INGREDIENTS)]

    for method in wrapped(Painter(INGREDIENTS.local_sgd())):
        assert isinstance(method, Picturing)
        pictures = method.pictures(method.init(MODEL.init(0), Context(0, 0, 0, 4)), 3, 7)
        assert (pictures["x"].shape, pictures["y"].tolist()) == ((3, *SHAPE), [7, 7, 7])
    for method in wrapped(fedavg(INGREDIENTS)):
        assert method.pictures(method.init(MODEL.init(0), Context(0, 0, 0, 4)), 3, 7) == {}


def facts_of(task: int, device: int) -> Facts:
    zero = torch.tensor(0)
    return Facts(zero, zero, zero, zero, torch.tensor(task), zero.bool(), torch.zeros(4), torch.tensor(device))


def test_a_device_may_ask_which_classes_its_task_brings() -> None:
    for device in (0, 1):
        assert MODEL.brought(facts_of(1, device)).tolist() == [False, True, False, True]


def test_with_own_orders_each_device_has_its_classes_and_a_class_is_seen_when_the_first_device_meets_it() -> None:
    own = np.array([[1, 0, 2], [1, 2, 0], [0, 1, 2]])
    # Task 0 brings the classes 2 and 0, task 1 brings 3, task 2 brings 1.
    tasks = replace(ClassTasks.of(4, 3, [2, 0, 3, 1]), own=own)
    model = growing(mlp(SHAPE, 4, (6,)), tasks, SHAPE)
    found = [
        [model.brought(facts_of(period, device)).nonzero().flatten().tolist() for period in range(3)]
        for device in range(3)
    ]
    assert found == [[[3], [0, 2], [1]], [[3], [1], [0, 2]], [[0, 2], [3], [1]]]
    stacked = torch.vmap(lambda task, device: model.brought(facts_of(0, 0)._replace(task=task, device=device)))
    assert stacked(torch.tensor([0, 1]), torch.tensor([2, 1])).int().tolist() == [[1, 0, 1, 0], [0, 1, 0, 0]]
    before = torch.vmap(lambda task, device: model.brought_before(facts_of(0, 0)._replace(task=task, device=device)))
    assert before(torch.tensor([0, 1, 2]), torch.tensor([2, 1, 0])).int().tolist() == [
        [0] * 4,
        [0, 0, 0, 1],
        [1, 0, 1, 1],
    ]
    assert MODEL.brought_before(facts_of(1, 0)).tolist() == [True, False, True, False]
    variables = model.init(0)
    assert variables[SEEN].tolist() == [1, 0, 1, 1]
    later = model.entered(variables, 1, 7)
    assert later[SEEN].tolist() == [1, 1, 1, 1]
    changed = (later["fc2.weight"] != variables["fc2.weight"]).any(1)
    assert changed.tolist() == [False, True, False, False]


class Fewer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(144, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(x.flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ((1, 8, 8), r"can't be applied to samples of the shape \(1, 8, 8\): RuntimeError: .*mat1 and mat2 shapes"),
        (SHAPE, r"gives logits \[3, 3\] for 3 samples, but the data have 4 classes; they must be \[3, 4\]"),
    ],
)
def test_a_model_that_does_not_fit_the_samples_is_refused(shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        growing(from_module(Fewer), TASKS, shape)


@pytest.mark.parametrize(
    ("name", "options", "kept"),
    [
        ("scaffold", {}, lambda fleet: [fleet.state.inner.control, *fleet.own.values()]),
        ("fednova", {"subtract_previous": True}, lambda fleet: [*fleet.own.values()]),
        ("fedcurv", {"samples": 4}, lambda fleet: [fleet.state.inner.fisher, fleet.state.inner.weighted]),
    ],
)
def test_a_method_keeps_zeros_for_the_rows_of_unseen_classes(
    name: str, options: dict[str, Any], kept: Callable[[Any], list[Tree]], little_fleet: Callable[..., Any]
) -> None:
    """What a method keeps is 0 for unseen classes, so there is nothing to undo when a task begins."""
    made = replace(INGREDIENTS, weight_decay=0.0)
    fleet = played(build_algorithm(name, options, made), little_fleet)
    trees = kept(fleet)
    assert len(trees) >= 2
    for tree in trees:
        assert tree["fc2.weight"][[1, 3]].abs().max() == 0
        assert tree["fc2.bias"][[1, 3]].abs().max() == 0
        assert tree["fc2.weight"][[0, 2]].abs().min() > 0


@pytest.mark.parametrize(
    ("loss", "begun", "later"),
    [
        # In the second task 3 and 1 are new: one row of them has a likelihood of 3/4 between these two.
        ("new_classes", np.log(4 / 3), np.log(4 / 3)),
        # All four compete then, at the temperature 0.9 of old classes and 1.1 of new ones.
        (
            "task_temperature",
            np.log(4 / 3),
            1.1 * np.log(1 + 3 * 3 ** (-1 / 0.9)) + 0.9 * np.log(1 + 3 * 3 ** (-1 / 1.1)),
        ),
    ],
)
def test_losses_of_tasks_tell_the_classes_of_the_present_task_from_earlier_ones(
    loss: str, begun: float, later: float
) -> None:
    criterion = find_criterion(loss, MODEL)
    facts = Facts(*[torch.tensor(0)] * 4, torch.tensor(1), torch.tensor(False), torch.zeros(4))
    # The samples are of the classes 0, 3 and 1, of which the last is padding.
    batch = Batch(torch.zeros(3, 1), torch.tensor([0, 3, 1]), torch.tensor([1.0, 1.0, 0.0]))
    logits = torch.eye(4)[batch.y] * np.log(3) * batch.weight[:, None]
    assert float(criterion(logits, batch, facts)) == pytest.approx(later, rel=1e-6)
    assert float(criterion(logits, batch, facts._replace(task=torch.tensor(0)))) == pytest.approx(begun, rel=1e-6)
