"""Peers that repeat themselves or are too many, in whole runs with a scripted fleet."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fedemu.coordinator.fleet.admission import BURST_SECONDS, STRANGERS_BURST, Quotas
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.json_lines import read_lines
from fedemu.coordinator.record.run import Run, read_run
from fedemu.coordinator.record.summary import Summary
from fedemu.coordinator.serve import serve
from fedemu.coordinator.service import comings
from fedemu.coordinator.service.shelf import Shelf
from fedemu.protocol import messages as wire
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.codec import DOWN, Limits, encode
from fedemu.protocol.errors import BlobError, FedemuError, QuorumError
from fedemu.protocol.sharing import edge_messages
from fedemu.protocol.sharing.bundle import Bundle, BundleDecoder
from fedemu.protocol.sharing.edge_messages import Station

Until = Callable[[Callable[[], object]], Awaitable[None]]

MakePlan = Callable[..., CoordinatorPlan]
MakeFleet = Callable[..., Any]
Play = Callable[[CoordinatorPlan], Awaitable[tuple[Summary, Run]]]


class Reasons(Observers):
    """An observer that counts the messages that could not be used, by reason."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def rejected(self, reason: str) -> None:
        self.counts[reason] += 1


async def test_a_second_result_is_answered_with_the_first_verdict(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    fleet = make_fleet(2)
    plan = make_plan(devices=2, per_round=2, over_selection=1.0, rounds=3)
    running = asyncio.create_task(play(plan))
    await until(lambda: bool(fleet.devices) and "1.0.0" in fleet.devices[0].verdicts)
    fleet.devices[0].dealer.send(wire.Result(ask="1.0.0", examples=9, steps=1, metrics={}, seconds=99.0, tensors=()))
    fleet.devices[0].dealer.send(wire.Result(ask="0.0.7", examples=9, steps=1, metrics={}, tensors=()))
    _, left = await running
    assert [row.device_seconds for row in left.rows] == [(0.5 + 1.0) / 2] * 3
    assert wire.Duplicate(ask="1.0.0", verdict="accepted") in fleet.devices[0].answers
    assert wire.Late(ask="0.0.7") in fleet.devices[0].answers


async def test_devices_beyond_the_fleet_are_told_so(make_plan: MakePlan, make_fleet: MakeFleet, play: Play) -> None:
    first, second = make_fleet(4), make_fleet(4)
    third = make_fleet(2)
    await play(make_plan())
    assert sorted([*first.devices, *second.devices]) == [0, 1, 2, 3, 4, 5]
    assert not third.devices
    assert third.refused[0].reason == "fleet_full"


async def test_events_tell_of_the_first_refusals_and_of_machines_that_cannot_take_part(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    fleet = make_fleet()
    running = asyncio.create_task(play(make_plan(rounds=1)))
    await until(lambda: fleet.granted is not None)
    heard: list[Any] = []
    for _ in range(23):
        stranger = fleet.network.connect(fleet.address, DOWN, lambda envelope: heard.append(envelope.message), print)
        stranger.send(wire.Heartbeat())
    await until(lambda: len(heard) == 23)
    fleet.supervisor.send(wire.Bye(reason=wire.UNABLE, detail="this machine\nwas not told to run\x1bnet.py"))
    _, left = await running
    assert [event["count"] for event in left.named("refusal")] == [*range(1, 10), 10]
    (unable,) = left.named("unable")
    assert unable["detail"] == "this machine was not told to run net.py"


async def test_a_stranger_who_calls_himself_an_edge_cannot_tell_people_that_a_machine_has_left(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    fleet = make_fleet()
    running = asyncio.create_task(play(make_plan(rounds=1)))
    await until(lambda: fleet.granted is not None)
    stranger = fleet.network.connect(fleet.address, DOWN, print, print)
    stranger.send(Station(host="x"))
    stranger.send(wire.Bye(reason=wire.UNABLE, detail="please run this command"))
    _, left = await running
    assert next(event["reason"] for event in left.named("leave") if event["device"] is None) == wire.UNABLE
    assert left.named("unable") == []


async def test_a_disk_that_does_not_take_the_event_of_a_channel_that_is_closed_ends_the_run(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    class FullDisk(Observers):
        def event(self, name: str, **fields: Any) -> None:
            if name == "closed":
                raise FedemuError("events.jsonl cannot be written: the disk is full")

    fleet = make_fleet()
    running = asyncio.create_task(play(make_plan(devices=7, start_timeout=20.0, observers=[FullDisk()])))
    await until(lambda: fleet.granted is not None)
    heard: list[Any] = []
    decoder = BundleDecoder(edge_messages.down_decoder(Limits()))
    edge = fleet.network.connect(fleet.address, decoder, lambda envelope: heard.append(envelope.message), print)
    edge.send(Station(host="x"))
    edge.send(Bundle(channels=(5,), frames=(1,)), encode(wire.Enroll(count=1)))
    await until(lambda: any(isinstance(message, Bundle) for message in heard))
    edge.send(Bundle(channels=(), frames=(), closed=(5,)))
    with pytest.raises(FedemuError, match="the disk is full"):
        await running


async def test_devices_supervisors_and_edges_that_come_and_go_without_end_fill_no_disk(
    make_plan: MakePlan, make_fleet: MakeFleet, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comings, "AT_ONCE", 10)
    monkeypatch.setattr(comings, "PER_SECOND", 0.0)
    fleet, plan = make_fleet(), make_plan(devices=7)
    running = asyncio.create_task(serve(plan))
    await until(lambda: fleet.granted is not None)
    heard: list[wire.Message] = []
    strangers = [
        fleet.network.connect(
            fleet.address, edge_messages.down_decoder(Limits()), lambda envelope: heard.append(envelope.message), print
        )
        for _ in range(25)
    ]

    def heard_of(kind: type[wire.Message]) -> list[Any]:
        return [message for message in heard if isinstance(message, kind)]

    for stranger in strangers:
        stranger.send(Station(host="x\ny"))
    await until(lambda: len(heard_of(edge_messages.Stationed)) == 25)
    for stranger in strangers:
        stranger.send(wire.Bye(reason="bored"))
    foreigner = strangers[0]
    foreigner.send(wire.Enroll(count=1))
    await until(lambda: len(heard_of(wire.Granted)) == 1)
    granted = heard_of(wire.Granted)[0]
    device = granted.ranges[0][0]
    times = 20
    for incarnation in range(times):
        foreigner.send(wire.Hello(device=device, incarnation=2 * incarnation, lease=granted.lease))
        foreigner.send(wire.Hello(device=device, incarnation=2 * incarnation + 1, lease=granted.lease))
        foreigner.send(wire.Bye(reason="busy"))
        foreigner.send(wire.Enroll(count=1, lease=granted.lease))
    await until(lambda: len(heard_of(wire.Granted)) == 1 + times)
    running.cancel()
    await asyncio.wait([running])
    left = read_run(plan.directory)
    assert [event["host"] for event in left.named("edge")] == ["x y"] * 10
    assert len([event for event in left.named("leave") if event["reason"] == "bored"]) == 10
    of_device = [event for event in left.named("join") if event["device"] == device]
    assert len(of_device) == 10
    assert len([event for event in left.named("leave") if event["reason"] == "busy"]) <= 10
    assert len([event for event in left.named("enroll") if event["devices"] == 1]) == 10


async def test_asking_twice_for_places_is_one_event(make_plan: MakePlan, make_fleet: MakeFleet, play: Play) -> None:
    fleet = make_fleet()
    for _ in range(2):
        fleet.supervisor.send(wire.Enroll(count=fleet.count, lease=None, host="here"))
    _, left = await play(make_plan(rounds=1))
    assert [event["devices"] for event in left.named("enroll")] == [fleet.count]


async def test_a_connection_that_becomes_another_device_has_left_as_the_first(
    make_plan: MakePlan, make_fleet: MakeFleet, until: Until
) -> None:
    fleet = make_fleet(2, wall=True, script=lambda index, work: {"reply": "silent"})
    plan = make_plan(clock="wall", devices=2, per_round=2, over_selection=1.0, rounds=1, deadline=5.0, attempts=1)
    running = asyncio.create_task(serve(plan))
    await until(lambda: fleet.devices and all(device.works for device in fleet.devices.values()))
    hello = wire.Hello(device=1, incarnation=99, lease=fleet.granted.lease)
    fleet.devices[0].dealer.send(hello)
    with pytest.raises(QuorumError):
        await asyncio.wait_for(running, 60)
    left = read_run(plan.directory)
    assert read_lines(plan.directory / "asks.jsonl")[0]["outcomes"] == "dd"
    left_first = left.named("leave")[0]
    assert (left_first["device"], left_first["reason"]) == (0, "another device")


async def test_a_machine_with_another_key_takes_no_device_with_a_stolen_lease(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    fleet = make_fleet(2)
    fleet.supervisor.key = "mine"
    heard: list[Any] = []
    thief = fleet.network.connect(fleet.address, DOWN, lambda envelope: heard.append(envelope.message), print)
    thief.key = "another"
    running = asyncio.create_task(play(make_plan(devices=2, per_round=2, over_selection=1.0, rounds=3)))
    await until(lambda: fleet.granted is not None)
    for device in fleet.devices.values():
        device.dealer.key = "mine"
    thief.send(wire.Hello(device=0, incarnation=2**30, lease=fleet.granted.lease))
    thief.send(wire.Enroll(count=2, lease=fleet.granted.lease))
    await until(lambda: len(heard) == 2)
    assert [message.reason for message in heard] == ["lease_unknown"] * 2
    summary, left = await running
    assert (summary.outcome, summary.perturbed) == ("completed", False)
    assert {event["device"] for event in left.named("join")} == {0, 1}


async def test_a_connection_that_sends_too_much_is_closed_and_told_of_once(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    fleet = make_fleet(2)
    plan = make_plan(devices=2, per_round=2, over_selection=1.0, rounds=2)
    stranger = fleet.network.connect(fleet.address, DOWN, lambda envelope: None, print)
    running = asyncio.create_task(play(plan))
    for _ in range(STRANGERS_BURST + 300):
        stranger.send(wire.Heartbeat())
    summary, left = await running
    assert (summary.outcome, summary.perturbed) == ("completed", False)
    assert [(event["reason"], event["connections"]) for event in left.named("connections_closed")] == [("too_much", 1)]


async def test_a_machine_that_comes_behind_a_vanished_one_is_told_to_wait(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    fleet = make_fleet(2)
    running = asyncio.create_task(play(make_plan(devices=2, per_round=2, over_selection=1.0, rounds=2, patience=10)))
    await until(lambda: len(fleet.devices) == 2)
    await fleet.close()
    second = make_fleet(2)
    await until(lambda: any("machines that are away lose theirs within" in one.detail for one in second.refused))
    assert {one.reason for one in second.refused} == {"fleet_full"}
    running.cancel()


async def test_a_goodbye_on_a_connection_that_is_over_already_is_no_refusal(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    seen = Reasons()
    fleet = make_fleet(2)
    plan = make_plan(devices=2, per_round=2, over_selection=1.0, rounds=1, observers=(seen,))
    running = asyncio.create_task(play(plan))
    await until(lambda: fleet.granted is not None)
    heard: list[Any] = []
    stranger = fleet.network.connect(fleet.address, DOWN, lambda envelope: heard.append(envelope.message), print)
    stranger.send(wire.Bye(reason="offline"))
    stranger.send(wire.Heartbeat())
    await until(lambda: bool(heard))
    await running
    assert [message.reason for message in heard] == ["unknown_peer"]
    assert seen.counts == {"unknown_peer": 1}


async def test_long_messages_of_strangers_are_not_read(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    fleet = make_fleet(2)
    plan = make_plan(devices=2, per_round=2, over_selection=1.0, rounds=1)
    heard: list[Any] = []
    stranger = fleet.network.connect(fleet.address, DOWN, lambda envelope: heard.append(envelope.message), print)
    running = asyncio.create_task(play(plan))
    intervals = tuple((float(i), i + 0.5) for i in range(1000))
    stranger.send(wire.Presence(until=9e9, intervals=intervals))
    await until(lambda: bool(heard))
    assert [(message.reason, "its message is long" in message.detail) for message in heard] == [("unknown_peer", True)]
    summary, _ = await running
    assert (summary.outcome, summary.perturbed) == ("completed", False)


@pytest.mark.parametrize("wall", [False, True])
async def test_messages_of_another_life_of_the_coordinator_are_counted_and_have_no_effect(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until, wall: bool
) -> None:
    seen = Reasons()
    fleet = make_fleet(2, script=lambda index, work: {"reply": "good" if index else "silent"}, wall=wall)
    clock = "wall" if wall else "virtual"
    plan = make_plan(devices=2, per_round=2, over_selection=1.0, rounds=1, quorum=0.5, clock=clock, observers=(seen,))
    running = asyncio.create_task(play(plan))
    await until(lambda: bool(fleet.devices) and "1.0.0" in fleet.devices[1].verdicts)
    device = fleet.devices[0]
    other = device.works["1.0.0"].epoch ^ 1
    stale = (
        wire.Result(ask="1.0.0", examples=1, steps=1, metrics={}, epoch=other, tensors=()),
        wire.Failed(ask="1.0.0", reason="training", epoch=other),
        wire.Declined(ask="1.0.0", reason="no", epoch=other),
        wire.Scheduled(ask="1.0.0", event="finish", at=0.0, epoch=other),
    )
    for message in stale:
        device.dealer.send(message)
    await until(lambda: seen.counts["epoch"] == len(stale))
    assert not running.done()
    # A device that names no epoch is believed.
    device.dealer.send(wire.Failed(ask="1.0.0", reason="training"))
    _, left = await running
    assert [(row.accepted, row.failed, row.rejected) for row in left.rows] == [(1, 1, 0)]


async def test_large_chunks_of_blobs_are_read_apart_from_the_event_loop(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: dict[int, str] = {}
    answer = Shelf.answer

    def watched(shelf: Shelf, need: wire.Need) -> tuple[wire.Blob, bytes]:
        readers[need.length] = threading.current_thread().name.partition("_")[0]
        return answer(shelf, need)

    monkeypatch.setattr(Shelf, "answer", watched)
    fleet = make_fleet(2)
    plan = make_plan(devices=2, per_round=2, over_selection=1.0, rounds=2)
    running = asyncio.create_task(play(plan))
    await until(lambda: fleet.granted is not None)
    wanted = fleet.granted.experiment.digest
    for digest in (wanted, "f" * 64):
        fleet.supervisor.send(wire.Need(digest=digest, offset=0, length=2**20))
    await until(lambda: wanted in fleet.blobs and any(message.reason == "unknown_blob" for message in fleet.refused))
    assert fleet.blobs[wanted] == plan.experiment
    await running
    assert (readers[2**20], readers[64]) == ("blobs", "MainThread")


@pytest.mark.parametrize("length", [64, 2**20])
async def test_a_blob_that_the_disk_lost_ends_the_run_at_once_and_does_not_let_devices_wait(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until, length: int
) -> None:
    fleet = make_fleet(2, script=lambda index, work: {"reply": "silent"})
    plan = make_plan(devices=2, per_round=2, over_selection=1.0, rounds=2)
    running = asyncio.create_task(play(plan))
    await until(lambda: len(fleet.devices) == 2 and bool(fleet.devices[0].works))
    (plan.directory / "blobs" / fleet.granted.experiment.digest).unlink()
    fleet.supervisor.send(wire.Need(digest=fleet.granted.experiment.digest, offset=0, length=length))
    with pytest.raises(
        FedemuError, match=r"^the blob .*, which devices need, cannot be read from .*/blobs: No such file"
    ):
        await running
    assert fleet.stopped == {-1, 0, 1}


async def test_a_refusal_that_cannot_be_recorded_ends_the_run(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    class Full(Observers):
        def rejected(self, reason: str) -> None:
            raise FedemuError("events.jsonl cannot be written: No space left on device")

    fleet = make_fleet(2, script=lambda index, work: {"reply": "silent"})
    running = asyncio.create_task(play(make_plan(devices=2, per_round=2, observers=(Full(),))))
    await until(lambda: len(fleet.devices) == 2 and bool(fleet.devices[0].works))
    fleet.network.connect(fleet.address, DOWN, print, print).send(wire.Heartbeat())
    with pytest.raises(FedemuError, match=r"^events.jsonl cannot be written: No space left on device$"):
        await asyncio.wait_for(running, 30)


def test_a_blob_that_cannot_be_read_for_want_of_descriptors_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path)
    shelf = Shelf(store)
    need = wire.Need(digest=shelf.keep("model", b"bytes").digest, offset=0, length=5)
    assert bytes(shelf.answer(need)[1]) == b"bytes"

    def answer(need: wire.Need) -> tuple[wire.Blob, memoryview]:
        raise BlobError("not now") from OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(store, "answer", answer)
    with pytest.raises(BlobError, match="not now"):
        shelf.answer(need)


EMPTY_BUNDLE = Bundle(channels=(), frames=())
STRANGE_CLOSINGS = Bundle(channels=(), frames=(), closed=(7,) * 6_000)
WRONG_BUNDLE = Bundle(channels=(1,), frames=(8,))


@pytest.mark.parametrize("flood", [wire.Heartbeat(), EMPTY_BUNDLE, STRANGE_CLOSINGS, WRONG_BUNDLE])
async def test_an_edge_without_devices_may_send_no_more_than_a_stranger(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, flood: wire.Message
) -> None:
    fleet = make_fleet(2)
    quotas = Quotas(messages_per_second=20.0)
    plan = make_plan(devices=2, per_round=2, over_selection=1.0, rounds=2, quotas=quotas)
    edge = fleet.network.connect(fleet.address, DOWN, lambda envelope: None, lambda error: None)
    edge.send(Station())
    for _ in range(STRANGERS_BURST + 20 * BURST_SECONDS + 100):
        edge.send(flood)
    running = asyncio.create_task(play(plan))
    summary, left = await running
    assert (summary.outcome, summary.perturbed) == ("completed", False)
    assert [event["reason"] for event in left.named("connections_closed")] == ["too_much"]


async def test_a_supervisor_that_says_it_sleeps_has_left(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    fleet = make_fleet(2)
    running = asyncio.create_task(play(make_plan(devices=2, per_round=2, over_selection=1.0, rounds=3)))
    await until(lambda: fleet.granted is not None)
    fleet.supervisor.send(wire.Bye(reason=wire.ASLEEP))
    _, left = await running
    assert {"event": "leave", "device": None, "reason": "asleep"}.items() <= left.named("leave")[0].items()
