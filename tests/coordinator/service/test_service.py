"""The coordinator's timer and its faults, and what is told of devices that have no connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fedemu.coordinator.fleet.online_times import OnlineTimes
from fedemu.coordinator.fleet.planned_times import PlannedTimes
from fedemu.coordinator.fleet.roster import Roster
from fedemu.coordinator.observer import Absence, Observers
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.run import Run
from fedemu.coordinator.record.summary import Summary
from fedemu.coordinator.service import comings
from fedemu.coordinator.service.reception import Reception
from fedemu.coordinator.service.service import Service
from fedemu.coordinator.service.shelf import Shelf
from fedemu.coordinator.service.view import FleetView
from fedemu.coordinator.service.waits import MOMENT_SECONDS
from fedemu.coordinator.settings import Settings
from fedemu.coordinator.timeline import Timeline
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.codec import Envelope
from fedemu.protocol.errors import FedemuError, KeyRevoked, MalformedMessage
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import (
    ASLEEP,
    SILENT,
    Beat,
    Bye,
    Compute,
    Declined,
    Died,
    Enroll,
    Failed,
    Granted,
    Hello,
    Need,
    Presence,
    Result,
    Scheduled,
    Stop,
    Wake,
)
from fedemu.protocol.sharing.edge_messages import NO_EDGE, Station, Vouch
from fedemu.protocol.transport.memory import MemoryNetwork

Play = Callable[[CoordinatorPlan], Awaitable[tuple[Summary, Run]]]
START = 100.0


class FullDisk(Observers):
    """An observer that fails when the timer tells it about the fleet for the third time."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def fleet(self, counts: Mapping[str, int]) -> None:
        self.times += 1
        if self.times == 3:
            raise FedemuError("Cannot write events.jsonl: No space left on device.")


async def test_a_fault_in_the_timer_ends_the_run_with_a_checkpoint(
    make_plan: Callable[..., CoordinatorPlan], make_fleet: Callable[..., Any], play: Play
) -> None:
    fleet = make_fleet(
        2, script=lambda index, work: {"after": 1.0, "reply": "silent" if work.ask[0] == "3" else "good"}
    )
    plan = make_plan(devices=2, per_round=2, over_selection=1.0, rounds=4, observers=(FullDisk(),))
    with pytest.raises(FedemuError, match="No space left"):
        await play(plan)
    summary = json.loads((plan.directory / "summary.json").read_text())
    assert (summary["outcome"], summary["rounds"]) == ("failed", 2)
    again = MemoryNetwork()
    make_fleet(2, network=again, lease=fleet.granted.lease, script=lambda index, work: {"after": 1.0})
    finished, _ = await play(make_plan(devices=2, per_round=2, over_selection=1.0, rounds=4, network=again))
    assert (finished.outcome, finished.rounds) == ("completed", 4)


def a_service(folder: Path, clock: Callable[[], float] = lambda: START) -> Service:
    settings = Settings(run="test", seed=1, rounds=4, devices=3, per_round=2, start_timeout=60.0)
    timeline = Timeline("virtual", clock=clock)

    def granted(**fields: Any) -> Any:
        return Beat()

    return Service(settings, Roster(settings), Shelf(BlobStore(folder)), timeline, Observers(), granted)


async def test_a_machine_binds_others_to_its_way_of_computing_only_while_it_is_there_or_once_work_was_given_out(
    tmp_path: Path,
) -> None:
    service = a_service(tmp_path)

    def takes_part(name: bytes, torch: str) -> bool:
        computes = Compute(fedemu="1", torch=torch, numpy="3", device="cpu", processor="P", instructions="I")
        message = Enroll(count=1, lease=None, host=name.decode(), compute=computes)
        service.reception.received(name, Envelope(message, []))
        return service.roster.leases.of_peer(name) is not None

    def leaves(name: bytes) -> None:
        service.reception.received(name, Envelope(Bye(reason="stopped"), []))

    assert takes_part(b"a", "old")
    assert not takes_part(b"b", "new")
    leaves(b"a")
    assert takes_part(b"b", "new"), "nothing was computed by the machine that has left"
    assert takes_part(b"c", "new")
    leaves(b"b")
    assert not takes_part(b"a", "old"), "another machine is there that computes like the one that has left"
    leaves(b"c")
    service.roster.likeness.settled = True
    assert not takes_part(b"a", "old"), "results may depend on those that have left"


async def test_who_is_away_after_a_dropout_is_not_counted_as_on_line(tmp_path: Path) -> None:
    service = a_service(tmp_path)
    service.roster.planned = PlannedTimes(3, None)
    assert service.counts()["online"] == 3
    service.roster.columns.away[1] = 5.0
    assert service.counts()["online"] == 2


async def test_nothing_is_remembered_of_a_peer_whose_connection_is_gone(tmp_path: Path) -> None:
    reception = a_service(tmp_path).reception
    while reception.refusals.allow(b"peer", "fleet_full", START):
        assert list(reception.refusals.idle) == [b"peer"]
    reception.closed(b"peer")
    assert not reception.refusals.idle
    assert reception.refusals.allow(b"peer", "malformed", START)
    for message in (Station(), Vouch(key="of a machine behind it")):
        reception.received(b"peer", Envelope(message, ()))
    reception.closed(b"peer")
    reception.received(b"peer", Envelope(Enroll(count=1), ()))
    lease = reception.roster.leases.of_peer(b"peer")
    assert lease is not None
    assert lease.key == ""
    assert not reception.broken.done()


async def test_a_machine_that_says_goodbye_before_any_of_its_devices_came_keeps_no_places(tmp_path: Path) -> None:
    reception = a_service(tmp_path, lambda: START).reception
    for supervisor in (b"ended at once", b"started again"):
        reception.received(supervisor, Envelope(Enroll(count=3, host="attic"), ()))
        assert reception.roster.leases.of_peer(supervisor) is not None
        reception.received(supervisor, Envelope(Bye(reason="stopped"), ()))
        assert (reception.roster.leases.granted, reception.roster.peers) == (0, [])


@pytest.mark.parametrize("sleeping", [False, True])
async def test_nothing_is_kept_of_machines_that_came_and_went_however_many_they_were(
    tmp_path: Path, sleeping: bool, entries: Callable[[object], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comings, "LEAST_TALES", 4, raising=False)
    now = START
    service = a_service(tmp_path, lambda: now)
    service.roster.planned = PlannedTimes(3, None) if sleeping else None
    reception, leases = service.reception, service.roster.leases
    monkeypatch.setattr(reception, "_key_of", lambda peer: f"key {peer.decode().split()[-1]}")
    kept = []
    for machine in range(100):
        supervisor, device, again = (f"{what} {machine}".encode() for what in ("supervisor", "device", "again"))
        reception.received(supervisor, Envelope(Enroll(count=3, host="attic"), ()))
        lease = leases.of_peer(supervisor)
        assert lease is not None, "the places of the machine before are free again"
        reception.received(device, Envelope(Hello(device=0, incarnation=machine, lease=lease.token), ()))
        reception.closed(supervisor)
        reception.closed(device)
        if machine % 2:  # it was killed, and is back at once
            reception.received(again, Envelope(Enroll(count=3, lease=lease.token), ()))
            assert leases.of_peer(again) is lease
            reception.closed(again)
        now += 1000.0
        reception.expire(now)
        assert service.roster.peers == []
        now += 1000.0
        kept.append(entries(reception))
    assert not reception.broken.done()
    assert max(kept[80:]) <= max(kept[:20])


async def test_no_session_is_remembered_that_is_over_without_an_event(tmp_path: Path) -> None:
    """A connection that is cut again and again must not fill the memory of the coordinator."""
    reception = a_service(tmp_path).reception
    told = reception._comings._told
    reception.received(b"first", Envelope(Enroll(count=3), ()))
    lease = reception.roster.leases.of_peer(b"first")
    assert lease is not None
    reception.closed(b"first")
    reception.received(b"second", Envelope(Enroll(count=3, lease=lease.token), ()))
    assert told == {b"second"}, "the machine came back before its silence was noticed"
    reception.received(b"second", Envelope(Hello(device=0, incarnation=1, lease=lease.token), ()))
    reception.received(b"second", Envelope(Died(device=0, incarnation=1), ()))
    assert told == {b"second"}, "the device is over, and its machine is not"
    reception.received(b"second", Envelope(Hello(device=0, incarnation=2, lease=lease.token), ()))
    reception.closed(b"second")
    reception.received(b"third", Envelope(Enroll(count=3, lease=lease.token), ()))
    reception.received(b"third", Envelope(Hello(device=0, incarnation=3, lease=lease.token), ()))
    assert told == {b"third", 0}, "a device without a supervisor enrols on its own connection"
    reception.received(b"third", Envelope(Bye(), ()))
    assert told == set()
    assert not reception.broken.done()


async def test_a_member_whose_message_cannot_be_read_stays_and_one_whose_key_was_revoked_makes_room_at_once(
    tmp_path: Path,
) -> None:
    reception = a_service(tmp_path).reception
    leases = reception.roster.leases
    for peer in (b"clumsy", b"revoked"):
        reception.received(peer, Envelope(Enroll(count=1), ()))
    reception.rejected(b"clumsy", MalformedMessage("header", "it cannot be read"))
    reception.rejected(b"revoked", KeyRevoked())
    assert leases.peers == [b"clumsy"]
    reception.received(b"next", Envelope(Enroll(count=2), ()))
    lease = leases.of_peer(b"next")
    assert lease is not None
    assert (leases.peers, lease.ranges) == ([b"clumsy", b"next"], ((1, 3),))


async def test_a_peer_that_may_be_no_edge_gets_no_place_as_one(tmp_path: Path) -> None:
    service, sent = a_service(tmp_path), []
    reception = Reception(
        service._settings, service.roster, service.shelf, service.timeline, Observers(), Granted,
        lambda peer, message, frames: sent.append(message), may_be_edge=lambda peer: False,
    )  # fmt: skip
    reception.received(b"peer", Envelope(Station(), ()))
    assert [message.reason for message in sent] == [NO_EDGE]
    assert service.roster.stations == {}


async def test_the_name_of_a_machine_brings_no_control_characters_to_the_terminals_of_others(tmp_path: Path) -> None:
    service, sent = a_service(tmp_path), []
    reception = Reception(
        service._settings, service.roster, service.shelf, service.timeline, Observers(), lambda **fields: Beat(),
        lambda peer, message, frames: sent.append(message),
    )  # fmt: skip
    for number, host in enumerate(("first\x1b[2J\nto be done", "second")):
        way = Compute(fedemu="1", torch=str(number), numpy="1", device="cpu")
        reception.received(host.encode(), Envelope(Enroll(count=1, host=host, compute=way), ()))
    assert "second would compute otherwise than first [2J to be done does" in sent[-1].detail


async def test_a_device_of_which_its_relay_says_that_it_fell_silent_has_done_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, Any]] = []
    monkeypatch.setattr(Observers, "event", lambda self, name, **fields: told.append((name, fields)))
    reception = a_service(tmp_path).reception
    reception.received(b"machine", Envelope(Enroll(count=3), ()))
    lease = reception.roster.leases.of_peer(b"machine")
    assert lease is not None
    reception.received(b"0", Envelope(Hello(device=0, incarnation=1, lease=lease.token), ()))
    told.clear()
    left: list[tuple[Any, ...]] = []
    reception.exchange = SimpleNamespace(station_left=lambda *gone: None, left=lambda *gone: left.append(gone))  # type: ignore[assignment]
    reception.received(b"0", Envelope(Bye(reason=SILENT), ()))
    assert (told, left) == ([("silence", {"device": 0})], [(0, START, "silence")])
    reception.received(b"machine", Envelope(Bye(reason=SILENT), ()))
    assert told[1:] == [("silence", {"device": None})]
    assert reception.roster.leases.granted == 3, "it may come back for its places"
    assert not reception.broken.done()


async def test_a_peer_in_the_middle_of_a_long_message_lives_and_hears_that_the_coordinator_does(tmp_path: Path) -> None:
    service = a_service(tmp_path)
    sending, sent = {b"busy"}, []
    reception = Reception(
        service._settings, service.roster, service.shelf, service.timeline, Observers(), Granted,
        lambda peer, message, frames: sent.append((peer, message)), is_sending=sending.__contains__,
    )  # fmt: skip
    for peer in (b"busy", b"silent"):
        service.roster.enroll(peer, 1, None, "", START)
    for now in range(100, 130):
        reception.expire(float(now))
    assert sent == [(b"busy", Beat())] * 5
    assert service.roster.peers == [b"busy"]
    sending.clear()
    reception.expire(135.0)
    assert service.roster.peers == []


async def test_the_ask_hears_of_results_on_their_way_and_of_machines_that_fetch_blobs(tmp_path: Path) -> None:
    service, sending, underway = a_service(tmp_path), {b"sends"}, []
    reception = Reception(
        service._settings, service.roster, service.shelf, service.timeline, Observers(), Granted,
        lambda peer, message, frames: None, is_sending=sending.__contains__,
    )  # fmt: skip
    machine: Any = SimpleNamespace(running=[0, 1, 2], underway=lambda device, now: underway.append(device))
    for device, peer in enumerate((b"sends", b"waits", b"fetches")):
        service.roster.enroll(b"machine of " + peer, 1, None, "", START)
        service.roster.connected[DeviceId(device)] = peer
    known, unknown = service.shelf.keep("model", b"bytes").digest, "0" * 64
    for peer, digest in ((b"machine of fetches", known), (b"machine of waits", unknown)):
        reception.received(peer, Envelope(Need(digest=digest, offset=0, length=1), ()))
    reception.underway.tell(machine, START + 1)
    assert underway == [0, 2]
    sending.clear()
    reception.underway.tell(machine, START + 11)
    assert underway == [0, 2]


async def test_the_time_for_which_the_coordinator_stood_still_counts_for_no_wait_and_no_silence(tmp_path: Path) -> None:
    now, stalled = START, list[float]()
    service = a_service(tmp_path, lambda: now)
    service._ticked = now
    service.waits.stalled(1000.0)
    terms = SimpleNamespace(cohort=())
    machine = SimpleNamespace(running=(), verdicts={}, terms=terms, awaited=lambda now: None)
    exchange: Any = SimpleNamespace(machine=machine, stalled=stalled.append)
    exchange.tick = exchange.station_left = lambda *of: None
    service.reception.exchange = exchange
    service.roster.enroll(b"machine", 1, None, "", now)
    wait = asyncio.ensure_future(service.waits.until(lambda: False, 10.0))

    async def look(time: float) -> None:
        nonlocal now
        now = time
        service._look(now)
        service._ticked = now
        service.reception.changed.set()
        for _ in range(10):
            await asyncio.sleep(0)

    await asyncio.sleep(0)
    await look(START + 60.25)
    assert stalled == [60.0]
    for step in range(1, 8):
        await look(START + 60.25 + step / 4)
    assert service.roster.leases.peers == [b"machine"], "what it has said meanwhile has to be read first"
    await look(START + 62.25)
    assert service.roster.leases.peers == []
    for step in range(31):
        await look(START + 62.25 + step / 4)
    assert not wait.done(), "there are 0.25 s left"
    await look(START + 70.0)
    async with asyncio.timeout(30):
        assert not await wait


async def test_a_coordinator_that_computes_tells_that_nobody_is_connected(tmp_path: Path) -> None:
    service = a_service(tmp_path)
    assert service.waits.absence(START) is None
    assert service.waits.absence(START + MOMENT_SECONDS) is None, "processes that start again need a moment"
    assert service.waits.absence(START + 6) == Absence(3, 0)
    service.roster.connected[DeviceId(1)] = b"peer"
    assert service.waits.absence(START + 7) is None
    service.roster.connected.clear()
    assert service.waits.absence(START + 8) is None, "a new absence begins"


async def test_the_machines_that_are_away_are_told_by_name(tmp_path: Path) -> None:
    service = a_service(tmp_path)
    for peer, host in ((b"1", "attic"), (b"2", "cellar"), (b"3", "attic")):
        service.roster.enroll(peer, 1, None, host, START)
    service.waits.absence(START)
    for peer in (b"1", b"3"):
        service.roster.leave(peer, START)
    assert service.waits.absence(START + 6) == Absence(3, 0, machines=("attic",))
    service.timeline = Timeline("virtual", clock=lambda: START + 6)
    missing = {"devices": 3, "connected": 0, "seconds": None, "then": "", "away": "attic"}
    assert FleetView(service).facts()["absence"] == missing


async def test_a_device_that_said_goodbye_by_its_plan_is_shown_as_away_and_one_that_lost_its_connection_as_crashed(
    tmp_path: Path,
) -> None:
    settings = Settings(run="test", seed=1, rounds=4, devices=6, per_round=1, clock="wall")
    roster, timeline = Roster(settings), Timeline("wall", clock=lambda: START)
    service = Service(settings, roster, Shelf(BlobStore(tmp_path)), timeline, Observers(), Granted)
    token = roster.enroll(b"machine", 6, None, "", START).token
    for device in range(5):
        hello = Hello(device=device, incarnation=1, lease=token)
        service.reception.received(b"%d" % device, Envelope(hello, ()))
    for device, reason in enumerate(("offline", "leave", "stopped")):
        service.reception.received(b"%d" % device, Envelope(Bye(reason=reason), ()))
    service.reception.received(b"machine", Envelope(Died(device=3, incarnation=1), ()))

    def shown() -> list[str]:
        codes: list[str] = []
        states = FleetView(service).states(lambda doing: codes.append(doing) or len(codes) - 1)  # type: ignore[func-returns-value]
        return [codes[state] for state in states]

    assert shown() == ["away", "away", "crashed", "crashed", "online", "absent"]
    assert service.counts() == {"enrolled": 6, "connected": 1, "away": 2, "online": 1, "busy": 0}
    service.reception.received(b"0", Envelope(Hello(device=0, incarnation=2, lease=token), ()))
    assert shown()[0] == "online"
    service.reception.received(b"machine", Envelope(Died(device=0, incarnation=2), ()))
    assert shown()[0] == "crashed"
    service.reception.stopping = Stop(reason="completed")
    service.reception.received(b"4", Envelope(Bye(reason="stopped"), ()))
    assert "crashed" not in shown(), "at the end of a run all devices leave"
    assert service.counts() == {"enrolled": 6, "connected": 0, "away": 1, "online": 0, "busy": 0}
    service.reception.received(b"machine", Envelope(Bye(reason="stopped"), ()))
    assert service.counts()["away"] == 0, "without their machine they cannot come back"
    assert not service.reception.broken.done()


async def test_a_device_that_is_silent_by_plan_for_longer_than_give_up_is_waited_for(tmp_path: Path) -> None:
    settings = Settings(run="test", seed=1, rounds=4, devices=1, per_round=1, give_up=0.1, planned_silence=30.0)
    roster, granted = Roster(settings), Granted
    service = Service(settings, roster, Shelf(BlobStore(tmp_path)), Timeline("virtual"), Observers(), granted)
    extending = asyncio.create_task(service.extend(2 * service.reception.horizon))
    await asyncio.sleep(5 * settings.give_up)  # nothing may happen meanwhile, so there is nothing to wait for
    assert not extending.done()
    roster.announced.announce(0, OnlineTimes(service.reception.horizon, []))
    service.reception.changed.set()
    assert await extending
    assert not roster.columns.lost[0]


async def test_devices_whose_on_line_times_are_planned_need_not_announce_them_and_nothing_is_kept_if_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(run="test", seed=1, rounds=4, devices=4, per_round=2)
    roster, sent = Roster(settings, planned=PlannedTimes(4, None)), list[Any]()
    monkeypatch.setattr(Service, "send", lambda self, peer, message, frames=(): sent.append(message))
    service = Service(settings, roster, Shelf(BlobStore(tmp_path)), Timeline("virtual", 1e6), Observers(), Granted)
    lease = roster.enroll(b"machine", 4, None, "", 0.0)
    service.reception.received(b"0", Envelope(Hello(device=0, incarnation=1, lease=lease.token), []))
    (welcome,) = sent
    assert welcome.horizon == 0.0
    intervals = tuple((start, start + 1.0) for start in range(0, 1000, 2))
    service.reception.received(b"0", Envelope(Presence(until=1e9, intervals=intervals), []))
    assert roster.announced.of(0) is None
    assert not service.reception.broken.done()
    assert len(sent) == 1, "it is no mistake"


async def test_what_a_device_has_said_before_it_heard_that_it_is_to_sleep_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(run="test", seed=1, rounds=4, devices=4, per_round=2)
    roster, sent, told = Roster(settings, planned=PlannedTimes(4, None)), list[Any](), list[str]()
    monkeypatch.setattr(Service, "send", lambda self, peer, message, frames=(): sent.append(message))
    monkeypatch.setattr(Observers, "event", lambda self, name, **fields: told.append(name))
    service = Service(settings, roster, Shelf(BlobStore(tmp_path)), Timeline("virtual"), Observers(), Granted)
    lease = roster.enroll(b"machine", 4, None, "", 0.0)
    service.reception.received(b"0", Envelope(Hello(device=0, incarnation=1, lease=lease.token), []))
    roster.columns.lost[0] = True
    roster.rest(DeviceId(0))
    sent.clear()
    for message in (
        Presence(until=0.0, intervals=()),
        Scheduled(ask="1.0.0", event="finish", at=1.0),
        Result(ask="1.0.0", examples=1, steps=1, metrics={}, label_counts=None, tensors=()),
        Failed(ask="1.0.0", reason="training"),
        Declined(ask="1.0.0", reason="declined"),
    ):
        service.reception.received(b"0", Envelope(message, []))
    assert (sent, told) == ([], [])
    assert not roster.columns.lost[0], "it has answered, so it may be asked again"
    roster.columns.lost[0] = True
    alive = service.reception.exchange = Mock()
    service.reception.received(b"0", Envelope(Bye(reason=ASLEEP), []))
    assert (sent, told, roster.resting) == ([], [], {})
    assert not roster.columns.lost[0], "it sleeps as it was told, and nobody would wake it"
    alive.heard_of.assert_called_once_with(0)
    service.reception.exchange = None
    service.reception.received(b"0", Envelope(Presence(until=0.0, intervals=()), []))
    assert told == ["refusal"], "it has left, and nobody knows it any more"
    assert not service.reception.broken.done()


@pytest.mark.parametrize("others_come", [True, False])
async def test_a_resumed_run_by_the_wall_clock_gives_devices_whose_machine_is_back_the_time_to_come(
    tmp_path: Path, others_come: bool
) -> None:
    now = START
    settings = Settings(
        run="test", seed=1, rounds=4, devices=3, per_round=2, clock="wall", heartbeat_seconds=2.0, patience=5
    )
    roster, timeline = Roster(settings, resumed=True), Timeline("wall", clock=lambda: now)
    service = Service(settings, roster, Shelf(BlobStore(tmp_path)), timeline, Observers(), Granted)
    gathering = asyncio.create_task(service.gather())
    token = roster.enroll(b"machine", 3, None, "attic", now).token
    now += 7.0
    for device in (0, 1, 2) if others_come else (0,):
        await turns_of_the_loop(5)
        assert not gathering.done(), "an ask would go to the first of them alone"
        roster.hello(b"%d" % device, Hello(device=device, incarnation=1, lease=token), now)
        service.reception.changed.set()
    await turns_of_the_loop(5)
    if not others_come:
        now += 9.0
        service.reception.changed.set()
        await turns_of_the_loop(5)
        assert service.waits.absence(now) == Absence(2, 1, 1.0, "the run goes on without them")
        now += 1.0
        service.reception.changed.set()
    assert await gathering, "the others may be off-line by plan"


@pytest.mark.parametrize("connected", [0, 1])
async def test_a_wait_for_the_fleet_is_told_with_the_time_that_is_left(tmp_path: Path, connected: int) -> None:
    service = a_service(tmp_path)
    service.roster.connected.update({DeviceId(device): b"peer" for device in range(connected)})
    gathering = asyncio.create_task(service.gather())
    await asyncio.sleep(0)
    assert service.waits.absence(START + 10) is None, "processes start"
    assert service.waits.absence(START + 20) == Absence(3, connected, 40.0, "the run gives up")
    gathering.cancel()
    await asyncio.wait({gathering})
    assert service.waits.absence(START + 20.5) == (None if connected else Absence(3, 0)), "nobody waits any more"


@pytest.mark.parametrize("turns", range(4))
async def test_a_wait_that_is_cancelled_ends_also_if_something_has_just_happened(tmp_path: Path, turns: int) -> None:
    service = a_service(tmp_path)
    waiting = asyncio.create_task(service.waits.until(lambda: False, 60.0))
    await turns_of_the_loop(3)
    service.reception.changed.set()
    await turns_of_the_loop(turns)
    waiting.cancel()
    await turns_of_the_loop(5)
    assert waiting.cancelled(), "a signal would be lost, and the run go on"


async def turns_of_the_loop(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_fleet_that_sleeps_is_complete_when_each_machine_has_woken_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(run="test", seed=1, rounds=4, devices=4, per_round=2, start_timeout=60.0)
    roster, granted = Roster(settings, planned=PlannedTimes(4, None)), Granted
    sent: list[tuple[bytes, Any]] = []
    monkeypatch.setattr(Service, "send", lambda self, peer, message, frames=(): sent.append((peer, message)))
    service = Service(settings, roster, Shelf(BlobStore(tmp_path)), Timeline("virtual"), Observers(), granted)
    lease = {peer: roster.enroll(peer, 2, None, "", 0.0).token for peer in (b"north", b"south")}
    gathering = asyncio.create_task(service.gather())
    await asyncio.sleep(0)
    assert sent == [(b"north", Wake(devices=(0,))), (b"south", Wake(devices=(2,)))]
    roster.hello(b"0", Hello(device=0, incarnation=1, lease=lease[b"north"]), 0.0)
    assert roster.missing() == [2, 3], "nobody knows whether the other machine can wake its devices"
    assert roster.heralds() == [2]
    service.reception.changed.set()
    await asyncio.sleep(0)
    assert not gathering.done()
    roster.rest(DeviceId(0))
    roster.hello(b"2", Hello(device=2, incarnation=1, lease=lease[b"south"]), 0.0)
    service.reception.changed.set()
    assert await gathering
    assert len(sent) == 2
