"""Whole runs over the in-memory network with a scripted fleet."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedemu.algorithms.interface import ServerJob, Tree
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import Run, read_run
from fedemu.coordinator.serve import serve
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import DOWN
from fedemu.protocol.errors import ConfigurationError, Interrupted, QuorumError, UnreachableError
from fedemu.protocol.messages import Presence
from fedemu.protocol.transport.link import Faults
from fedemu.protocol.transport.memory import MemoryNetwork
from fedemu.protocol.transport.zeromq import ZmqNetwork

MakePlan = Callable[..., CoordinatorPlan]
MakeFleet = Callable[..., Any]


class Raw(wire.Message):
    """Any header at all."""

    type: str
    v: int = 1


class Watcher(Observers):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[int, int, float, int]] = []
        self.rows: list[Row] = []
        self.outcomes: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.steps: list[tuple[str, int, int, int]] = []
        self.reasons: Counter[str] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def round_started(self, round: int, attempt: int, virtual_time: float, selected: int) -> None:
        self.started.append((round, attempt, virtual_time, selected))

    def round_finished(self, row: Row) -> None:
        self.rows.append(row)

    def device_result(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    def server_job(self, name: str, round: int, step: int, steps: int) -> None:
        self.steps.append((name, round, step, steps))

    def event(self, name: str, **fields: Any) -> None:
        self.events[name] += 1

    def rejected(self, reason: str) -> None:
        self.reasons[reason] += 1

    def traffic(self, kind: str, direction: str, size: int) -> None:
        self.bytes[kind, direction] += size


def act(after: float = 10.0, **more: Any) -> Mapping[str, Any]:
    """What a fake device does with its Work."""
    return {"after": after, **more}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - any condition of the fleet or the run
            await asyncio.sleep(0.002)


async def run(plan: CoordinatorPlan) -> tuple[Any, Run]:
    summary = await asyncio.wait_for(serve(plan), 60)
    left = read_run(plan.directory)
    for row in left.rows:
        assert row.selected == sum(row.outcomes.values())
    return summary, left


def events(left: Run, name: str) -> list[dict[str, Any]]:
    return [event for event in left.events if event["event"] == name]


# ── the virtual clock ─────────────────────────────────────────────────────────


async def test_a_run_completes_and_leaves_its_results(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    plan = make_plan()
    summary, left = await run(plan)
    assert (summary.outcome, summary.rounds, summary.perturbed) == ("completed", 4, False)
    first = left.rows[0]
    assert (first.selected, first.accepted, first.cancelled) == (4, 3, 1)
    assert (first.task, first.attempts, first.online) == (0, 1, 6)
    assert [row.round for row in left.rows] == [1, 2, 3, 4]
    assert fleet.stopped == {-1, 0, 1, 2, 3, 4, 5}
    assert left.summary is not None
    assert left.summary["model_digest"] == summary.model_digest
    assert (plan.directory / "model.safetensors").is_file()


async def test_the_fold_is_the_weighted_mean_of_the_first_to_finish(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    make_fleet(4, script=lambda index, work: act(after=40.0 - index))
    plan = make_plan(devices=4, rounds=1, evaluate_every=5)
    _, left = await run(plan)
    # Devices 3, 2 and 1 finish first, with 1, 3 and 2 examples, and add 4/8, 3/8 and 2/8.
    assert left.rows[0].loss == pytest.approx((1 * 4 + 3 * 3 + 2 * 2) / 8 / 6)
    assert left.rows[0].virtual_time == 39.0
    assert left.rows[0].device_metrics == {"loss": 2.0}
    assert left.rows[0].device_seconds == (2.0 + 1.5 + 1.0) / 3


async def test_every_outcome_is_counted_where_it_belongs(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    acts = {
        0: act(10.0, reply="nan"),
        1: act(11.0, reply="failed"),
        2: act(12.0),
        3: act(5.0, event="drop", cause="offline", back=1000.0),
        4: act(13.0),
        5: act(14.0, reply="misshapen"),
        6: act(15.0),
        7: act(16.0),
        8: act(700.0),
        9: act(reply="declined"),
    }
    fleet = make_fleet(10, script=lambda index, work: acts[index])
    plan = make_plan(devices=10, per_round=3, over_selection=4.0, rounds=1)
    summary, left = await run(plan)
    row = left.rows[0]
    assert row.outcomes == {
        "accepted": 3, "dropped": 1, "late": 0, "cancelled": 2, "failed": 2, "rejected": 2,
    }  # fmt: skip
    assert row.virtual_time == 15.0
    assert not summary.perturbed
    first = {index: device.answers[0] for index, device in fleet.devices.items() if device.answers}
    assert [first[index].type for index in (0, 2, 7, 8)] == ["invalid", "accepted", "cancel", "cancel"]
    assert [first[index].reason for index in (0, 5)] == ["nonfinite", "shape"]
    assert not {7, 8} & {index for index, _ in fleet.trained}
    [dropout] = events(left, "dropout")
    assert (dropout["device"], dropout["ask"], dropout["cause"], dropout["back"]) == (3, "1.0.0", "offline", 1000.0)


async def test_a_dropped_device_is_not_asked_before_it_is_back(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    asked: dict[int, list[float]] = {}

    def script(index: int, work: wire.Work) -> Any:
        if work.start not in asked.setdefault(index, []):
            asked[index].append(work.start)
        return act(5.0, event="drop", cause="crash", back=35.0) if index == 0 and work.start == 0 else act(10.0)

    make_fleet(3, script=script)
    _, left = await run(make_plan(devices=3, per_round=2, over_selection=2.0, rounds=5))
    assert asked == {0: [0.0, 40.0], 1: [0.0, 10.0, 20.0, 30.0, 40.0], 2: [0.0, 10.0, 20.0, 30.0, 40.0]}
    assert len(events(left, "death")) == 1


async def test_with_nobody_on_line_the_clock_jumps_and_presence_is_asked_for_ever_further(
    make_plan: MakePlan, make_fleet: MakeFleet
) -> None:
    day = 86_400.0
    asked: list[float] = []

    def presence(index: int, until: float) -> Presence:
        asked.append(until)
        known = [(start, end) for start, end in ((5 * day, 5 * day + 24), (20 * day, 21 * day)) if start < until]
        return Presence(until=until, intervals=tuple(known))

    make_fleet(3, presence=presence)
    _, left = await run(make_plan(devices=3, per_round=3, over_selection=1.0, rounds=3, quorum=1.0))
    assert [row.virtual_time for row in left.rows] == [5 * day + 12, 5 * day + 24, 20 * day + 12]
    assert set(asked) == {day * 2**power for power in range(6)}


async def test_a_round_with_too_few_replies_starts_again_with_another_cohort(
    make_plan: MakePlan, make_fleet: MakeFleet
) -> None:
    states: dict[str, set[str | None]] = {}

    def script(index: int, work: wire.Work) -> Any:
        states.setdefault(work.ask, set()).add(work.state)
        return act(900.0 if work.ask.startswith("2.0") and index > 1 else 10.0 + index)

    make_fleet(3, script=script)
    summary, left = await run(make_plan(devices=3, per_round=3, quorum=1.0, rounds=2))
    assert summary.outcome == "completed"
    row = left.rows[1]
    assert (row.attempts, row.selected, row.accepted, row.late) == (2, 6, 5, 1)
    assert row.virtual_time == 12.0 + 600.0 + 12.0
    # What was accepted in the first attempt does not count: the second starts from where the first did.
    assert states == {"1.0.0": {None}, "2.0.0": {"1.0.0"}, "2.1.0": {"1.0.0"}}
    assert [(e["round"], e["attempt"], e["accepted"], e["needed"]) for e in events(left, "retry")] == [(2, 0, 2, 3)]


async def test_a_run_without_quorum_ends_with_an_error_and_its_last_round(
    make_plan: MakePlan, make_fleet: MakeFleet
) -> None:
    fleet = make_fleet(script=lambda index, work: act(900.0 if work.ask.startswith("3.") else 10.0))
    plan = make_plan()
    with pytest.raises(QuorumError, match="Round 3 got 0 of the 2 replies that it needs, 3 times"):
        await run(plan)
    left = read_run(plan.directory)
    assert left.summary is not None
    assert (left.summary["outcome"], left.summary["rounds"]) == ("quorum", 2)
    assert -1 in fleet.stopped


async def test_a_run_whose_checkpoint_is_gone_is_not_started_over(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    make_fleet()
    await run(make_plan(rounds=3))
    plan = make_plan(rounds=4, network=MemoryNetwork())
    for file in (plan.directory / "checkpoint").iterdir():
        file.unlink()
    with pytest.raises(ConfigurationError, match="played 3 rounds, but its checkpoint is gone"):
        await run(plan)
    assert len(read_run(plan.directory).rows) == 3


async def test_a_quorum_missed_because_training_fails_names_what_the_devices_said(
    make_plan: MakePlan, make_fleet: MakeFleet
) -> None:
    make_fleet(script=lambda index, work: act(10.0, reply="failed"))
    with pytest.raises(QuorumError, match="devices failed, saying: the loss is not finite"):
        await run(make_plan())


async def test_replies_that_are_not_finite_end_the_run_as_diverged(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    make_fleet(script=lambda index, work: act(10.0, reply="nan" if work.ask.startswith("3.") else "good"))
    plan = make_plan()
    summary, left = await run(plan)
    assert (summary.outcome, summary.rounds, len(events(left, "retry"))) == ("diverged", 2, 0)


async def test_replies_beyond_the_largest_norm_end_the_run_as_diverged(
    make_plan: MakePlan, make_fleet: MakeFleet
) -> None:
    make_fleet()
    summary, left = await run(make_plan(max_norm=1e-6))
    assert (summary.outcome, summary.rounds, len(events(left, "retry"))) == ("diverged", 0, 0)
    (diverged,) = events(left, "diverged")
    assert "beyond limits.max_norm" in diverged["detail"]


async def test_every_ask_of_a_script_is_an_exchange_of_its_own(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    asks: set[str] = set()
    make_fleet(script=lambda index, work: asks.add(work.ask) or act(10.0))
    plan = make_plan(rounds=2, asks=2)
    _, left = await run(plan)
    assert asks == {"1.0.0", "1.0.1", "2.0.0", "2.0.1"}
    assert [(row.selected, row.attempts, row.virtual_time) for row in left.rows] == [
        (8, 1, 20.0),
        (8, 1, 40.0),
    ]


async def test_a_device_gets_its_own_part_and_pays_for_it(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    downloads: dict[tuple[int, str], int] = {}

    def script(index: int, work: wire.Work) -> Any:
        downloads[index, work.ask] = work.download_bytes - work.shared[0].size
        return act(10.0)

    fleet = make_fleet(2, script=script)
    plan = make_plan(devices=2, per_round=2, rounds=1, asks=2)
    await run(plan)
    assert downloads == {(0, "1.0.0"): 0, (1, "1.0.0"): 0, (0, "1.0.1"): 8, (1, "1.0.1"): 8}
    assert fleet.devices[1].parts["1.0.1"]["own"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("cohort", "asked", "accepted"), [("online", [0, 1, 3, 4], 3), ([4, 2, 9, 1, 4], [1, 4], 1)])
async def test_other_cohorts_take_everyone_who_is_on_line_and_replies(
    make_plan: MakePlan, make_fleet: MakeFleet, cohort: Any, asked: list[int], accepted: int
) -> None:
    def presence(index: int, until: float) -> Presence:
        return Presence(until=until, intervals=((100.0 if index == 2 else 0.0, float("inf")),))

    seen: set[int] = set()
    make_fleet(
        5, script=lambda i, work: seen.add(i) or act(10.0 + i, reply="nan" if i == 4 else "good"), presence=presence
    )
    plan = make_plan(devices=5, per_round=2, rounds=1, cohort=cohort)
    _, left = await run(plan)
    assert sorted(seen) == asked
    assert (left.rows[0].accepted, left.rows[0].rejected) == (accepted, 1)
    assert left.rows[0].virtual_time == 600.0


async def test_it_says_that_it_has_opened_unless_no_round_is_left(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    opened: list[str] = []
    make_fleet()
    await run(make_plan(opened=lambda: opened.append("first")))
    await run(make_plan(network=MemoryNetwork(), opened=lambda: opened.append("again")))
    assert opened == ["first"]


async def test_a_server_job_of_a_round_is_done_once_however_often_the_round_is_tried(
    make_plan: MakePlan, make_fleet: MakeFleet, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    def step(carry: Tree, index: int) -> tuple[Tree, bool]:
        with log.open("a") as file:  # the job runs in a process of its own
            file.write(f"{index} ")
        return {"x": carry["x"] + 1}, False

    job = ServerJob("count", lambda: {"x": torch.zeros(1)}, step, steps=3, checkpoint_every=1)
    make_fleet(script=lambda index, work: act(900.0 if work.ask == "1.0.1" else 10.0))
    plan = make_plan(rounds=1, job=job)
    _, left = await run(plan)
    assert left.rows[0].attempts == 2
    assert [carry["x"].item() for carry in plan.algorithm.carries] == [3.0, 3.0]  # type: ignore[attr-defined]
    assert log.read_text() == "0 1 2 "


async def test_a_server_job_is_seen_to_advance_and_its_end_is_an_event(
    make_plan: MakePlan, make_fleet: MakeFleet
) -> None:
    def step(carry: Tree, index: int) -> tuple[Tree, bool]:
        return carry, index == 3

    job = ServerJob("distil", lambda: {"x": torch.zeros(1)}, step, steps=50, checkpoint_every=10)
    make_fleet()
    watcher = Watcher()
    _, left = await run(make_plan(rounds=2, job=job, observers=[watcher]))
    assert {(name, steps) for name, _, _, steps in watcher.steps} == {("distil", 50)}
    assert [step for _, round, step, _ in watcher.steps if round == 2][-1] == 4
    ends = events(left, "server_job")
    assert [(end["job"], end["round"], end["steps"]) for end in ends] == [("distil", 1, 4), ("distil", 2, 4)]
    assert [row.server_seconds for row in left.rows] == [end["seconds"] for end in ends]
    assert all(0 < row.server_seconds < row.coordinator_seconds < row.round_seconds for row in left.rows)


async def test_devices_stay_alive_through_a_long_server_job_and_one_that_falls_silent_is_noticed(
    make_plan: MakePlan, make_fleet: MakeFleet, tmp_path: Path
) -> None:
    begun, over = tmp_path / "begun", tmp_path / "over"

    def step(carry: Tree, index: int) -> tuple[Tree, bool]:
        begun.touch()
        while not over.exists():
            time.sleep(0.001)
        return carry, True

    job = ServerJob("distil", lambda: {"x": torch.zeros(1)}, step, steps=1, checkpoint_every=1)
    fleet, watcher = make_fleet(), Watcher()
    running = asyncio.create_task(run(make_plan(rounds=1, job=job, patience=16, observers=[watcher])))
    await until(begun.exists)
    silent = fleet.devices[4]
    silent.vanish()
    await until(lambda: watcher.events["silence"] > 0)
    silent.gone = False
    silent.connect()
    over.touch()
    summary, left = await running
    assert [event["device"] for event in events(left, "silence")] == [4]
    assert (summary.outcome, summary.perturbed) == ("completed", False)
    assert left.rows[0].server_seconds > 0.5
    assert watcher.steps[0] == ("distil", 1, 0, 1)


async def test_the_death_of_a_server_job_is_an_event(
    make_plan: MakePlan, make_fleet: MakeFleet, tmp_path: Path
) -> None:
    def step(carry: Tree, index: int) -> tuple[Tree, bool]:
        if not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return carry, True

    job = ServerJob("distil", lambda: {"x": torch.zeros(1)}, step, steps=5, checkpoint_every=1)
    make_fleet()
    _, left = await run(make_plan(rounds=1, job=job))
    (death,) = events(left, "server_job_died")
    assert (death["job"], death["round"], death["cause"]) == ("distil", 1, "signal SIGKILL")
    assert len(events(left, "server_job")) == 1


async def test_downloads_are_charged_by_what_a_device_has_seen(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    sizes: dict[str, set[int]] = {}

    def script(index: int, work: wire.Work) -> Any:
        sizes.setdefault(work.ask, set()).add(work.download_bytes)
        size = work.shared[0].size
        assert work.upload_bytes == 16
        assert work.download_bytes == (0 if work.ask == "2.1.0" else size)
        return act(900.0 if work.ask == "2.0.0" else 10.0)

    make_fleet(2, script=script)
    _, left = await run(make_plan(devices=2, per_round=2, rounds=2, attempts=2))
    assert list(sizes) == ["1.0.0", "2.0.0", "2.1.0"]
    size = max(sizes["1.0.0"])
    assert [(row.bytes_down, row.bytes_up) for row in left.rows] == [(2 * size, 32), (2 * size, 32)]


# ── determinism and recovery ──────────────────────────────────────────────────


def churn(index: int, work: wire.Work) -> Any:
    """Finishes, drop-outs and bad replies that differ by device and round."""
    turn = (7 * index + 3 * int(work.ask.split(".")[0])) % 11
    if turn == 0:
        return act(6.0, event="drop", cause="crash", back=90.0)
    return act(10.0 + turn, reply={3: "nan", 5: "failed"}.get(turn, "good"))


BIG: dict[str, Any] = {"devices": 12, "per_round": 5, "over_selection": 1.6, "rounds": 8}


async def undisturbed(make_plan: MakePlan, make_fleet: MakeFleet) -> str:
    """The digest of the churning run when nothing unplanned happens."""
    network = MemoryNetwork()
    make_fleet(12, script=churn, network=network)
    summary, _ = await run(make_plan("undisturbed", network=network, **BIG))
    assert not summary.perturbed
    return str(summary.model_digest)


async def test_loss_duplication_and_reordering_do_not_change_the_model(
    make_plan: MakePlan, make_fleet: MakeFleet
) -> None:
    digest = await undisturbed(make_plan, make_fleet)
    network = MemoryNetwork(Faults(loss=0.03, duplication=0.05, reordering=0.1, delay_seconds=0.003), seed=4)
    make_fleet(12, script=churn, network=network)
    summary, left = await run(make_plan(network=network, **BIG))
    assert events(left, "given_up") == []
    assert (summary.model_digest, summary.perturbed) == (digest, False)


async def test_over_sockets_the_model_is_the_same(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    digest = await undisturbed(make_plan, make_fleet)
    network = ZmqNetwork()
    address = f"ipc://@{uuid.uuid4()}"
    fleet = make_fleet(12, script=churn, network=network, address=address)
    summary, _ = await run(make_plan(network=network, address=address, **BIG))
    await fleet.close()
    network.close()
    assert (summary.model_digest, summary.perturbed) == (digest, False)


async def test_unplanned_deaths_do_not_change_the_model(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    digest = await undisturbed(make_plan, make_fleet)
    deaths: Counter[int] = Counter()

    def script(index: int, work: wire.Work) -> Any:
        if index % 2 and deaths[index] < 3:
            deaths[index] += 1
            told = deaths[index] != 2
            asyncio.get_running_loop().call_soon(lambda: fleet.devices[index].crash(told=told))
        return churn(index, work)

    fleet = make_fleet(12, script=script)
    summary, _ = await run(make_plan(**BIG))
    assert sum(deaths.values()) > 6
    assert (summary.model_digest, summary.perturbed) == (digest, False)


@pytest.mark.parametrize("moment", [0.0, 0.02, 0.05, 0.1])
async def test_a_coordinator_that_is_killed_and_resumed_ends_with_the_same_model(
    make_plan: MakePlan, make_fleet: MakeFleet, moment: float
) -> None:
    digest = await undisturbed(make_plan, make_fleet)
    fleet = make_fleet(12, script=churn)
    first = asyncio.create_task(serve(make_plan(**BIG)))
    await until(lambda: len(fleet.trained) > 100 * moment)
    first.cancel()
    await asyncio.wait({first})
    granted = fleet.granted
    summary, left = await run(make_plan(**BIG))
    assert [row.round for row in left.rows] == list(range(1, 9))
    assert (summary.model_digest, summary.perturbed, summary.rounds) == (digest, False, 8)
    assert granted is None or fleet.granted.lease == granted.lease


async def test_a_finished_run_can_go_on_with_more_rounds(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    digest = await undisturbed(make_plan, make_fleet)
    make_fleet(12, script=churn)
    await run(make_plan(**{**BIG, "rounds": 5}))
    lease = json.loads((make_plan().directory / "checkpoint" / "leases.jsonl").read_text())["grant"]
    network = MemoryNetwork()
    make_fleet(12, script=churn, network=network, lease=lease)
    summary, _ = await run(make_plan(network=network, **BIG))
    assert summary.model_digest == digest


async def test_resuming_a_run_that_is_finished_needs_no_fleet(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    make_fleet()
    first, _ = await run(make_plan())
    again, _ = await run(make_plan(network=MemoryNetwork()))
    assert (again.model_digest, again.outcome, again.rounds) == (first.model_digest, "completed", 4)


async def test_who_never_comes_back_has_failed_and_the_run_is_perturbed(
    make_plan: MakePlan, make_fleet: MakeFleet
) -> None:
    fleet = make_fleet(script=lambda index, work: act(10.0 + index, reply="silent" if index == 0 else "good"))
    plan = make_plan(devices=6, per_round=6, over_selection=1.0, rounds=3, give_up=2.5, answer_timeout=2.5)
    summary, left = await run(plan)
    assert [(row.selected, row.accepted, row.failed) for row in left.rows] == [(6, 5, 1), (5, 5, 0), (5, 5, 0)]
    assert left.rows[0].virtual_time == 600.0
    assert summary.perturbed
    assert fleet.devices[0].verdicts == {}
    assert [(event["device"], event["ask"]) for event in events(left, "given_up")] == [(0, "1.0.0")]


async def test_presence_that_is_not_announced_in_time_perturbs_and_loses_the_device(
    make_plan: MakePlan, make_fleet: MakeFleet
) -> None:
    day = 86_400.0

    def presence(index: int, until: float) -> Presence:
        if index == 0 and until > day:  # asked to look farther ahead, it is gone before it answers
            fleet.devices[0].vanish()
        return Presence(until=until, intervals=((0.0, 5.0), (1.5 * day, 9 * day)))

    fleet = make_fleet(3, script=lambda index, work: act(5.0 + index), presence=presence)
    summary, left = await run(make_plan(devices=3, per_round=2, over_selection=2.0, rounds=2, give_up=3.0))
    assert [row.selected for row in left.rows] == [3, 2]
    assert summary.perturbed
    assert [event["device"] for event in events(left, "given_up")] == [0]


# ── strangers and bad company ─────────────────────────────────────────────────


async def test_garbage_is_counted_answered_and_changes_nothing(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    digest = await undisturbed(make_plan, make_fleet)
    seen = Watcher()
    plan = make_plan(observers=(seen,), **BIG)
    fleet = make_fleet(12, script=churn)
    answers: list[Any] = []
    stranger = plan.network.connect("here", DOWN, answers.append, lambda error: None)

    async def disturb() -> None:
        ask, turn = "1.0.0", 0
        while True:
            turn += 1
            stranger.send(Raw(type="nonsense"))
            stranger.send(Raw(type="hello", v=2))
            stranger.send(wire.Heartbeat())
            stranger.send(wire.Hello(device=turn % 12, incarnation=2**30, lease="guess"))
            stranger.send(wire.Enroll(count=3))
            stranger.send(wire.Enroll(count=3, lease="guess"))
            stranger.send(wire.Died(device=turn % 12, incarnation=1))
            stranger.send(wire.Result(ask=ask, examples=1, steps=1, metrics={}, tensors=()))
            device = fleet.devices.get(turn % 12)
            if device is not None and device.welcomed:
                device.dealer.send(wire.Result(ask="99.0.0", examples=1, steps=1, metrics={}, tensors=()))
                device.dealer.send(wire.Scheduled(ask="99.0.0", event="finish", at=0.0))
                device.dealer.send(wire.Need(digest="f" * 64, offset=0, length=10))
            await asyncio.sleep(0.005)

    disturbing = asyncio.create_task(disturb())
    summary, _ = await run(plan)
    disturbing.cancel()
    assert (summary.model_digest, summary.perturbed) == (digest, False)
    reasons = {envelope.message.reason for envelope in answers if isinstance(envelope.message, wire.Refused)}
    assert reasons <= {"malformed", "version", "unknown_peer", "lease_unknown", "fleet_full"}
    assert {"malformed", "version", "unknown_peer"} <= reasons
    assert {"type", "version", "unknown_peer", "lease_unknown", "unknown_blob"} <= seen.reasons.keys()


async def test_a_second_result_is_answered_with_the_first_verdict(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2)
    plan = make_plan(devices=2, per_round=2, over_selection=1.0, rounds=3)
    running = asyncio.create_task(run(plan))
    await until(lambda: bool(fleet.devices) and "1.0.0" in fleet.devices[0].verdicts)
    fleet.devices[0].dealer.send(wire.Result(ask="1.0.0", examples=9, steps=1, metrics={}, seconds=99.0, tensors=()))
    fleet.devices[0].dealer.send(wire.Result(ask="0.0.7", examples=9, steps=1, metrics={}, tensors=()))
    _, left = await running
    assert [row.device_seconds for row in left.rows] == [(0.5 + 1.0) / 2] * 3
    assert wire.Duplicate(ask="1.0.0", verdict="accepted") in fleet.devices[0].answers
    assert wire.Late(ask="0.0.7") in fleet.devices[0].answers


async def test_devices_beyond_the_fleet_are_told_so(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    first, second = make_fleet(4), make_fleet(4)
    third = make_fleet(2)
    await run(make_plan())
    assert sorted([*first.devices, *second.devices]) == [0, 1, 2, 3, 4, 5]
    assert not third.devices
    assert third.refused[0].reason == "fleet_full"


async def test_a_fleet_that_does_not_come_is_an_error_that_says_how_many_came(
    make_plan: MakePlan, make_fleet: MakeFleet
) -> None:
    fleet = make_fleet(4)
    plan = make_plan(start_timeout=1.5)
    with pytest.raises(UnreachableError, match=r"Only 4 of 6 devices came within 1\.5 s"):
        await run(plan)
    assert -1 in fleet.stopped
    assert read_run(plan.directory).summary is None


async def test_an_address_in_use_is_a_configuration_error(make_plan: MakePlan, network: MemoryNetwork) -> None:
    router = network.bind("here", DOWN, lambda peer, envelope: None, lambda peer, error: None)
    with pytest.raises(ConfigurationError):
        await run(make_plan())
    router.close()


async def test_a_fault_of_the_coordinators_own_ends_the_run_with_it(
    make_plan: MakePlan, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("fedemu.coordinator.asks.exchange.spill", full)
    make_fleet()
    plan = make_plan()
    with pytest.raises(OSError, match="No space"):
        await run(plan)
    left = read_run(plan.directory)
    assert left.summary is not None
    assert left.summary["outcome"] == "failed"


# ── signals, the wall clock, observers ────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_stops_the_run_with_a_checkpoint_to_go_on_from(
    make_plan: MakePlan, make_fleet: MakeFleet, number: signal.Signals
) -> None:
    digest = await undisturbed(make_plan, make_fleet)
    fleet = make_fleet(12, script=churn)
    plan = make_plan(**BIG)
    running = asyncio.create_task(run(plan))
    await until(lambda: any(ask.startswith("4.") for _, ask in fleet.trained))
    os.kill(os.getpid(), number)
    with pytest.raises(Interrupted, match=r"Stopped after round \d of 8; go on with --resume"):
        await running
    left = read_run(plan.directory)
    assert left.summary is not None
    assert (left.summary["outcome"], left.summary["rounds"]) == ("interrupted", len(left.rows))
    assert -1 in fleet.stopped
    fleet.stopped.clear()
    summary, _ = await run(make_plan(**BIG))
    assert summary.model_digest == digest


async def test_under_the_wall_clock_the_first_results_to_arrive_count(
    make_plan: MakePlan, make_fleet: MakeFleet
) -> None:
    fleet = make_fleet(4, wall=True, script=lambda index, work: act(reply="silent" if index == 3 else "good"))
    plan = make_plan(clock="wall", devices=4, per_round=4, over_selection=1.0, rounds=1, deadline=2.5)
    summary, left = await run(plan)
    assert summary.outcome == "completed"
    assert [(row.accepted, row.late) for row in left.rows] == [(3, 1)]
    assert left.rows[0].virtual_time >= 2.5
    assert fleet.devices[3].answers == [wire.Late(ask="1.0.0")]


async def test_observers_hear_of_rounds_outcomes_and_events(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    make_fleet()
    seen = Watcher()
    _, left = await run(make_plan(observers=(seen,), rounds=2))
    assert seen.started == [(1, 0, 0.0, 4), (2, 0, left.rows[0].virtual_time, 4)]
    assert seen.rows == list(left.rows)
    assert seen.outcomes == {"accepted": 6, "cancelled": 2}
    assert {"enroll", "join", "fleet_complete", "checkpoint"} <= set(seen.events)
    assert [event["round"] for event in events(left, "checkpoint")] == [1, 2]
    assert seen.bytes["wire", "up"] == sum(row.wire_bytes_up for row in left.rows) > 0


async def test_a_script_that_yields_something_else_ends_the_run_with_a_sentence(
    make_plan: MakePlan, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fleet()
    plan = make_plan()
    monkeypatch.setattr(type(plan.algorithm), "round", lambda *_: iter_of(17))
    with pytest.raises(ConfigurationError, match="yielded a int; it may yield Ask and ServerJob"):
        await run(plan)


def iter_of(request: Any) -> Generator[Any, Any, Any]:
    yield request


async def test_asking_twice_for_places_is_one_event(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    for _ in range(2):
        fleet.supervisor.send(wire.Enroll(count=fleet.count, lease=None, host="here"))
    _, left = await run(make_plan(rounds=1))
    assert [event["devices"] for event in events(left, "enroll")] == [fleet.count]


async def test_evaluation_is_done_as_often_as_asked_and_at_the_end(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    make_fleet()
    _, left = await run(make_plan(rounds=5, evaluate_every=2))
    assert [row.accuracy is not None for row in left.rows] == [False, True, False, True, True]
    assert [row.round_forgetting for row in left.rows] == [None, None, None, 0.0, 0.0]


async def test_the_model_in_the_directory_is_the_one_that_was_evaluated(
    make_plan: MakePlan, make_fleet: MakeFleet
) -> None:
    make_fleet()
    plan = make_plan()
    _, left = await run(plan)
    model = load_file(plan.directory / "model.safetensors")
    assert float(model["w"][0]) == left.rows[-1].loss
    assert torch.equal(model["w"], model["w"][0].expand(3))
