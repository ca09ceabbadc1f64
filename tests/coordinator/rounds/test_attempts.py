"""Rounds that are tried again, runs that diverge, and server jobs, in whole runs with a scripted fleet."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.interface import Context, ServerJob, Tree
from fedemu.algorithms.trees import model_digest
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.run import Run, read_run
from fedemu.coordinator.record.summary import Summary
from fedemu.coordinator.rounds import attempts
from fedemu.coordinator.rounds.server_job_worker import Place
from fedemu.coordinator.settings import Settings
from fedemu.protocol import messages as wire
from fedemu.protocol.code.own_code import Elsewhere
from fedemu.protocol.errors import ConfigurationError, QuorumError
from fedemu.protocol.ids import digest_of
from fedemu.protocol.wording import KILLED

Until = Callable[[Callable[[], object]], Awaitable[None]]

MakePlan = Callable[..., CoordinatorPlan]
MakeFleet = Callable[..., Any]
Play = Callable[[CoordinatorPlan], Awaitable[tuple[Summary, Run]]]


class Watcher(Observers):
    """An observer that remembers begun tries of rounds and the steps of server jobs, and counts events."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[int, int, float, int]] = []
        self.steps: list[tuple[str, int, int, int]] = []
        self.events: Counter[str] = Counter()

    def round_started(self, round: int, attempt: int, virtual_time: float, selected: int) -> None:
        self.begun.append((round, attempt, virtual_time, selected))

    def server_job(self, name: str, round: int, step: int, steps: int) -> None:
        self.steps.append((name, round, step, steps))

    def event(self, name: str, **fields: Any) -> None:
        self.events[name] += 1


async def test_a_round_with_too_few_replies_starts_again_with_another_cohort(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    states: dict[str, set[str | None]] = {}

    def script(index: int, work: wire.Work) -> Any:
        states.setdefault(work.ask, set()).add(work.state)
        return {"after": 900.0 if work.ask.startswith("2.0") and index > 1 else 10.0 + index}

    make_fleet(3, script=script)
    watcher = Watcher()
    summary, left = await play(make_plan(devices=3, per_round=3, quorum=1.0, rounds=2, observers=[watcher]))
    assert summary.outcome == "completed"
    assert watcher.begun == [(1, 0, 0.0, 3), (2, 0, 12.0, 3), (2, 1, 612.0, 3)]
    row = left.rows[1]
    assert (row.attempts, row.selected, row.accepted, row.late) == (2, 6, 5, 1)
    assert row.virtual_time == 12.0 + 600.0 + 12.0
    # Replies of the first attempt do not count: the second attempt starts where the first did.
    assert states == {"1.0.0": {None}, "2.0.0": {"1.0.0"}, "2.1.0": {"1.0.0"}}
    assert [(e["round"], e["attempt"], e["accepted"], e["needed"]) for e in left.named("retry")] == [(2, 0, 2, 3)]


async def test_an_own_state_that_was_lost_in_one_try_of_a_round_is_not_asked_for_in_the_next(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    states: dict[str, str | None] = {}

    def script(index: int, work: wire.Work) -> Any:
        if index == 0:
            states[work.ask] = work.state
        lost = index == 0 and work.state == "1.0.1"
        return {"after": 900.0 if work.ask == "2.0.1" and index else 10.0, "reply": "own_state" if lost else "good"}

    make_fleet(3, script=script)
    watcher = Watcher()
    _, left = await play(make_plan(devices=3, per_round=3, quorum=0.6, rounds=2, asks=2, observers=[watcher]))
    assert left.rows[1].attempts == 2
    assert [begun[:2] for begun in watcher.begun] == [(1, 0), (2, 0), (2, 1)], "a try begins once, with its first ask"
    assert states == {
        "1.0.0": None, "1.0.1": "1.0.0", "2.0.0": "1.0.1", "2.0.1": None, "2.1.0": None, "2.1.1": "2.1.0",
    }  # fmt: skip


async def test_a_run_without_quorum_ends_with_an_error_and_its_last_round(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    fleet = make_fleet(script=lambda index, work: {"after": 900.0 if work.ask.startswith("3.") else 10.0})
    plan = make_plan()
    with pytest.raises(
        QuorumError,
        match=r"Round 3 got 0 of the 2 replies that it needs in the last of its 3 tries; all devices .* were late",
    ) as late:
        await play(plan)
    assert late.value.__cause__ is None
    left = read_run(plan.directory)
    assert (left.summary["outcome"], left.summary["rounds"]) == ("quorum", 2)
    assert [event["attempt"] for event in left.named("retry")] == [0, 1], "the last attempt is followed by none"
    assert -1 in fleet.stopped


@pytest.mark.parametrize(
    ("tries", "times"), [(2, "in the last of its 2 tries; all devices failed, 8"), (1, "in its only try; .* 4")]
)
async def test_a_quorum_missed_because_training_fails_names_what_the_devices_said(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, tries: int, times: str
) -> None:
    make_fleet(script=lambda index, work: {"after": 10.0, "reply": "failed"})
    with pytest.raises(QuorumError, match=f"{times} times for one reason: the loss is not finite") as failed:
        await play(make_plan(attempts=tries))
    assert isinstance(failed.value.__cause__, Elsewhere), "a log tells where it was raised"


@pytest.mark.parametrize(
    ("quorum", "tries", "outcome", "retries"),
    [(0.75, 2, "completed", 2), (0.75, 3, "diverged", 2), (0.5, 3, "completed", 0)],
)
async def test_replies_that_are_not_finite_end_the_run_as_diverged_if_enough_came_with_them_in_the_last_try(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, quorum: float, tries: int, outcome: str, retries: int
) -> None:
    def script(index: int, work: wire.Work) -> Any:
        if work.ask not in {f"3.{attempt}.0" for attempt in range(tries)}:
            return {"after": 10.0}
        return {"after": 900.0 if index == 3 else 10.0, "reply": "good" if index else "nan"}

    make_fleet(4, script=script)
    summary, left = await play(make_plan(devices=4, per_round=4, over_selection=1.0, quorum=quorum, rounds=3))
    diverged = outcome == "diverged"
    assert (summary.outcome, summary.rounds, len(left.named("retry"))) == (outcome, 3 - diverged, retries)
    told = [event["detail"] for event in left.named("diverged")]
    assert told == ["1 of the 3 replies of round 3 was not finite, or beyond limits.max_norm"] * diverged


async def test_replies_beyond_the_largest_norm_end_the_run_as_diverged(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    summary, left = await play(make_plan(max_norm=1e-6))
    assert (summary.outcome, summary.rounds, len(left.named("retry"))) == ("diverged", 0, 2)
    (diverged,) = left.named("diverged")
    assert diverged["detail"] == "4 of the 4 replies of round 1 were not finite, or beyond limits.max_norm"


async def test_a_server_job_of_a_round_is_done_once_however_often_the_round_is_tried(
    make_plan: MakePlan, make_fleet: MakeFleet, tmp_path: Path, play: Play
) -> None:
    log = tmp_path / "log"

    def step(carry: Tree, index: int) -> tuple[Tree, bool]:
        with log.open("a") as file:  # the job runs in a process of its own
            file.write(f"{index} ")
        return {"x": carry["x"] + 1}, False

    job = ServerJob("count", lambda: {"x": torch.zeros(1)}, step, steps=3, checkpoint_every=1)
    make_fleet(script=lambda index, work: {"after": 900.0 if work.ask == "1.0.0" else 10.0})
    plan = make_plan(rounds=1, job=job)
    _, left = await play(plan)
    assert left.rows[0].attempts == 2
    assert [carry["x"].item() for carry in plan.algorithm.carries] == [3.0, 3.0]  # type: ignore[attr-defined]
    assert log.read_text() == "0 1 2 "


async def test_a_server_job_is_told_the_runs_settings_its_place_and_what_it_begins_from(
    make_plan: MakePlan, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    told: list[tuple[ServerJob, Settings]] = []
    places: list[Place] = []

    async def run(job: ServerJob, place: Place, settings: Settings, report: Any, died: Any) -> Tree:
        told.append((job, settings))
        places.append(place)
        return {}

    monkeypatch.setattr(attempts, "run_server_job", run)
    job = ServerJob("count", dict, lambda carry, index: (carry, True), 1, 1)
    make_fleet(script=lambda index, work: {"after": 900.0 if work.ask == "1.0.1" else 10.0})
    plan = make_plan(rounds=1, asks=2, job=job, seed=7)
    _, left = await play(plan)
    assert left.rows[0].attempts == 2
    assert told == [(job, plan.settings)] * 4
    checkpoint = plan.directory / "checkpoint"
    assert {(place.directory, place.round, place.seed) for place in places} == {(checkpoint, 1, 7)}
    # The first job is the first request of the script, and the second one follows an ask.
    assert [(place.attempt, place.ordinal) for place in places] == [(0, 0), (0, 2), (0, 0), (1, 2)]
    first, second, again, third = (place.basis for place in places)
    assert first == again == digest_of(model_digest(plan.variables).encode(), b"[]")
    assert len({first, second, third}) == 3, "other devices replied to the second try"


async def test_rounds_with_server_jobs_ask_the_same_devices_by_the_same_names_as_rounds_without(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    asked: set[tuple[str, int]] = set()

    def script(index: int, work: wire.Work) -> Any:
        asked.add((work.ask, index))
        return {"after": 10.0}

    job = ServerJob("count", lambda: {"x": torch.zeros(1)}, lambda carry, index: (carry, True), 1, 1)
    fleet = make_fleet(script=script)
    _, left = await play(make_plan("without", asks=2))
    await fleet.close()
    assert all(row.selected < 2 * 6 for row in left.rows), "cohorts are drawn"
    without = set(asked)
    asked.clear()
    make_fleet(script=script)
    await play(make_plan("with", asks=2, job=job))
    assert asked == without


async def test_what_a_method_draws_follows_from_the_seed_the_round_and_how_far_its_script_is(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), np.random.random(), torch.rand(()).item()

    async def drawn(folder: str, seed: int) -> list[tuple[str, int, tuple[float, ...]]]:
        made: list[tuple[str, int, tuple[float, ...]]] = []
        plan = make_plan(folder, rounds=2, seed=seed)
        method = type(plan.algorithm)
        initial, script = method.init, method.round

        def init(self: Any, variables: Tree, context: Context) -> Any:
            made.append(("init", context.round, draw()))
            return initial(self, variables, context)

        def round(self: Any, state: Any, context: Context) -> Generator[Any, Any, Any]:
            made.append(("begin", context.round, draw()))
            after = yield from script(self, state, context)
            made.append(("end", context.round, draw()))
            return after

        def remarks(self: Any, state: Any) -> dict[str, float]:
            return dict(zip(("python", "numpy", "torch"), draw(), strict=True))

        # A class of its own: Python remembers which classes make remarks.
        drawing = type("Drawing", (method,), {"init": init, "round": round, "remarks": remarks})
        fleet = make_fleet(script=lambda index, work: {"after": 900.0 if work.ask == "1.0.0" else 10.0})
        _, left = await play(replace(plan, algorithm=drawing()))
        await fleet.close()
        return made + [("remarks", row.round, tuple(row.remarks.values())) for row in left.rows]

    first = await drawn("first", 1)
    calls = "init 0, begin 1, begin 1, end 1, begin 2, end 2, remarks 1, remarks 2"
    assert ", ".join(f"{name} {round}" for name, round, _ in first) == calls
    assert first[1] == first[2], "a round that is tried again draws the same"
    assert len({number for _, _, numbers in first for number in numbers}) == 3 * 7
    again, other = await drawn("again", 1), await drawn("other", 2)
    assert again == first
    assert not {each[2] for each in other} & {each[2] for each in first}


async def test_a_server_job_is_seen_to_advance_and_its_end_is_an_event(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    def step(carry: Tree, index: int) -> tuple[Tree, bool]:
        return carry, index == 3

    job = ServerJob("distil", lambda: {"x": torch.zeros(1)}, step, steps=50, checkpoint_every=10)
    make_fleet()
    watcher = Watcher()
    _, left = await play(make_plan(rounds=2, job=job, observers=[watcher]))
    assert {(name, steps) for name, _, _, steps in watcher.steps} == {("distil", 50)}
    assert [step for _, round, step, _ in watcher.steps if round == 2][-1] == 4
    ends = left.named("server_job")
    assert [(end["job"], end["round"], end["steps"]) for end in ends] == [("distil", 1, 4), ("distil", 2, 4)]
    assert [row.server_seconds for row in left.rows] == [end["seconds"] for end in ends]
    assert all(0 < row.server_seconds < row.coordinator_seconds < row.round_seconds for row in left.rows)


async def test_devices_stay_alive_through_a_long_server_job_and_one_that_falls_silent_is_noticed(
    make_plan: MakePlan, make_fleet: MakeFleet, tmp_path: Path, play: Play, until: Until
) -> None:
    begun, over = tmp_path / "begun", tmp_path / "over"

    def step(carry: Tree, index: int) -> tuple[Tree, bool]:
        begun.touch()
        while not over.exists():
            time.sleep(0.001)
        return carry, True

    job = ServerJob("distil", lambda: {"x": torch.zeros(1)}, step, steps=1, checkpoint_every=1)
    fleet, watcher = make_fleet(), Watcher()
    running = asyncio.create_task(play(make_plan(rounds=1, job=job, patience=16, observers=[watcher])))
    await until(begun.exists)
    silent = fleet.devices[4]
    silent.vanish()
    await until(lambda: watcher.events["silence"] > 0)
    silent.gone = False
    silent.connect()
    over.touch()
    summary, left = await running
    assert [event["device"] for event in left.named("silence")] == [4]
    assert (summary.outcome, summary.perturbed) == ("completed", False)
    assert left.rows[0].server_seconds > 0.5
    assert watcher.steps[0] == ("distil", 1, 0, 1)


async def test_the_death_of_a_server_job_is_an_event(
    make_plan: MakePlan, make_fleet: MakeFleet, tmp_path: Path, play: Play
) -> None:
    def step(carry: Tree, index: int) -> tuple[Tree, bool]:
        if not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return carry, True

    job = ServerJob("distil", lambda: {"x": torch.zeros(1)}, step, steps=5, checkpoint_every=1)
    make_fleet()
    _, left = await play(make_plan(rounds=1, job=job))
    (death,) = left.named("server_job_died")
    assert (death["job"], death["round"], death["cause"]) == ("distil", 1, KILLED)
    assert len(left.named("server_job")) == 1


async def test_a_script_without_a_next_state_ends_the_run_with_a_sentence(
    make_plan: MakePlan, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    make_fleet()
    plan = make_plan()
    monkeypatch.setattr(type(plan.algorithm), "round", lambda *_: (request for request in ()))
    with pytest.raises(ConfigurationError, match="round ended without a state; it must return the next one"):
        await play(plan)


async def test_a_script_whose_next_state_is_of_another_kind_ends_the_run_with_a_sentence(
    make_plan: MakePlan, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    def script(algorithm: Any, state: Any, context: Any) -> Generator[Any, Any, Any]:
        return {"model": state.model}
        yield

    make_fleet()
    plan = make_plan()
    monkeypatch.setattr(type(plan.algorithm), "round", script)
    with pytest.raises(ConfigurationError, match="returned a dict; it must return the next state, a MeanState as bef"):
        await play(plan)


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (17, "yielded an int; it may yield Ask and ServerJob$"),
        ((_ for _ in ()), "a generator; it may .* ServerJob, and `yield from` plays the round of another method$"),
    ],
)
async def test_a_script_that_yields_something_else_ends_the_run_with_a_sentence(
    make_plan: MakePlan, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, play: Play, thing: object, said: str
) -> None:
    closed: list[str] = []

    def script(*_: object) -> Generator[Any, Any, Any]:
        try:
            yield thing
        finally:
            closed.append(threading.current_thread().name)

    make_fleet()
    plan = make_plan()
    monkeypatch.setattr(type(plan.algorithm), "round", script)
    with pytest.raises(ConfigurationError, match=said):
        await play(plan)
    assert closed == ["numerics_0"], "it ends where it began, before the coordinator does"
