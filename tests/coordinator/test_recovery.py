"""A run under loss, deaths, restarts and garbage ends with the same model as an undisturbed one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedemu.algorithms.interface import Ask, Context, ServerJob, Tree, weighted_mean
from fedemu.coordinator.fleet.journal import LeaseJournal
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.checkpoint import load_job
from fedemu.coordinator.record.records import read_record, write_record
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import Run, read_run
from fedemu.coordinator.record.summary import Summary
from fedemu.coordinator.serve import serve
from fedemu.coordinator.service.service import Service
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import DOWN
from fedemu.protocol.errors import ConfigurationError, Interrupted, UnreachableError
from fedemu.protocol.ids import Digest
from fedemu.protocol.transport.link import Faults
from fedemu.protocol.transport.memory import MemoryNetwork
from fedemu.protocol.transport.zeromq import ZmqNetwork

Until = Callable[[Callable[[], object]], Awaitable[None]]

MakePlan = Callable[..., CoordinatorPlan]
MakeFleet = Callable[..., Any]
Play = Callable[[CoordinatorPlan], Awaitable[tuple[Summary, Run]]]


class Raw(wire.Message):
    """A message with any header."""

    type: str
    v: int = 1


class Reasons(Observers):
    """An observer that counts the messages that could not be used, by reason."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def rejected(self, reason: str) -> None:
        self.counts[reason] += 1


class Seen(Observers):
    """An observer that keeps the fields of the newest event of each name."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, dict[str, Any]] = {}

    def event(self, name: str, **fields: Any) -> None:
        self.fields[name] = fields


class Deserted(Observers):
    """An observer that notes what follows when no device is left."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def event(self, name: str, **fields: Any) -> None:
        if name == "deserted":
            self.told.append(fields["then"])


class Resumed(Observers):
    """An observer that notes the rounds and the real time after which a run goes on, and whether its end is there."""

    def __init__(self, end: Path) -> None:
        super().__init__()
        self.told: list[tuple[int, float]] = []
        self.ended: list[bool] = []
        self._end = end

    def resumed(self, rows: Sequence[Row], spent: float) -> None:
        self.told.append((len(rows), pytest.approx(spent, abs=1.0)))
        self.ended.append(self._end.exists())

    def round_started(self, *arguments: Any) -> None:
        self.ended.append(self._end.exists())


def churn(index: int, work: wire.Work) -> Any:
    """A script with finishes, dropouts and bad replies, which differ by device and round."""
    turn = (7 * index + 3 * int(work.ask.split(".")[0])) % 11
    if turn == 0:
        return {"after": 6.0, "event": "drop", "cause": "crash", "back": 90.0}
    return {"after": 10.0 + turn, "reply": {3: "nan", 5: "failed"}.get(turn, "good")}


BIG: dict[str, Any] = {"devices": 12, "per_round": 5, "over_selection": 1.6, "rounds": 8}


async def undisturbed(make_plan: MakePlan, make_fleet: MakeFleet, play: Play) -> str:
    """The digest of a run with this churn if nothing unplanned happens."""
    network = MemoryNetwork()
    make_fleet(12, script=churn, network=network)
    summary, _ = await play(make_plan("undisturbed", network=network, **BIG))
    assert not summary.perturbed
    return str(summary.model_digest)


async def test_loss_duplication_and_reordering_do_not_change_the_model(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    digest = await undisturbed(make_plan, make_fleet, play)
    network = MemoryNetwork(Faults(loss=0.03, duplication=0.05, reordering=0.1, delay_seconds=0.003), seed=4)
    make_fleet(12, script=churn, network=network)
    summary, left = await play(make_plan(network=network, **BIG))
    assert left.named("given_up") == []
    assert (summary.model_digest, summary.perturbed) == (digest, False)


async def test_over_sockets_the_model_is_the_same(make_plan: MakePlan, make_fleet: MakeFleet, play: Play) -> None:
    digest = await undisturbed(make_plan, make_fleet, play)
    network = ZmqNetwork()
    address = f"ipc://@{uuid.uuid4()}"
    fleet = make_fleet(12, script=churn, network=network, address=address)
    summary, _ = await play(make_plan(network=network, address=address, **BIG))
    await fleet.close()
    network.close()
    assert (summary.model_digest, summary.perturbed) == (digest, False)


async def test_unplanned_deaths_do_not_change_the_model(make_plan: MakePlan, make_fleet: MakeFleet, play: Play) -> None:
    digest = await undisturbed(make_plan, make_fleet, play)
    deaths: Counter[int] = Counter()

    def script(index: int, work: wire.Work) -> Any:
        if index % 2 and deaths[index] < 3:
            deaths[index] += 1
            told = deaths[index] != 2
            asyncio.get_running_loop().call_soon(lambda: fleet.devices[index].crash(told=told))
        return churn(index, work)

    fleet = make_fleet(12, script=script)
    summary, _ = await play(make_plan(**BIG))
    assert sum(deaths.values()) > 6
    assert (summary.model_digest, summary.perturbed) == (digest, False)


async def test_a_fleet_that_has_left_is_told_and_taken_back_when_it_comes_again(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    digest = await undisturbed(make_plan, make_fleet, play)

    def leave() -> None:
        for device in fleet.devices.values():
            device.dealer.send(wire.Bye(reason="stopped"))
            device.vanish()
        fleet.supervisor.send(wire.Bye(reason="stopped"))
        closing.append(asyncio.ensure_future(fleet.close()))

    def script(index: int, work: wire.Work) -> Any:
        if work.ask == "4.0.0" and not left:
            left.append(index)
            asyncio.get_running_loop().call_soon(leave)
        return churn(index, work)

    left: list[int] = []
    closing: list[asyncio.Future[None]] = []
    fleet = make_fleet(12, script=script)
    watcher = Deserted()
    running = asyncio.create_task(play(make_plan(observers=(watcher,), **BIG)))
    await until(lambda: watcher.told)
    make_fleet(12, script=churn, lease=fleet.granted.lease)
    summary, _ = await running
    assert (summary.model_digest, summary.perturbed) == (digest, False)
    assert watcher.told == ["they count as failed (try 1 of 3)"]


@pytest.mark.parametrize("moment", [0.0, 0.02, 0.05, 0.1])
async def test_a_coordinator_that_is_killed_and_resumed_ends_with_the_same_model(
    make_plan: MakePlan, make_fleet: MakeFleet, moment: float, play: Play, until: Until
) -> None:
    digest = await undisturbed(make_plan, make_fleet, play)
    fleet = make_fleet(12, script=churn)
    first = asyncio.create_task(serve(make_plan(**BIG)))
    await until(lambda: len(fleet.trained) > 100 * moment)
    first.cancel()
    await asyncio.wait({first})
    granted = fleet.granted
    before = {work.epoch for device in fleet.devices.values() for work in device.works.values()}
    summary, left = await play(make_plan(**BIG))
    after = {device.works[max(device.works)].epoch for device in fleet.devices.values() if device.works}
    assert len(after) == 1
    assert not before & after
    assert [row.round for row in left.rows] == list(range(1, 9))
    assert (summary.model_digest, summary.perturbed, summary.rounds) == (digest, False, 8)
    assert granted is None or fleet.granted.lease == granted.lease


class Refining:
    """The mean of the models of ``algorithm``'s devices, to which a server job adds 1 three times.

    The job waits at its second step while the file ``hold`` is there.
    """

    def __init__(self, algorithm: Any, hold: Path) -> None:
        self.programs, self.init, self.variables = algorithm.programs, algorithm.init, algorithm.variables
        self._hold = hold

    def round(self, state: Any, context: Context) -> Generator[Ask | ServerJob, Any, Any]:
        reply = yield Ask("train", {"model": state.model}, {"model": weighted_mean})

        def step(carry: Tree, index: int) -> tuple[Tree, bool]:
            while index == 1 and self._hold.exists():
                time.sleep(0.001)
            return {name: leaf + 1 for name, leaf in carry.items()}, False

        model = yield ServerJob("refine", lambda: reply.values["model"], step, 3, 1)
        return replace(state, model=model)


async def test_a_server_job_of_an_earlier_life_is_not_continued_with_other_replies(
    make_plan: MakePlan, make_fleet: MakeFleet, tmp_path: Path, play: Play, until: Until
) -> None:
    few = {"rounds": 1, "per_round": 6, "quorum": 0.5}
    algorithm, hold = Refining(make_plan().algorithm, tmp_path / "hold"), tmp_path / "hold"
    make_fleet()
    undisturbed, _ = await play(make_plan("undisturbed", algorithm=algorithm, **few))
    plan = make_plan(algorithm=algorithm, network=MemoryNetwork(), **few)
    fleet = make_fleet(network=plan.network)
    fleet.script = lambda index, work: {"after": 10.0 + index, "reply": "failed" if index == 4 else "good"}
    hold.touch()
    first = asyncio.create_task(serve(plan))
    await until(lambda: load_job(plan.directory / "checkpoint", 1, 1) is not None)
    first.cancel()
    await asyncio.wait({first})
    hold.unlink()
    fleet.script = lambda index, work: {"after": 10.0 + index}
    summary, left = await play(plan)
    assert left.rows[0].accepted == 6
    assert summary.model_digest == undisturbed.model_digest


async def test_a_finished_run_can_go_on_with_more_rounds(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    digest = await undisturbed(make_plan, make_fleet, play)
    make_fleet(12, script=churn)
    await play(make_plan(**{**BIG, "rounds": 5}))
    [grant] = LeaseJournal(make_plan().directory / "checkpoint" / "leases.jsonl").entries()
    network = MemoryNetwork()
    make_fleet(12, script=churn, network=network, lease=grant["grant"])
    watcher = Resumed(make_plan().directory / "summary.json")
    summary, left = await play(make_plan(network=network, observers=(watcher,), **BIG))
    assert summary.model_digest == digest
    assert watcher.told == [(5, left.rows[4].wall_time)]
    assert watcher.ended == [True, False, False, False], "a kill before the fleet is there leaves what was there"
    assert [event["round"] for event in left.named("resume")] == [6]
    assert summary.totals["accepted"] == sum(row.accepted or 0 for row in left.rows)
    assert summary.wall_time > (left.rows[4].wall_time or 0.0)


async def test_a_resumed_coordinator_lets_devices_send_again_what_the_life_before_has_asked_for(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fleet()
    await play(make_plan(rounds=2))
    folder = make_plan().directory / "checkpoint"
    largest = read_record(folder, 2)["record"]["largest_reply"]
    begun: list[int] = []

    class Opened(Service):
        def open(self, network: Any, address: str) -> Any:
            begun.append(self.roster.admission.largest_reply)
            return super().open(network, address)

    monkeypatch.setattr("fedemu.coordinator.serve.Service", Opened)
    [grant] = LeaseJournal(folder / "leases.jsonl").entries()
    network = MemoryNetwork()
    make_fleet(network=network, lease=grant["grant"])
    await play(make_plan(network=network))
    assert begun == [largest]
    assert largest > 0


@pytest.mark.parametrize("line", [b"{}", b'{"release": "nobody\'s"}'])
async def test_a_change_that_the_leases_cannot_have_had_is_a_damaged_line_and_nothing_is_cut(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, line: bytes
) -> None:
    make_fleet()
    await play(make_plan(rounds=2))
    folder = make_plan().directory
    with (folder / "checkpoint" / "leases.jsonl").open("ab") as file:
        file.write(line + b"\n")
    events = (folder / "events.jsonl").read_bytes()
    with pytest.raises(ConfigurationError, match=r"Line 2 of .*leases\.jsonl is damaged"):
        await play(make_plan(network=MemoryNetwork()))
    assert (folder / "events.jsonl").read_bytes() == events


async def test_a_run_of_a_version_that_rounded_sums_goes_on_and_says_so(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    _, left = await play(make_plan(rounds=2))
    assert left.named("arithmetic") == []
    folder = make_plan().directory / "checkpoint"
    document = read_record(folder, 2)
    del document["record"]["sums"], document["record"]["data"]
    write_record(folder, 2, document)
    [grant] = LeaseJournal(folder / "leases.jsonl").entries()
    network = MemoryNetwork()
    make_fleet(network=network, lease=grant["grant"])
    summary, left = await play(make_plan(network=network))
    [told] = left.named("arithmetic")
    assert (told["round"], summary.rounds) == (2, 4)
    assert told["detail"].startswith("An earlier version of fedemu began this run")


async def test_a_checkpoint_of_a_model_of_another_shape_is_not_gone_on_with(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    await play(make_plan(rounds=2))
    wider = {"w": torch.zeros(5), "b": torch.ones(1)}
    with pytest.raises(ConfigurationError, match=r"'w' has the shape \[3\] there, and \[5\] here"):
        await play(make_plan(network=MemoryNetwork(), variables=wider))
    other = {"w": torch.zeros(3), "c": torch.ones(1)}
    with pytest.raises(ConfigurationError, match=r"'b' has the shape \[1\] there, and of nothing here"):
        await play(make_plan(network=MemoryNetwork(), variables=other))


async def test_a_run_does_not_go_on_with_other_data_and_its_logs_stay(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    """Such as those that a relative name leads to in another working folder. An earlier version kept no digest."""
    make_fleet()
    await play(make_plan(rounds=2, data=Digest("a" * 64)))
    plan = make_plan(network=MemoryNetwork(), data=Digest("b" * 64))
    logs = {path: path.read_bytes() for path in plan.directory.glob("*.jsonl")}
    with pytest.raises(
        ConfigurationError, match=r"are not those .* began \(digest a{12}\.\.\. then, b{12}\.\.\. now\)"
    ):
        await play(plan)
    assert {path: path.read_bytes() for path in plan.directory.glob("*.jsonl")} == logs


async def test_a_resume_on_a_machine_that_computes_otherwise_is_refused_and_changes_no_log(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    before, now = (wire.Compute(fedemu="1", torch=torch, numpy="3", device="cpu") for torch in ("2", "4"))
    make_fleet()
    await play(make_plan(rounds=2, compute=before))
    plan = make_plan(network=MemoryNetwork(), compute=now)
    logs = {path: path.read_bytes() for path in plan.directory.glob("*.jsonl")}
    with pytest.raises(ConfigurationError, match=r"The coordinator's machine is not like before: .* torch 4 instead"):
        await play(plan)
    assert {path: path.read_bytes() for path in plan.directory.glob("*.jsonl")} == logs


async def test_a_run_keeps_which_executor_computes_its_devices(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    summary, left = await play(plan := make_plan(rounds=2, executor="plain"))
    for round in (1, 2):
        assert read_record(plan.directory / "checkpoint", round)["record"]["compute"]["executor"] == "plain"
    assert summary.compute["executor"] == left.summary["compute"]["executor"] == "plain"


async def test_more_rounds_for_which_no_fleet_comes_leave_the_model_and_a_summary(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    first, _ = await play(make_plan(rounds=2))
    plan = make_plan(network=MemoryNetwork(), rounds=3, start_timeout=0.2)
    with pytest.raises(UnreachableError):
        await play(plan)
    left = read_run(plan.directory)
    assert (left.summary["outcome"], left.summary["rounds"]) == ("failed", 2)
    assert left.summary["model_digest"] == first.model_digest
    assert (plan.directory / "model.safetensors").exists()


async def test_resuming_a_run_that_is_finished_needs_no_fleet(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    first, _ = await play(make_plan())
    again, _ = await play(make_plan(network=MemoryNetwork()))
    assert (again.model_digest, again.outcome, again.rounds) == (first.model_digest, "completed", 4)
    assert again.data_digest == first.data_digest == make_plan().data_set


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_stops_the_run_with_a_checkpoint_to_go_on_from(
    make_plan: MakePlan, make_fleet: MakeFleet, number: signal.Signals, play: Play, until: Until
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which the tests may run, ignores it
    digest = await undisturbed(make_plan, make_fleet, play)
    fleet = make_fleet(12, script=churn)
    plan = make_plan(**BIG)
    running = asyncio.create_task(play(plan))
    await until(lambda: any(ask.startswith("4.") for _, ask in fleet.trained))
    os.kill(os.getpid(), number)
    with pytest.raises(Interrupted, match=r"Stopped after round \d of 8; go on with --resume"):
        await running
    signal.signal(signal.SIGHUP, before)
    left = read_run(plan.directory)
    assert (left.summary["outcome"], left.summary["rounds"]) == ("interrupted", len(left.rows))
    assert -1 in fleet.stopped
    fleet.stopped.clear()
    summary, _ = await play(make_plan(**BIG))
    assert summary.model_digest == digest


async def test_a_resumed_run_by_the_wall_clock_goes_on_with_the_devices_that_come(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    by_the_wall = {**BIG, "clock": "wall", "start_timeout": 1.0}
    fleet = make_fleet(12, wall=True)
    first = asyncio.create_task(serve(make_plan(**by_the_wall)))
    await until(lambda: any(ask.startswith("3.") for _, ask in fleet.trained))
    first.cancel()
    await asyncio.wait({first})
    await fleet.close()
    seen, network = Seen(), MemoryNetwork()
    make_fleet(8, wall=True, network=network)
    summary, left = await play(make_plan(network=network, observers=(seen,), **by_the_wall))
    assert (summary.outcome, [row.round for row in left.rows]) == ("completed", list(range(1, 9)))
    assert seen.fields["fleet_incomplete"] == {"missing": 4}
    assert "fleet_complete" not in seen.fields


async def test_a_run_by_the_wall_clock_does_not_begin_without_all_of_its_devices_nor_go_on_without_any(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    by_the_wall = {**BIG, "clock": "wall", "start_timeout": 0.5}
    fleet = make_fleet(11, wall=True)
    with pytest.raises(UnreachableError, match="Only 11 of 12 devices came"):
        await serve(make_plan(**by_the_wall))
    more = make_fleet(1, wall=True)
    running = asyncio.create_task(serve(make_plan(**by_the_wall)))
    await until(lambda: any(ask.startswith("3.") for _, ask in fleet.trained))
    running.cancel()
    await asyncio.wait({running})
    await asyncio.gather(fleet.close(), more.close())
    with pytest.raises(UnreachableError, match="Only 0 of 12 devices came"):
        await serve(make_plan(network=MemoryNetwork(), **by_the_wall))


async def test_garbage_is_counted_answered_and_changes_nothing(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    digest = await undisturbed(make_plan, make_fleet, play)
    seen = Reasons()
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
    summary, _ = await play(plan)
    disturbing.cancel()
    assert (summary.model_digest, summary.perturbed) == (digest, False)
    reasons = {envelope.message.reason for envelope in answers if isinstance(envelope.message, wire.Refused)}
    assert reasons <= {"malformed", "version", "unknown_peer", "lease_unknown", "fleet_full"}
    assert {"malformed", "version", "unknown_peer"} <= reasons
    assert {"type", "version", "unknown_peer", "lease_unknown", "unknown_blob"} <= seen.counts.keys()
