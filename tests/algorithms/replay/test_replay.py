"""Replay around methods: rounds, states, the asks at the end of a period, the payloads, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.incremental.task_by_task import TaskByTask
from fedemu.algorithms.interface import Ask, Context, Measuring, Outcome, Remarking, Script, Selecting, total
from fedemu.algorithms.methods.fedavg import FedAvg, FedAvgState, fedavg
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.registry import build_algorithm, build_terms
from fedemu.algorithms.replay.directions import Directions
from fedemu.algorithms.replay.notes import NotingLogits
from fedemu.algorithms.replay.replay import COMPUTES_GRADIENTS, LOOKS_AT_MODEL, with_replay
from fedemu.algorithms.replay.selection.selection import STRATEGIES
from fedemu.algorithms.replay.settings import ReplaySettings
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.terms.local_term import LocalTerm
from fedemu.algorithms.terms.remembering import WithTerms
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.algorithms.trees import flatten as wire_names
from fedemu.coordinator.record.outline import put_together, taken_apart
from fedemu.device.compute.executors.serial import Serial
from fedemu.protocol.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")

MODEL = mlp((1, 12, 12), 4, (6,))
BUDGET = 5
STRATEGY_NAMES = [name for name in (*STRATEGIES, "coordinated") if name != "none"]
STREAM = [[np.arange(100 * t + 30 * i, 100 * t + 30 * i + size) for i, size in enumerate((12, 3, 0))] for t in range(3)]
"""Three devices, with more samples than the budget, with fewer, and with none."""


class Idle:
    """A method that asks no device, so that the model stays as it is."""

    programs: Mapping[str, Any] = {}

    def init(self, variables: Any, context: Context) -> Any:
        return variables

    def round(self, state: Any, context: Context) -> Any:
        yield from ()
        return state

    def variables(self, state: Any) -> Any:
        return state


def ingredients(**fields: Any) -> Ingredients:
    return replace(Ingredients(MODEL, cross_entropy, 4, 1, 4, 0.05, devices=3, input_shape=(1, 12, 12)), **fields)


@cache
def inner(method: str) -> Any:
    """A method without replay. Algorithms have no state, so all tests may have the same."""
    return build_algorithm(method, {}, ingredients())


def built(strategy: str, method: str = "fedavg", **fields: Any) -> Any:
    return with_replay(inner(method), ReplaySettings(strategy, BUDGET, periods=len(STREAM), **fields), ingredients())


@pytest.fixture(scope="module")
def executor() -> Serial:
    """It records the steps of a method once for all tests."""
    return Serial()


@pytest.fixture(scope="module")
def fleet(little_fleet: Callable[..., Any], executor: Serial) -> Callable[..., Any]:
    """A fleet whose periods take two rounds each."""

    def begin(algorithm: Any, budget: int = BUDGET, stream: Any = STREAM) -> Any:
        settings = {"budget": budget, "rounds_per_period": 2, "executor": executor}
        return little_fleet(algorithm, MODEL.init(0), [], stream=stream, **settings)

    return begin


@pytest.fixture(scope="module")
def two_rounds(fleet: Callable[..., Any]) -> Callable[[str, str], Any]:
    """``two_rounds(strategy, objective)``: a fleet after the rounds of its first period. Play no more rounds of it."""
    return cache(lambda strategy, objective: play(fleet(built(strategy, objective=objective)), 2))


def play(fleet: Any, rounds: int) -> Any:
    for _ in range(rounds):
        fleet.play([0, 1])
    return fleet


def kept(fleet: Any) -> dict[int, list[int]]:
    return {device: buffer.indices.tolist() for device, buffer in sorted(fleet.buffers.items())}


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_devices_select_when_a_period_ends_within_budget_and_the_same_each_time(fleet: Any, strategy: str) -> None:
    played = play(fleet(built(strategy)), 1)
    assert [ask.program for ask in played.asks] == ["train"]
    assert played.algorithm.remarks(played.state) == {}
    play(played, 3)
    period = ["train", "train", *["gradient_sum"] * (strategy == "coordinated"), "select"]
    assert [ask.program for ask in played.asks] == period * 2
    for device, parts in enumerate(zip(*STREAM, strict=True)):
        buffer, had = played.buffers[device], np.concatenate(parts[:2])
        assert len(buffer) == min(BUDGET, len(had))
        assert set(buffer.indices) <= set(had)
        assert (buffer.periods == buffer.indices // 100).all()
        assert (buffer.period, buffer.seen) == (2, len(had))
    assert kept(play(fleet(built(strategy)), 4)) == kept(played)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_the_model_is_sent_only_to_strategies_that_look_at_it(two_rounds: Any, strategy: str) -> None:
    ask = two_rounds(strategy, "cheap").asks[-1]
    assert ask.cohort == "online"
    assert ask.optional
    assert ("model" in ask.shared) == (strategy in LOOKS_AT_MODEL)
    assert (built(strategy).selection.passes > 0) == (strategy in LOOKS_AT_MODEL)


def test_nothing_is_asked_after_the_last_period(fleet: Any) -> None:
    assert [ask.program for ask in play(fleet(built("reservoir")), 6).asks[-2:]] == ["train", "train"]


def test_the_kept_samples_are_recorded_by_label_and_period(fleet: Any) -> None:
    played = play(fleet(built("class_balanced")), 4)
    indices = np.concatenate([buffer.indices for buffer in played.buffers.values()])
    assert played.algorithm.remarks(played.state) == {
        "replay": {
            "period": 1,
            "devices": 3,
            "samples": 10,
            "labels": np.bincount(indices % 4, minlength=4).tolist(),
            "periods": np.bincount(indices // 100, minlength=3).tolist(),
        }
    }


def slow_directions(corpus: Corpus, indices: list[int]) -> Any:
    """The directions ``[n, d]`` of the gradients of single samples, one after the other."""
    rows = []
    x, y = corpus.batch(corpus.train, np.array(indices))
    for i in range(len(indices)):
        variables = {name: leaf.clone().requires_grad_() for name, leaf in MODEL.init(0).items()}
        loss = torch.nn.functional.cross_entropy(MODEL.apply(variables, x[i : i + 1], False)[0].logits, y[i : i + 1])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(variables.values()))]).double()
        rows.append(gradient / gradient.norm())
    return torch.stack(rows)


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_the_objective_of_the_kept_samples_is_the_squared_norm_of_the_sum_of_their_directions(
    little_fleet: Any, corpus: Corpus, strategy: str
) -> None:
    still = with_replay(Idle(), ReplaySettings(strategy, BUDGET, periods=3, objective="always"), ingredients())
    played = little_fleet(still, MODEL.init(0), [], stream=STREAM, budget=BUDGET)
    played.play([])
    indices = [i for kept_of_one in kept(played).values() for i in kept_of_one]
    said = still.remarks(played.state)["replay"]
    assert said["samples"] == len(indices) == 8
    assert said["objective"] == pytest.approx(float(slow_directions(corpus, indices).sum(0).square().sum()), rel=1e-4)


@pytest.mark.parametrize("objective", ["cheap", "always", "never"])
def test_the_objective_is_measured_where_it_is_cheap_or_wanted_and_changes_no_choice(
    two_rounds: Any, objective: Any
) -> None:
    for strategy in STRATEGY_NAMES:
        played = two_rounds(strategy, objective)
        said = played.algorithm.remarks(played.state)["replay"]
        measured = objective == "always" or (objective == "cheap" and strategy in COMPUTES_GRADIENTS)
        assert ("objective" in said) == measured
        unneeded = {"model"} if measured and strategy not in LOOKS_AT_MODEL else set()
        assert played.algorithm.selection.measured == unneeded | ({"kept"} if measured else set())
        assert isinstance(played.algorithm.selection, Measuring)
        assert kept(played) == kept(two_rounds(strategy, "never"))


@pytest.mark.parametrize("objective", ["always", "never"])
def test_the_sum_that_measures_is_no_part_of_a_selection_that_notes_logits_and_the_model_is(objective: Any) -> None:
    for strategy in STRATEGY_NAMES:
        selection: Any = built(strategy, objective=objective, logits=True).selection
        assert isinstance(selection, NotingLogits)
        assert isinstance(selection, Measuring)
        assert selection.measured == ({"kept"} if objective == "always" else set())


def test_gradients_that_are_not_finite_make_no_objective_and_do_no_harm(fleet: Any) -> None:
    def broken(logits: Any, batch: Any, facts: Any) -> Any:
        return logits.sum() * float("nan")

    wrong = ingredients(criterion=broken)
    settings = ReplaySettings("naive_uniform", BUDGET, periods=3, objective="always")
    played = fleet(with_replay(Idle(), settings, wrong))
    played.play([])
    played.play([])
    assert played.algorithm.remarks(played.state)["replay"]["objective"] == 0.0
    assert {device: len(indices) for device, indices in kept(played).items()} == {0: 5, 1: 3, 2: 0}


def test_a_sum_with_one_value_that_is_not_finite_counts_as_nothing(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weighted_sum = Directions.weighted_sum

    def with_a_hole(directions: Directions, x: Any) -> Any:
        summed = weighted_sum(directions, x)
        next(iter(summed.values())).flatten()[0] = float("nan")
        return summed

    monkeypatch.setattr(Directions, "weighted_sum", with_a_hole)
    played = play(fleet(built("naive_uniform", objective="always")), 2)
    assert played.algorithm.remarks(played.state)["replay"]["objective"] == 0.0


def test_without_a_census_only_the_number_of_samples_is_told(fleet: Any) -> None:
    played = play(fleet(built("naive_uniform", census=False)), 2)
    assert played.algorithm.remarks(played.state) == {"replay": {"period": 0, "devices": 3, "samples": 8}}
    assert list(wire_names(played.payloads[0])) == ["census/samples"]


def test_unlabelled_data_have_no_census_of_labels() -> None:
    unlabelled = ingredients(labelled=False)
    algorithm: Any = with_replay(fedavg(unlabelled), ReplaySettings("reservoir", periods=2), unlabelled)
    assert {name: leaf.shape for name, leaf in algorithm.selection.payload({})["census"].items()} == {
        "samples": (1,),
        "periods": (2,),
    }


@pytest.mark.parametrize("form", ["mean", "each"])
def test_only_sums_a_flag_and_the_census_leave_a_device(fleet: Any, form: str) -> None:
    """All sums have the shapes of the model's leaves: no payload has a row per sample."""
    played = play(fleet(built("coordinated", targets=form, iterations=2)), 1)
    played.play([0, 1], online=[[0, 1, 2], [0, 2], [0, 1]])
    sums = {name: (leaf.shape, leaf.dtype) for name, leaf in MODEL.init(0).items()}
    counts = {"samples": 1, "labels": 4, "periods": 3}
    census = {f"census/{name}": (torch.Size([size]), torch.int64) for name, size in counts.items()}
    kept_sums = {f"kept/{name}": what for name, what in sums.items()}
    joined = {"joined/devices": (torch.Size([1]), torch.int64)} if form == "mean" else {}
    key = "change" if form == "mean" else "sum"
    expected = {f"{key}/{name}": what for name, what in sums.items()} | joined
    _, first, second, last = played.sent
    for answers, leaves in ((first, expected), (second, expected), (last, census | kept_sums)):
        for payload in answers.values():
            assert {name: (leaf.shape, leaf.dtype) for name, leaf in wire_names(payload).items()} == leaves
    assert all(not result.metrics and result.label_counts is None for result in played.results.values())


def test_a_payload_has_the_promised_form(fleet: Any) -> None:
    played = play(fleet(built("coordinated")), 2)
    for ask, answers in zip(played.asks[-2:], played.sent[-2:], strict=True):
        promised = wire_names(played.algorithm.programs[ask.program].payload(ask.shared))
        for payload in answers.values():
            sent = wire_names(payload)
            assert {name: (leaf.shape, leaf.dtype) for name, leaf in sent.items()} == {
                name: (leaf.shape, leaf.dtype) for name, leaf in promised.items()
            }


def test_both_wire_forms_select_alike_with_a_real_model(fleet: Any) -> None:
    stream = [[np.arange(100 * t + 25 * i, 100 * t + 25 * i + 14) for i in range(4)] for t in range(2)]
    by_mean, by_each = (
        play(fleet(built("coordinated", targets=form, iterations=3), stream=stream), 2) for form in ("mean", "each")
    )
    first, second = (played.algorithm.remarks(played.state)["coordination"] for played in (by_mean, by_each))
    assert first["devices"] == second["devices"] == 4
    assert first["objective"] == pytest.approx(second["objective"], rel=1e-5)
    assert first["objective"] == sorted(first["objective"], reverse=True)
    assert kept(by_mean) == kept(by_each)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "moon", "fedcurv"])
def test_rounds_states_and_model_are_those_of_the_method(fleet: Any, little_fleet: Any, method: str) -> None:
    replayed = play(fleet(built("coordinated", method)), 2)
    plain = little_fleet(inner(method), MODEL.init(0), STREAM[0])
    play(plain, 2)
    assert all(torch.equal(leaf, plain.model[name]) for name, leaf in replayed.model.items())
    tensors: dict[str, torch.Tensor] = {}
    outline = json.loads(json.dumps(taken_apart(replayed.state, tensors)))
    example = replayed.algorithm.init(MODEL.init(0), Context(0, 0, 0, 4))
    restored = put_together(outline, tensors, example)
    assert type(restored.inner) is type(replayed.state.inner)
    assert restored.remarks == replayed.state.remarks
    assert taken_apart(restored, {}) == taken_apart(replayed.state, {})


def test_training_goes_over_the_buffer_and_the_periods_samples(fleet: Any) -> None:
    played = play(fleet(built("naive_uniform")), 3)
    assert [played.results[device].examples for device in (0, 1)] == [5 + 12, 3 + 3]


def test_a_device_that_was_away_selects_at_its_next_work(fleet: Any) -> None:
    played = play(fleet(built("coordinated")), 1)
    played.play([1], online=[[1], [1]])
    assert kept(played)[0] == []
    played.play([0, 1])
    assert len(played.buffers[0]) == BUDGET
    assert played.buffers[0].period == 1


def test_replay_selects_and_remarks_and_keeps_the_remarks_of_the_method() -> None:
    class Talking:
        programs: Mapping[str, Any] = {}

        def init(self, variables: Any, context: Any) -> Any:
            return variables

        def remarks(self, state: Any) -> Any:
            return {"said": 3}

    talking: Any = Talking()
    algorithm: Any = with_replay(talking, ReplaySettings("reservoir"), ingredients())
    assert isinstance(algorithm, Selecting)
    assert isinstance(algorithm, Remarking)
    assert algorithm.remarks(algorithm.init({}, Context(0, 0, 0, 4))) == {"said": 3}


def test_without_a_strategy_the_method_stays_as_it_is() -> None:
    method = fedavg(ingredients())
    assert with_replay(method, ReplaySettings("none"), ingredients()) is method


class Oldest:
    """Keeps the samples that came first."""

    passes = 0.0
    declares_label_counts = False

    def payload(self, shared: Any) -> Any:
        return {"census": {"samples": torch.zeros(())}}

    def ask(self, memory: Any, shared: Any, own: Any, facts: Any) -> Any:
        kept = torch.arange(len(memory.indices))[: memory.budget]
        return Outcome({"census": {"samples": torch.tensor(float(len(kept)))}}, {}), kept


class Keeping(FedAvg):
    """A method that lets devices select by itself."""

    def __init__(self, ingredients: Ingredients) -> None:
        super().__init__(ingredients)
        self.selection = Oldest()
        self.programs = {**self.programs, "keep": self.selection}

    def round(self, state: FedAvgState, context: Context) -> Script[FedAvgState]:
        state = yield from super().round(state, context)
        if context.task_ends:
            yield Ask("keep", {}, {"census": total}, "online", optional=True)
        return state


def test_a_method_that_selects_by_itself_stays_as_it_is_with_the_strategy_own(fleet: Any) -> None:
    method = Keeping(ingredients())
    algorithm = with_replay(method, ReplaySettings("own", BUDGET, periods=len(STREAM)), ingredients())
    assert algorithm is method
    assert kept(play(fleet(algorithm), 4)) == {0: [0, 1, 2, 3, 4], 1: [30, 31, 32, 130, 131], 2: []}


def test_what_lies_around_a_method_shows_the_question_by_which_it_selects() -> None:
    method = Keeping(ingredients())
    tasks = ClassTasks(np.arange(4), np.array([0, 2, 4]))
    model = growing(MODEL, tasks, (1, 12, 12))
    terms = {"mine": LocalTerm("mine", lambda model, at: at.facts.lr.new_zeros(()), previous=False)}
    for wrapped in (TaskByTask(method, model), WithTerms(method, terms, MODEL)):
        assert isinstance(wrapped, Selecting)
        assert wrapped.selection is method.selection
    for wrapped in (TaskByTask(fedavg(ingredients()), model), WithTerms(fedavg(ingredients()), terms, MODEL)):
        assert not isinstance(wrapped, Selecting)


def test_terms_that_need_samples_or_notes_do_not_go_with_a_method_that_selects_by_itself() -> None:
    method = Keeping(ingredients())
    with pytest.raises(
        ConfigurationError, match=r"^algorithm\.terms\.ewc asks devices for importances when a task ends"
    ):
        WithTerms(method, build_terms({"ewc": {}}, ingredients()), MODEL)
    with pytest.raises(ConfigurationError, match=r"does not note the logits of samples, which algorithm\.terms\.der"):
        with_replay(method, ReplaySettings("own", BUDGET, logits=True), ingredients())


def test_either_the_method_selects_or_a_strategy() -> None:
    with pytest.raises(ConfigurationError, match=r"this method has no 'selection'; choose another strategy"):
        with_replay(fedavg(ingredients()), ReplaySettings("own", BUDGET), ingredients())
    with pytest.raises(ConfigurationError, match=r"'selection' of its own; set replay\.strategy = 'own'"):
        with_replay(Keeping(ingredients()), ReplaySettings("reservoir", BUDGET), ingredients())


@pytest.mark.parametrize("strategy", COMPUTES_GRADIENTS)
def test_samples_without_a_gradient_are_selected_all_the_same(fleet: Any, strategy: str) -> None:
    flat = ingredients(criterion=lambda logits, batch, facts: 0.0 * logits.sum())
    algorithm = with_replay(fedavg(flat), ReplaySettings(strategy, BUDGET, periods=3), flat)
    assert {device: len(indices) for device, indices in kept(play(fleet(algorithm), 2)).items()} == {0: 5, 1: 3, 2: 0}
