"""Which rounds are evaluated, and what their rows tell of periods and of the method."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedemu.algorithms import built_again
from fedemu.algorithms.interface import Context, Tree
from fedemu.coordinator.evaluation.evaluate import Evaluation
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.run import Run
from fedemu.coordinator.record.summary import Summary
from fedemu.protocol.errors import ConfigurationError

MakePlan = Callable[..., CoordinatorPlan]
MakeFleet = Callable[..., Any]
Play = Callable[[CoordinatorPlan], Awaitable[tuple[Summary, Run]]]

PAGE = (Path(__file__).parents[3] / "docs" / "run_directory.md").read_text(encoding="utf-8")


class PeriodJudge:
    """An evaluator with an accuracy of 1 on the seen periods, and no loss on them."""

    chance: float | None = None
    periods = 2

    def __init__(self) -> None:
        self.asked: list[int | None] = []
        self.on_all: list[bool] = []

    def evaluate(self, variables: Tree, period: int | None = None, on_all: bool = True) -> Evaluation:
        self.asked.append(period)
        self.on_all.append(on_all)
        found = (1.0, float(period == 1))
        return Evaluation(0.5, 2.0, (0.5,), (2.0,), 7.5, 1.0, float("nan"), found, (2.0, 2.0))


def remarking(algorithm: Any, contexts: list[Context], threads: set[str]) -> Any:
    """The algorithm with remarks: its model's first value after each round.

    Its contexts are kept in ``contexts``, and the names of the threads in which it makes remarks in ``threads``.
    """
    base = type(algorithm)

    def round(self: Any, state: Any, context: Context) -> Any:
        contexts.append(context)
        return base.round(self, state, context)

    def remarks(self: Any, state: Any) -> Mapping[str, Any]:
        threads.add(threading.current_thread().name)
        return {"first": [float(state.model["w"][0])]}

    told = type("Told", (base,), {"round": round, "remarks": remarks})
    return told()


def two_periods(round: int) -> int:
    """The period of a round. The first has two rounds, the second has all others."""
    return min((round - 1) // 2, 1)


async def test_the_last_round_of_a_period_and_of_the_run_are_always_evaluated(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    judge = PeriodJudge()
    _, left = await play(make_plan(rounds=5, evaluate_every=4, task_of_round=two_periods, evaluator=judge))
    assert [row.task for row in left.rows] == [0, 0, 1, 1, 1]
    assert [row.accuracy is not None for row in left.rows] == [False, True, False, True, True]
    assert judge.asked == [None, 0, 1, 1]
    # The model before the first round is tested too, for what earlier periods teach about later ones.
    assert [row.untrained_period_accuracy for row in left.rows] == [(1.0, 0.0), None, None, None, None]
    unknown, known = left.rows[2], left.rows[4]
    columns = ("perplexity", "seen_accuracy", "seen_loss", "period_accuracy", "period_loss")
    assert [getattr(unknown, column) for column in columns] == [None] * 5
    assert [getattr(known, column) for column in columns] == [7.5, 1.0, None, (1.0, 1.0), (2.0, 2.0)]
    assert left.summary["periods"]["rounds"] == [2, 5]
    assert left.summary["periods"]["accuracy"] == [[1.0, 0.0], [1.0, 1.0]]
    assert left.summary["periods"]["all_period_perplexity"] == [7.5, 7.5]


async def test_the_initial_model_is_tested_also_by_a_run_that_ends_in_its_first_period_and_may_go_on(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    _, left = await play(make_plan(rounds=2, task_of_round=two_periods, evaluator=PeriodJudge()))
    assert [row.untrained_period_accuracy for row in left.rows] == [(1.0, 0.0), None]


async def test_between_full_evaluations_a_part_of_the_test_samples_does(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    judge = PeriodJudge()
    rules = {"evaluate_every": 2, "evaluate_all_every": 3, "task_of_round": lambda round: int(round > 4)}
    await play(make_plan(rounds=7, evaluator=judge, **rules))
    # The model before round 1, and rounds 2, 3, 4, 6 and 7: round 4 ends a period, and round 7 the run.
    assert judge.on_all == [True, False, True, True, True, True]


async def test_a_method_is_told_where_a_period_ends_and_its_remarks_are_in_the_row(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    contexts: list[Context] = []
    threads: set[str] = set()
    plan = make_plan(rounds=5, task_of_round=two_periods)
    _, left = await play(replace(plan, algorithm=remarking(plan.algorithm, contexts, threads)))
    assert [(context.task, context.task_ends) for context in contexts] == [
        (0, False), (0, True), (1, False), (1, False), (1, False),
    ]  # fmt: skip
    # The fake evaluator's loss is the model's first value.
    assert [row.remarks for row in left.rows] == [{"first": [row.loss]} for row in left.rows]
    assert threads == {"numerics_0"}, "meanwhile the event loop hears the fleet"


async def test_a_method_that_keeps_something_outside_of_its_state_or_changes_it_in_place_is_told_of_once(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built_again, "is_own", lambda file: file == __file__)
    make_fleet()
    plan = make_plan(rounds=3)

    class Careless(type(plan.algorithm)):  # type: ignore[misc]
        seen = 0

        def round(self, state: Any, context: Context) -> Any:
            self.seen += 1
            state.model["b"].mul_(0.5)
            return (yield from super().round(state, context))

    _, left = await play(replace(plan, algorithm=Careless()))
    told = [(event["event"], event["round"], event["what"]) for event in left.events if "what" in event]
    assert told == [("kept_outside", 1, "seen"), ("state_changed", 1, "model.b")]
    make_fleet()
    _, left = await play(make_plan("careful", rounds=2))
    assert not [event for event in left.events if "what" in event]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (3, r"is an int; it must be numbers by"),
        ({"loss": torch.ones(1), "at": {"place": [1, Path()]}}, r"has a PosixPath as 'at.place'; make it a number"),
    ],
)
async def test_remarks_without_names_and_objects_among_them_are_refused_in_a_sentence(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, said: Any, words: str
) -> None:
    make_fleet()
    plan = make_plan(rounds=1)
    algorithm = type("Told", (type(plan.algorithm),), {"remarks": lambda self, state: said})()
    with pytest.raises(ConfigurationError, match=rf"the algorithm's remarks\(state\) {words}"):
        await play(replace(plan, algorithm=algorithm))


async def test_without_periods_their_columns_are_there_and_empty(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    _, left = await play(make_plan(rounds=2))
    for row in left.rows:
        assert (row.seen_accuracy, row.period_accuracy, row.perplexity) == (None, None, None)
        assert row.remarks == {}
    assert left.summary["periods"] is None


async def test_the_page_names_the_keys_of_a_summary(make_plan: MakePlan, make_fleet: MakeFleet, play: Play) -> None:
    make_fleet()
    _, left = await play(make_plan(rounds=1))
    section = PAGE.partition("## summary.json\n")[2].partition("\n## ")[0].partition("\n\n`periods` ")[0]
    named = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    keys = {key for names in named for key in re.findall(r"`(\w+)`", names)}
    assert keys == {field.name for field in fields(Summary)} == set(left.summary)


async def test_evaluation_is_done_as_often_as_asked_and_at_the_end(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    _, left = await play(make_plan(rounds=5, evaluate_every=2))
    assert [row.accuracy is not None for row in left.rows] == [False, True, False, True, True]
    assert [row.round_forgetting for row in left.rows] == [None, None, None, 0.0, 0.0]


def spoiled(plan: CoordinatorPlan, spoil: Callable[[Tree], Tree]) -> CoordinatorPlan:
    """The plan with a method whose global model is ``spoil(model)`` after round 3."""
    base: Any = type(plan.algorithm)

    def round(self: Any, state: Any, context: Context) -> Any:
        state = yield from base.round(self, state, context)
        return replace(state, model=spoil(state.model)) if context.round == 3 else state

    return replace(plan, algorithm=type("Spoiling", (base,), {"round": round})())


async def test_a_model_that_is_not_finite_any_more_ends_the_run_with_the_round_before(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    infinite = torch.tensor([0.0, 0.0, math.inf])
    summary, left = await play(spoiled(make_plan(), lambda model: {**model, "w": infinite}))
    assert (summary.outcome, summary.rounds) == ("diverged", 2)
    assert [row.round for row in left.rows] == [1, 2]
    assert [event["detail"] for event in left.named("diverged")] == ["w has values that are not finite after round 3"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda model: {"b": model["b"]}, r"lacks the variable 'w'"),
        (lambda model: {**model, "w": torch.zeros(1)}, r"has 'w' as \[1\], where the model has \[3\]"),
        (
            lambda model: {**model, "w": torch.zeros(3, dtype=torch.float64)},
            r"has 'w' of torch\.float64, where the model has torch\.float32",
        ),
    ],
)
async def test_a_state_without_the_whole_model_ends_the_run(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, spoil: Callable[[Tree], Tree], words: str
) -> None:
    make_fleet()
    with pytest.raises(ConfigurationError, match=rf"the algorithm's variables\(state\) {words}; it must be the whole"):
        await play(spoiled(make_plan(), spoil))


async def test_the_real_bytes_of_a_row_are_those_of_its_round(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    _, left = await play(make_plan())
    for name in ("wire_bytes_down", "wire_bytes_up"):
        first, *others = (getattr(row, name) for row in left.rows)
        assert 0 < max(others) < 1.5 * min(others), "one round is as the other"
        assert first > 0


async def test_the_model_in_the_directory_is_the_one_that_was_evaluated(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    plan = make_plan()
    _, left = await play(plan)
    model = load_file(plan.directory / "model.safetensors")
    assert float(model["w"][0]) == left.rows[-1].loss
    assert torch.equal(model["w"], model["w"][0].expand(3))
