"""A coordinator from its plan to its summary, over the in-memory network with a scripted fleet."""

from __future__ import annotations

import errno
import gc
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fedemu.coordinator.asks.exchange import Exchange
from fedemu.coordinator.asks.payload import Payload
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record import checkpoint
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import Run, read_run
from fedemu.coordinator.record.run_directory import RunDirectory
from fedemu.coordinator.record.summary import Summary
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import DOWN
from fedemu.protocol.errors import ConfigurationError, FedemuError, UnreachableError
from fedemu.protocol.transport.memory import MemoryNetwork

MakePlan = Callable[..., CoordinatorPlan]
MakeFleet = Callable[..., Any]
Play = Callable[[CoordinatorPlan], Awaitable[tuple[Summary, Run]]]


class Watcher(Observers):
    """An observer that remembers what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[int, int, float, int]] = []
        self.rows: list[Row] = []
        self.outcomes: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def round_started(self, round: int, attempt: int, virtual_time: float, selected: int) -> None:
        self.started.append((round, attempt, virtual_time, selected))

    def round_finished(self, row: Row) -> None:
        self.rows.append(row)

    def device_result(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    def event(self, name: str, **fields: Any) -> None:
        self.events[name] += 1

    def traffic(self, kind: str, direction: str, size: int) -> None:
        self.bytes[kind, direction] += size


async def test_a_run_completes_and_leaves_its_results(make_plan: MakePlan, make_fleet: MakeFleet, play: Play) -> None:
    fleet = make_fleet()
    plan = make_plan()
    summary, left = await play(plan)
    assert (summary.outcome, summary.rounds, summary.perturbed) == ("completed", 4, False)
    first = left.rows[0]
    assert (first.selected, first.accepted, first.cancelled) == (4, 3, 1)
    assert (first.task, first.attempts, first.online) == (0, 1, 6)
    assert [row.round for row in left.rows] == [1, 2, 3, 4]
    assert fleet.stopped == {-1, 0, 1, 2, 3, 4, 5}
    assert left.summary["model_digest"] == summary.model_digest
    assert (plan.directory / "model.safetensors").is_file()


@pytest.mark.parametrize("when", ["a round", "the end"])
async def test_a_full_disk_ends_the_run_with_its_name_and_the_fleet_is_told(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def full(self: RunDirectory, *_: object) -> None:
        if when == "the end" or len(self.rows()) == 2:
            raise FedemuError("model.safetensors cannot be written: the disk is full; make room there")

    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "finish", full)
        patched.setattr(RunDirectory, "flush", full if when == "a round" else RunDirectory.flush)
        fleet = make_fleet()
        with pytest.raises(FedemuError, match="the disk is full"):
            await play(make_plan())
    assert fleet.stopped == {-1, 0, 1, 2, 3, 4, 5}
    network = MemoryNetwork()
    make_fleet(network=network)
    summary, left = await play(make_plan(network=network))
    assert (summary.outcome, [row.round for row in left.rows]) == ("completed", [1, 2, 3, 4])


@pytest.mark.parametrize("removes", [True, False])
async def test_a_file_of_the_run_that_is_refused_is_named_and_one_elsewhere_is_an_error_of_its_own(
    removes: bool, make_plan: MakePlan, make_fleet: MakeFleet, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan()
    place = plan.directory / "checkpoint" / "state-1.0.safetensors" if removes else plan.directory.parent / "mine.csv"

    def refuse(*_: object) -> None:  # as where a ticket for a file system has run out
        raise PermissionError(errno.EACCES, "Permission denied", str(place))

    monkeypatch.setattr(checkpoint, "save", refuse)
    fleet = make_fleet()
    with pytest.raises((FedemuError, PermissionError)) as told:
        await play(plan)
    assert fleet.stopped == {-1, 0, 1, 2, 3, 4, 5}
    if removes:
        assert (type(told.value), str(told.value)) == (FedemuError, f"{place} cannot be used: Permission denied")
    else:
        assert type(told.value) is PermissionError


@pytest.mark.parametrize("when", ["a round", "the end"])
async def test_a_method_that_cannot_tell_its_model_ends_the_run_by_its_first_error_and_the_fleet_is_told(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    plan = make_plan()

    def variables(state: Any) -> Any:
        rounds = len(read_run(plan.directory).rows)
        if rounds == 4 or (rounds and when == "a round"):
            # Rounds compute in threads. Two of them may fail at the same time, so these errors have one text.
            at_the_end = threading.current_thread() is threading.main_thread()
            raise ValueError(f"no model in {'the end' if at_the_end else 'a round'}")
        return state.model

    monkeypatch.setattr(plan.algorithm, "variables", variables)
    fleet = make_fleet()
    with pytest.raises(ValueError, match=f"no model in {when}"):
        await play(plan)
    assert fleet.stopped == {-1, 0, 1, 2, 3, 4, 5}


async def test_a_run_whose_checkpoint_is_gone_is_not_started_over(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    await play(make_plan(rounds=3))
    plan = make_plan(rounds=4, network=MemoryNetwork())
    for file in (plan.directory / "checkpoint").iterdir():
        file.unlink()
    with pytest.raises(ConfigurationError, match="played 3 rounds, but its checkpoint is gone"):
        await play(plan)
    assert len(read_run(plan.directory).rows) == 3


async def test_it_says_that_it_has_opened_unless_no_round_is_left(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    opened: list[str] = []
    make_fleet()
    await play(make_plan(opened=lambda address: opened.append("first")))
    await play(make_plan(network=MemoryNetwork(), opened=lambda address: opened.append("again")))
    assert opened == ["first"]


async def test_a_fleet_that_does_not_come_is_an_error_that_says_how_many_came(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    fleet = make_fleet(4)
    plan = make_plan(start_timeout=1.5)
    with pytest.raises(UnreachableError, match=r"Only 4 of 6 devices came within 1\.5 s"):
        await play(plan)
    assert -1 in fleet.stopped
    assert read_run(plan.directory).summary == {}


async def test_a_machine_that_was_given_places_and_sends_no_device_is_named(
    make_plan: MakePlan, make_fleet: MakeFleet, network: MemoryNetwork, play: Play
) -> None:
    make_fleet(4)
    silent = network.connect("here", DOWN, lambda envelope: None, lambda error: None)
    silent.send(wire.Enroll(count=2, lease=None, host="attic"))
    with pytest.raises(UnreachableError, match=r"4 of 6 devices .*\(places of the others were given to attic\);"):
        await play(make_plan(start_timeout=1.5))
    silent.close()


async def test_an_address_in_use_is_a_configuration_error(
    make_plan: MakePlan, network: MemoryNetwork, play: Play
) -> None:
    router = network.bind("here", DOWN, lambda peer, envelope: None, lambda peer, error: None)
    with pytest.raises(ConfigurationError):
        await play(make_plan())
    router.close()


async def test_an_error_of_the_coordinator_ends_the_run(
    make_plan: MakePlan, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    def full(*arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("fedemu.coordinator.asks.examination.check", full)
    make_fleet()
    plan = make_plan()
    with pytest.raises(OSError, match="No space"):
        await play(plan)
    left = read_run(plan.directory)
    assert left.summary["outcome"] == "failed"


async def test_no_memory_of_an_ask_waits_for_the_garbage_collector(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    gc.collect()
    gc.disable()
    try:
        make_fleet()
        await play(make_plan(rounds=3))
        left = [each for each in gc.get_objects() if type(each) in (Exchange, Payload)]
    finally:
        gc.enable()
    assert left == []


async def test_observers_hear_of_rounds_outcomes_and_events(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    seen = Watcher()
    _, left = await play(make_plan(observers=(seen,), rounds=2))
    assert seen.started == [(1, 0, 0.0, 4), (2, 0, left.rows[0].virtual_time, 4)]
    assert seen.rows == list(left.rows)
    assert seen.outcomes == {"accepted": 6, "cancelled": 2}
    assert {"enroll", "join", "fleet_complete", "checkpoint"} <= set(seen.events)
    assert [event["round"] for event in left.named("checkpoint")] == [1, 2]
    assert seen.bytes["wire", "up"] == sum(row.wire_bytes_up for row in left.rows) > 0
