"""A round is evaluated and made durable beside the next one, and no accident at that time changes the run."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedemu.algorithms.interface import ServerJob, Tree
from fedemu.coordinator.evaluation.evaluate import Evaluation
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record import checkpoint
from fedemu.coordinator.record.json_lines import read_lines
from fedemu.coordinator.record.records import read_record, recorded_rounds
from fedemu.coordinator.record.run import Run, read_run
from fedemu.coordinator.record.summary import Summary
from fedemu.coordinator.serve import serve
from fedemu.protocol.errors import FedemuError, QuorumError
from fedemu.protocol.transport.memory import MemoryNetwork

MakePlan = Callable[..., CoordinatorPlan]
MakeFleet = Callable[..., Any]
Play = Callable[[CoordinatorPlan], Awaitable[tuple[Summary, Run]]]
PATIENCE = 30.0
"""Real seconds after which a test that waits for another thread gives up."""


class Slow:
    """An evaluator that takes until ``ready`` says that it may end. It then gives an accuracy of a half."""

    chance: float | None = None
    periods = 1

    def __init__(self, ready: Callable[[int], bool]) -> None:
        self.evaluations = 0
        self._ready = ready

    def evaluate(self, variables: Tree, period: int | None = None, on_all: bool = True) -> Evaluation:
        self.evaluations += 1
        pause = threading.Event()
        for _ in range(int(PATIENCE / 0.005)):
            if self._ready(self.evaluations):
                return Evaluation(0.5, 1.0, (0.5, 0.5), (1.0, 1.0))
            pause.wait(0.005)
        raise AssertionError("the next round did not come so far while this one was evaluated")


def asks(directory: Path) -> list[str]:
    """The asks that are over."""
    return [line["ask"] for line in read_lines(directory / "asks.jsonl")]


async def test_devices_work_for_the_next_round_while_a_round_is_evaluated(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    plan = make_plan("plain")
    plain, _ = await play(plan)
    fleet = make_fleet()
    beside = Slow(lambda round: round == 4 or any(ask.startswith(f"{round + 1}.") for _, ask in fleet.trained))
    summary, left = await play(make_plan(evaluator=beside))
    assert beside.evaluations == 4
    assert [row.round for row in left.rows] == [1, 2, 3, 4]
    assert summary.model_digest == plain.model_digest


async def test_no_process_is_forked_for_a_server_job_while_a_round_is_evaluated(
    make_plan: MakePlan, make_fleet: MakeFleet, tmp_path: Path, play: Play
) -> None:
    evaluating = threading.Event()

    class Seen(Slow):
        def evaluate(self, *arguments: Any) -> Evaluation:
            evaluating.set()
            try:
                return super().evaluate(*arguments)
            finally:
                evaluating.clear()

    def init() -> Tree:
        (tmp_path / f"job-{len(list(tmp_path.glob('job-*'))) + 1}").touch()
        return {"evaluated": torch.tensor([float(evaluating.is_set())])}  # in a process of its own, as it was forked

    looks = 0

    def has_begun_or_will_not(evaluation: int) -> bool:
        nonlocal looks
        looks += 1
        return evaluation == 3 or (tmp_path / f"job-{evaluation + 1}").exists() or looks % 50 == 0

    make_fleet()
    job = ServerJob("count", init, lambda carry, step: (carry, True), steps=1, checkpoint_every=1)
    plan = make_plan(rounds=3, job=job, evaluator=Seen(has_begun_or_will_not))
    await play(plan)
    assert [carry["evaluated"].item() for carry in plan.algorithm.carries] == [0.0, 0.0, 0.0]  # type: ignore[attr-defined]


async def test_no_process_is_forked_for_a_server_job_while_devices_of_the_same_process_compute(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    computing = False

    async def at_rest() -> None:
        nonlocal computing
        await asyncio.sleep(0)
        computing = False

    def trains(index: int, work: Any) -> dict[str, Any]:
        nonlocal computing
        computing = True
        return {"after": 10.0 + index}

    def init() -> Tree:
        return {"computing": torch.tensor([float(computing)])}  # in a process of its own, as it was forked

    make_fleet(script=trains)
    job = ServerJob("count", init, lambda carry, step: (carry, True), steps=1, checkpoint_every=1)
    plan = make_plan(rounds=2, job=job, at_rest=at_rest)
    await play(plan)
    assert [carry["computing"].item() for carry in plan.algorithm.carries] == [0.0, 0.0]  # type: ignore[attr-defined]


async def test_no_device_works_for_the_round_after_the_next_while_a_round_is_concluded(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    fleet = make_fleet()
    folder = make_plan().directory
    looks: Counter[int] = Counter()
    ahead: list[str] = []

    def when_the_next_one_is_over(round: int) -> bool:
        looks[round] += len(asks(folder)) > min(round, 3)
        if looks[round] < 20:
            return False
        ahead.extend(ask for _, ask in fleet.trained if int(ask.partition(".")[0]) > round + 1)
        return True

    _, left = await play(make_plan(evaluator=Slow(when_the_next_one_is_over)))
    assert (ahead, [row.round for row in left.rows]) == ([], [1, 2, 3, 4])


async def test_a_run_that_is_resumed_forgets_what_the_next_round_had_logged_before_the_checkpoint(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    plain, _ = await play(make_plan("plain"))
    fleet = make_fleet()
    folder = make_plan().directory

    def broken_in_the_second_round(round: int) -> bool:
        if round == 2:
            raise RuntimeError("an evaluation that fails")
        return len(asks(folder)) == 2

    with pytest.raises(RuntimeError, match="an evaluation that fails"):
        await serve(make_plan(evaluator=Slow(broken_in_the_second_round)))
    # The second ask was over before the checkpoint of the first round, which does not know of it.
    assert recorded_rounds(folder / "checkpoint") == [1]
    first = (folder / "asks.jsonl").read_bytes().splitlines(keepends=True)[0]
    cursor = read_record(folder / "checkpoint", 1)["record"]["cursor"]
    assert cursor["asks"]["bytes"] == len(first)
    assert cursor["metrics"]["bytes"] == (folder / "metrics.jsonl").stat().st_size
    network = MemoryNetwork()
    make_fleet(network=network, lease=fleet.granted.lease)
    summary, left = await play(make_plan(network=network))
    assert summary.model_digest == plain.model_digest
    assert [row.round for row in left.rows] == [1, 2, 3, 4]
    assert asks(folder) == asks(folder.with_name("plain"))


async def test_a_disk_that_refuses_a_checkpoint_ends_the_run_though_the_next_round_waits_for_devices(
    make_plan: MakePlan, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path, round: int, *rest: Any) -> None:
        raise FedemuError(f"{directory} cannot be written: the disk is full; make room there")

    fleet = make_fleet(script=lambda index, work: {"reply": "good" if work.ask.startswith("1.") else "silent"})
    monkeypatch.setattr(checkpoint, "save", refuse)
    with pytest.raises(FedemuError, match="the disk is full"):
        await asyncio.wait_for(serve(make_plan()), PATIENCE)
    assert {ask for _, ask in fleet.trained} == {"1.0.0"}
    left = read_run(make_plan().directory)
    assert (left.summary["rounds"], left.summary["final_accuracy"]) == (0, None), "its model is that of no round"


async def test_devices_hear_of_the_older_of_two_checkpoints_up_to_which_they_may_forget(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    told: dict[int, set[int]] = {}

    def script(index: int, work: Any) -> dict[str, Any]:
        told.setdefault(int(work.ask.partition(".")[0]), set()).add(work.durable_round)
        return {"after": 10.0 + index}

    # A server job waits until the round before is durable, so it is when devices are asked.
    job = ServerJob("wait", lambda: {"x": torch.zeros(1)}, lambda carry, step: (carry, True), 1, 1)
    fleet = make_fleet(script=script)
    await play(make_plan(rounds=4, job=job))
    network = MemoryNetwork()
    make_fleet(script=script, network=network, lease=fleet.granted.lease)
    await play(make_plan(rounds=5, job=job, network=network))
    assert told == {1: {0}, 2: {0}, 3: {1}, 4: {2}, 5: {3}}


async def test_a_run_whose_last_checkpoint_is_refused_is_not_complete(
    make_plan: MakePlan, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = checkpoint.save

    def refuse(directory: Path, round: int, *rest: Any) -> None:
        if round == 2:
            raise FedemuError(f"{directory} cannot be written: the disk is full; make room there")
        save(directory, round, *rest)

    make_fleet()
    monkeypatch.setattr(checkpoint, "save", refuse)
    plan = make_plan(rounds=2)
    with pytest.raises(FedemuError, match="the disk is full"):
        await serve(plan)
    left = read_run(plan.directory)
    assert (left.summary["outcome"], left.summary["rounds"]) == ("failed", 1)


async def test_a_round_without_a_quorum_ends_the_run_after_the_round_before_is_durable(
    make_plan: MakePlan, make_fleet: MakeFleet
) -> None:
    fleet = make_fleet(
        script=lambda index, work: {"after": 10.0, "reply": "good" if work.ask.startswith("1.") else "failed"}
    )
    beside = Slow(lambda round: any(ask.startswith("2.2.") for _, ask in fleet.trained))
    plan = make_plan(evaluator=beside)
    with pytest.raises(QuorumError):
        await serve(plan)
    left = read_run(plan.directory)
    assert recorded_rounds(plan.directory / "checkpoint") == [1]
    assert (left.summary["outcome"], left.summary["rounds"]) == ("quorum", 1)
