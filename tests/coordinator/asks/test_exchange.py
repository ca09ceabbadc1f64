"""Large replies are checked apart from the event loop, and the ask goes as if their checks took no time."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from fedemu.algorithms.interface import total
from fedemu.coordinator.asks import folding
from fedemu.coordinator.asks.ask import AskMachine, Missed, Terms
from fedemu.coordinator.asks.at_edges import AtEdges
from fedemu.coordinator.asks.exchange import Exchange
from fedemu.coordinator.asks.folding import MOST_WAITING, Folding
from fedemu.coordinator.asks.parts import AskParts, Part
from fedemu.coordinator.asks.payload import FILE_THRESHOLD, PayloadTemplate
from fedemu.coordinator.asks.virtual import VirtualAsk
from fedemu.coordinator.asks.wall import WallAsk
from fedemu.coordinator.fleet.roster import Roster
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.settings import Settings
from fedemu.coordinator.sums.leaf import Leaf
from fedemu.coordinator.sums.partial import Partial
from fedemu.protocol.errors import FedemuError
from fedemu.protocol.ids import AskId, DeviceId, digest_of
from fedemu.protocol.messages import BlobRef, Declined, Failed, Invalid, Result, Scheduled, TensorSpec, Work
from fedemu.protocol.sharing import edge_messages as edge
from fedemu.protocol.tensors import pack

ASK = AskId(1, 0, 0)
LARGE, SMALL = FILE_THRESHOLD // 4 + 1, 5
DEVICES = tuple(map(DeviceId, range(4)))
GATHER = edge.Gather(ask=str(ASK), epoch=7, leaves=(), reducers=(), max_norm=1.0)


class Thread:
    """A thread that does its work when the test says so. ``asked`` counts the calls."""

    def __init__(self) -> None:
        self.asked = 0
        self.may = asyncio.Semaphore(0)

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.asked += 1
        await self.may.acquire()
        return function(*arguments)


class Play:
    """An ask that wants two replies of ``size`` numbers, and what it sends. It goes by the wall clock by default."""

    def __init__(
        self,
        folder: Path,
        size: int,
        apart: Any,
        wanted: int = 2,
        keeps: bool = False,
        gather: edge.Gather | None = None,
        stations: Sequence[bytes] = (),
        kind: type[AskMachine] = WallAsk,
        by_device: Mapping[DeviceId, Part] | None = None,
        states: Mapping[DeviceId, AskId] | None = None,
        connected: Sequence[DeviceId] = DEVICES,
    ) -> None:
        self.sent: list[tuple[int, str]] = []
        self.told: list[tuple[bytes, Any]] = []
        """What edges were told."""
        self.works: dict[int, Work] = {}
        self.invalid: list[tuple[str, str]] = []
        self.events: list[tuple[str, Any]] = []
        self.leaf = Leaf("float32", (size,))
        template = PayloadTemplate({"model/w": self.leaf})
        spill = folder / "spill" if keeps else None
        shared = (BlobRef(key="model", digest=digest_of(b""), size=100),)
        parts = AskParts(
            ASK, "train", 3, 0.0, 10.0, 0, 7, shared, by_device or {}, 1.5, 6.0, template, keeps, None, 1e30, spill
        )
        settings = Settings(run="test", seed=1, rounds=1, devices=len(DEVICES), per_round=wanted)
        machine = kind(Terms(ASK, DEVICES, wanted, 0.0, 10.0), connected)
        self.roster = Roster(settings)
        self.roster.connected.update((device, b"%d" % device) for device in connected)
        self.roster.columns.states.update(states or {})
        for station in stations:
            self.roster.station(station, 0.0)
        self.folding = Folding({"model": total}, template.leaves, apart)
        observers = Observers([self])  # type: ignore[list-item]
        self.exchange = Exchange(
            parts, machine, self.roster, self._send, self.refused, observers, apart, self.folding,
            AtEdges(gather, machine, self.folding, self._tell, lambda station: False, observers),
        )  # fmt: skip
        self.exchange.start(0.0)
        self.sent.clear()

    def _send(self, device: DeviceId, message: Any, frames: Any) -> None:
        self.sent.append((device, message.type))
        if isinstance(message, Work):
            self.works[device] = message
        if isinstance(message, Invalid):
            self.invalid.append((message.reason, message.detail))

    def _tell(self, station: bytes, message: Any) -> None:
        self.told.append((station, message))

    def refused(self, reason: str) -> None:
        self.events.append(("refused", reason))

    def event(self, name: str, **facts: Any) -> None:
        self.events.append((name, facts))

    def reply(self, device: int, now: float, value: float = 1.0) -> weakref.ref[Any]:
        """Let a device reply. Returns a reference to the memory of its tensors."""
        specs = (TensorSpec(name="model/w", dtype="float32", shape=self.leaf.shape),)
        result = Result(ask=str(ASK), examples=3, steps=1, metrics={}, label_counts=None, tensors=specs)
        values = np.full(self.leaf.shape, value, np.float32)
        self.exchange.receive(DeviceId(device), result, [memoryview(values).cast("B")], now)
        return weakref.ref(values)

    @property
    def verdicts(self) -> dict[int, str]:
        return {int(device): verdict for device, verdict in self.exchange.machine.verdicts.items()}


@pytest.fixture
async def thread() -> AsyncIterator[Thread]:
    yield Thread()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()], "no check goes on"


async def settle(play: Play) -> None:
    await asyncio.wait_for(asyncio.shield(play.exchange.closed), 30)


async def test_a_small_reply_is_checked_at_once(tmp_path: Path, thread: Thread) -> None:
    play = Play(tmp_path, SMALL, thread)
    play.reply(0, 1.0)
    for device in (1, 2):
        play.reply(device, 2.0, float("nan"))
    assert (play.verdicts, thread.asked) == ({0: "accepted", 1: "rejected", 2: "rejected"}, 0)
    assert play.exchange.rejections == {"nonfinite": 2}
    assert play.invalid == [("nonfinite", "model/w has values that are not finite")] * 2


async def test_a_reply_that_cannot_be_used_is_late_after_the_deadline(tmp_path: Path, thread: Thread) -> None:
    play = Play(tmp_path, SMALL, thread)
    play.reply(0, 1.0)
    play.reply(1, 10.1, float("nan"))
    assert play.verdicts == {0: "accepted", 1: "late", 2: "late", 3: "late"}
    assert play.exchange.rejections == {}, "late replies do not end a run as diverged"
    assert play.exchange.bytes_up == play.exchange.parts.upload_bytes


async def test_the_bytes_of_every_reply_count_that_is_accepted_or_rejected(tmp_path: Path, thread: Thread) -> None:
    play = Play(tmp_path, SMALL, thread)
    play.reply(0, 1.0)
    play.reply(1, 2.0, float("nan"))
    play.exchange.receive(DEVICES[2], Failed(ask=str(ASK), reason="malformed", detail="cut", planned=True), (), 3.0)
    play.exchange.receive(DEVICES[3], Failed(ask=str(ASK), reason="training", detail="none", planned=True), (), 4.0)
    assert play.verdicts == {0: "accepted", 1: "rejected", 2: "rejected", 3: "failed"}
    assert play.exchange.rejections == {"nonfinite": 1, "malformed": 1}
    assert play.exchange.failures == {}, "a failure that was planned is none"
    assert play.events == [("refused", "nonfinite")]
    assert play.exchange.bytes_up == 3 * play.exchange.parts.upload_bytes == 3 * 4 * SMALL


async def test_what_a_device_says_of_its_failure_has_lines_and_no_control_characters(
    tmp_path: Path, thread: Thread
) -> None:
    play = Play(tmp_path, SMALL, thread)
    said = Failed(ask=str(ASK), reason="\x1b]0;x\x07", detail="device 0: no\tmemory\n    \x1b[2Jnet.py, line 7")
    play.exchange.receive(DEVICES[0], said, (), 1.0)
    play.exchange.receive(DEVICES[1], Failed(ask=str(ASK), reason="\x1b]0;x\x07"), (), 1.0)
    assert list(play.exchange.failures) == ["no memory\n     [2Jnet.py, line 7", " ]0;x "], "they end up at a terminal"


async def test_what_a_device_says_that_was_not_asked_or_has_answered_changes_nothing(
    tmp_path: Path, thread: Thread
) -> None:
    virtual = Play(tmp_path, SMALL, thread, kind=VirtualAsk)
    virtual.exchange.receive(DeviceId(9), Scheduled(ask=str(ASK), event="finish", at=1.0), (), 1.0)
    virtual.reply(0, 1.0)
    assert (virtual.verdicts, virtual.sent) == ({}, []), "it has not scheduled its work, and will say it again"
    play = Play(tmp_path, SMALL, thread)
    play.reply(0, 1.0)
    for device in (DEVICES[0], DeviceId(9)):
        play.exchange.receive(device, Failed(ask=str(ASK), reason="training"), (), 2.0)
    play.reply(9, 3.0)
    assert (play.verdicts, play.exchange.failures) == ({0: "accepted"}, {})
    assert play.sent == [(0, "accepted"), (9, "late")]


async def test_a_work_says_all_that_a_device_has_to_know(tmp_path: Path, thread: Thread) -> None:
    specs = (TensorSpec(name="w", dtype="uint8", shape=(8,)),)
    own, states = {DEVICES[0]: (specs, [b"12345678"])}, {DEVICES[0]: AskId(0, 1, 2)}
    play = Play(tmp_path, SMALL, thread, by_device=own, states=states)
    expected = Work(
        ask=str(ASK),
        program="train",
        task=3,
        start=0.0,
        shared=play.exchange.parts.shared,
        state="0.1.2",
        download_bytes=108,
        upload_bytes=4 * SMALL,
        passes=1.5,
        processed=6.0,
        deadline=10.0,
        durable_round=0,
        epoch=7,
        tensors=specs,
    )
    assert play.works[0] == expected
    assert play.works[1] == structs.replace(expected, state=None, download_bytes=100, tensors=())


async def test_a_device_that_comes_back_is_given_its_work_again(tmp_path: Path, thread: Thread) -> None:
    play = Play(tmp_path, SMALL, thread, kind=VirtualAsk)
    for again in (1, 2):
        play.exchange.joined(DEVICES[1], 1.0)
        assert play.sent == [(1, "work")] * again
        assert play.exchange.bytes_down == 4 * 100, "it downloads the blob once, however often it gets its work"
    assert play.works[1].download_bytes == 100


async def test_a_device_whose_result_could_not_be_decoded_is_rejected_if_one_is_expected_of_it(
    tmp_path: Path, thread: Thread
) -> None:
    play = Play(tmp_path, SMALL, thread, kind=VirtualAsk)
    failed = Failed(ask=str(ASK), reason="malformed", detail="no tensors")
    play.exchange.receive(DEVICES[0], failed, (), 1.0)
    for device in DEVICES[1:]:
        play.exchange.receive(device, Scheduled(ask=str(ASK), event="finish", at=1.0 + device), (), 1.0)
    play.sent.clear()
    for device in DEVICES[1:3]:
        play.exchange.receive(device, failed, (), 2.0)
    assert play.sent == [(1, "invalid"), (3, "proceed"), (2, "invalid")]
    play.exchange.receive(
        DEVICES[3], structs.replace(failed, reason="training", detail="device 3: no tensors"), (), 3.0
    )
    assert play.verdicts == {0: "failed", 1: "rejected", 2: "rejected", 3: "failed"}
    assert (play.exchange.failures, play.exchange.rejections) == ({"no tensors": 2}, {"malformed": 2})


async def test_a_device_that_declines_has_failed_and_is_no_accident(tmp_path: Path, thread: Thread) -> None:
    play = Play(tmp_path, SMALL, thread)
    play.exchange.receive(DEVICES[0], Declined(ask=str(ASK), reason="busy"), (), 1.0)
    assert (play.verdicts, play.exchange.failures, play.events) == ({0: "failed"}, {}, [])


async def test_the_bytes_of_a_reply_that_is_late_do_not_count(tmp_path: Path, thread: Thread) -> None:
    play = Play(tmp_path, SMALL, thread)
    play.reply(0, 9.0)
    play.reply(1, 10.0)
    assert play.verdicts == {0: "accepted", 1: "late", 2: "late", 3: "late"}
    assert play.exchange.bytes_up == play.exchange.parts.upload_bytes


async def test_a_failure_for_which_a_device_tells_no_reason_has_an_unknown_one(tmp_path: Path, thread: Thread) -> None:
    play = Play(tmp_path, SMALL, thread)
    play.exchange.receive(DEVICES[0], Failed(ask=str(ASK), reason=""), (), 1.0)
    assert (play.verdicts, play.exchange.failures) == ({0: "failed"}, {"unknown": 1})
    assert play.events == [("failure", {"device": 0, "ask": str(ASK), "reason": "unknown", "detail": ""})]


async def test_a_device_that_waits_for_its_turn_fails_once_however_often_it_says_so(
    tmp_path: Path, thread: Thread
) -> None:
    play = Play(tmp_path, SMALL, thread, kind=VirtualAsk)
    play.exchange.receive(DEVICES[0], Scheduled(ask=str(ASK), event="finish", at=1.0), (), 1.0)
    for detail in ("no memory", "no time"):
        play.exchange.receive(DEVICES[0], Failed(ask=str(ASK), reason="trainer", detail=detail), (), 1.0)
    assert (play.verdicts, play.exchange.failures) == ({}, {"no memory": 1}), "each failure is an event"


@pytest.mark.parametrize(("reason", "perturbed"), [("training", False), ("trainer", True)])
async def test_a_run_is_perturbed_by_failures_that_another_run_may_not_have(
    tmp_path: Path, thread: Thread, reason: str, perturbed: bool
) -> None:
    states = {DEVICES[0]: AskId(0, 0, 0)}
    play = Play(tmp_path, SMALL, thread, states=states)
    play.exchange.receive(DEVICES[0], Failed(ask=str(ASK), reason=reason), (), 1.0)
    assert (play.verdicts, play.exchange.machine.perturbed) == ({0: "failed"}, perturbed)
    play.exchange.commit()
    assert play.roster.columns.states == states


async def test_a_closed_ask_changes_the_roster_by_its_outcomes_and_leaves_no_payload(
    tmp_path: Path, thread: Thread
) -> None:
    own = {DEVICES[0]: ((TensorSpec(name="w", dtype="uint8", shape=(8,)),), [b"12345678"])}
    play = Play(tmp_path, LARGE, thread, keeps=True, by_device=own)
    assert play.exchange.bytes_down == 8 + 4 * 100, "its own tensors, and the blob of each"
    play.reply(0, 1.0)
    thread.may.release()
    play.exchange.left(DEVICES[1], 2.0)
    play.exchange.receive(DEVICES[2], Failed(ask=str(ASK), reason="own_state"), (), 3.0)
    async with asyncio.timeout(30):
        while len(play.verdicts) < 3:  # noqa: ASYNC110 - the check of the reply ends in a turn of the loop
            await asyncio.sleep(0)
    play.exchange.tick(10.0)
    assert play.verdicts == {0: "accepted", 1: "dropped", 2: "failed", 3: "late"}
    columns = play.roster.columns
    columns.states[DEVICES[2]] = columns.states[DEVICES[3]] = before = AskId(0, 0, 0)
    play.exchange.commit()
    assert columns.states == {0: ASK, 3: before}
    assert columns.away[DEVICES[1]] == 0.0, "nobody knows when it is back"
    assert [columns.download_bytes(device, play.exchange.parts.shared) for device in DEVICES] == [0, 100, 100, 0]
    play.exchange.discard()
    with pytest.raises(ValueError, match="the payload of device 0 was discarded"):
        play.exchange.contributions[0].payload.load()


async def test_a_schedule_before_the_start_of_the_work_is_a_failure_that_is_told_once(
    tmp_path: Path, thread: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(Observers, "event", lambda self, name, **fields: told.append((name, fields)))
    play = Play(tmp_path, SMALL, thread, kind=VirtualAsk)
    for at in (-1.0, 1.0):
        play.exchange.receive(DEVICES[0], Scheduled(ask=str(ASK), event="finish", at=at), (), 0.0)
    detail = "it is scheduled for -1, before its start at 0"
    assert told == [("failure", {"device": 0, "ask": str(ASK), "reason": "schedule", "detail": detail})]
    assert play.exchange.failures == {detail: 1}
    assert not play.exchange.machine.perturbed, "a device that does so does so in every run"
    play.exchange.discard()


async def test_the_roster_knows_until_when_a_dropped_device_is_away_and_no_state_of_a_program_without_one(
    tmp_path: Path, thread: Thread
) -> None:
    play = Play(tmp_path, SMALL, thread, kind=VirtualAsk)
    drop = Scheduled(ask=str(ASK), event="drop", at=1.0, back=50.0, cause="offline")
    play.exchange.receive(DEVICES[0], drop, (), 0.0)
    for device in DEVICES[1:]:
        play.exchange.receive(device, Scheduled(ask=str(ASK), event="finish", at=1.0 + device), (), 0.0)
    for device in (1, 2):
        play.reply(device, 1.0)
    assert play.verdicts == {0: "dropped", 1: "accepted", 2: "accepted", 3: "cancelled"}
    play.exchange.commit()
    assert (play.roster.columns.away[DEVICES[0]], play.roster.columns.states) == (50.0, {})
    for _ in range(2):
        thread.may.release()
    await play.folding.values([])


async def test_nothing_is_added_to_the_sum_but_what_is_accepted(tmp_path: Path, thread: Thread) -> None:
    full, over = Play(tmp_path, SMALL, thread), Play(tmp_path, SMALL, thread)
    for device, value in enumerate((1.0, float("nan"), 5.0, 7.0)):
        full.reply(device, 1.0, value)
    over.reply(0, 9.0, 2.0)
    over.reply(1, 10.0, 3.0)
    assert full.verdicts == {0: "accepted", 1: "rejected", 2: "accepted", 3: "cancelled"}
    assert over.verdicts == {0: "accepted", 1: "late", 2: "late", 3: "late"}
    thread.may.release()
    assert (await full.folding.values([]))["model"]["w"].tolist() == [6.0] * SMALL
    thread.may.release()
    assert (await over.folding.values([]))["model"]["w"].tolist() == [2.0] * SMALL


@pytest.mark.parametrize("most_waiting", [0, MOST_WAITING], ids=["folded", "waiting"])
async def test_a_copy_of_an_accepted_reply_leaves_the_sum_alone_whether_the_first_is_folded_or_waits(
    tmp_path: Path, thread: Thread, monkeypatch: pytest.MonkeyPatch, most_waiting: int
) -> None:
    monkeypatch.setattr(folding, "MOST_WAITING", most_waiting)
    play = Play(tmp_path, SMALL, thread)
    for _ in range(6):
        thread.may.release()
    for device, value in ((0, 1.0), (0, 1.0), (0, 8.0), (1, 5.0), (1, 5.0)):
        play.reply(device, 1.0, value)
        await asyncio.sleep(0)
    assert play.sent == [
        (0, "accepted"),
        (0, "duplicate"),
        (0, "duplicate"),
        (1, "accepted"),
        (2, "cancel"),
        (3, "cancel"),
        (1, "duplicate"),
    ]
    assert (await play.folding.values([]))["model"]["w"].tolist() == [6.0] * SMALL
    assert play.exchange.bytes_up == 2 * play.exchange.parts.upload_bytes


async def test_what_comes_during_a_check_is_handled_after_it_and_in_its_order(tmp_path: Path, thread: Thread) -> None:
    play = Play(tmp_path, LARGE, thread)
    play.reply(0, 1.0, float("inf"))
    play.reply(1, 2.0)
    play.exchange.left(DeviceId(2), 3.0)
    play.reply(2, 3.5)
    play.reply(3, 4.0)
    assert (play.verdicts, play.sent) == ({}, [])
    for _ in range(3):
        thread.may.release()
    await settle(play)
    assert play.verdicts == {0: "rejected", 1: "accepted", 2: "dropped", 3: "accepted"}
    assert play.sent == [(0, "invalid"), (1, "accepted"), (2, "duplicate"), (3, "accepted")]
    assert play.exchange.machine.end == 4.0
    assert [each.reply.device for each in play.exchange.contributions] == [1, 3]
    np.testing.assert_array_equal(play.exchange.contributions[0].payload.load()["model/w"], np.ones(LARGE))
    play.exchange.discard()


async def test_a_reply_that_came_in_time_counts_though_its_check_ends_after_the_deadline(
    tmp_path: Path, thread: Thread
) -> None:
    play = Play(tmp_path, LARGE, thread)
    play.reply(0, 9.9)
    play.reply(1, 10.1)
    play.exchange.tick(11.0)
    assert play.verdicts == {}, "nobody is late before all that came is looked at"
    for _ in range(2):
        thread.may.release()
    await settle(play)
    assert play.verdicts == {0: "accepted", 1: "late", 2: "late", 3: "late"}
    assert play.exchange.machine.end == 10.0


async def test_a_copy_of_a_reply_is_not_kept_and_not_checked_twice(tmp_path: Path, thread: Thread) -> None:
    play = Play(tmp_path, LARGE, thread, wanted=1)
    replies = [play.reply(device, 1.0) for device in (0, 0, 0, 1, 1)]
    assert [reply() is not None for reply in replies] == [True, False, False, True, False]
    thread.may.release()
    await settle(play)
    assert (play.verdicts[0], thread.asked) == ("accepted", 1)
    assert [kind for device, kind in play.sent if device == 0] == ["accepted", "duplicate", "duplicate"]


async def test_a_device_that_was_given_up_counts_as_lost_unless_it_was_heard_of(tmp_path: Path, thread: Thread) -> None:
    play = Play(tmp_path, SMALL, thread)
    for device in DEVICES[:3]:
        play.exchange.machine.give_up(device, Missed("connection", 60.0, "give_up"), 1.0)
    play.exchange.joined(DEVICES[1], 2.0)
    play.reply(2, 2.0)
    play.exchange.commit()
    assert play.roster.columns.lost.tolist() == [True, False, False, False]


async def test_devices_that_were_away_for_as_long_as_one_that_was_given_up_are_lost_with_it(
    tmp_path: Path, thread: Thread
) -> None:
    play = Play(tmp_path, SMALL, thread, kind=VirtualAsk, connected=DEVICES[:1])
    play.roster.connected[DEVICES[2]] = b"2"
    play.exchange.joined(DEVICES[2], 5.0)
    del play.roster.connected[DEVICES[0]]
    play.exchange.left(DEVICES[0], 30.0)
    play.exchange.machine.give_up(DEVICES[1], Missed("connection", 61.0, "give_up"), 61.0)
    play.exchange.commit()
    assert play.roster.columns.lost.tolist() == [False, True, False, True]


async def test_devices_that_left_before_one_that_was_given_up_are_lost_with_it_and_with_a_silent_one_none(
    tmp_path: Path, thread: Thread
) -> None:
    play = Play(tmp_path, SMALL, thread, kind=VirtualAsk)
    for device, now in ((1, 20.0), (0, 30.0), (2, 40.0)):
        del play.roster.connected[DEVICES[device]]
        play.exchange.left(DEVICES[device], now)
    play.exchange.stalled(100.0)
    assert play.exchange.machine.awaited(150.0) == (3, 30.0, 50.0)
    play.exchange.machine.give_up(DEVICES[0], Missed("came back again and again", 59.9, "20 lives"), 190.0)
    play.exchange.commit()
    assert play.roster.columns.lost.tolist() == [True, False, False, False]
    play.exchange.machine.given_up[DEVICES[0]] = Missed("had no connection", 60.0, "give_up")
    play.exchange.commit()
    assert play.roster.columns.lost.tolist() == [True, True, False, False]
    play = Play(tmp_path, SMALL, thread, kind=VirtualAsk, connected=DEVICES[:1])
    play.roster.connected[DEVICES[2]] = b"2"
    play.exchange.joined(DEVICES[2], 5.0)
    play.exchange.machine.give_up(DEVICES[2], Missed("did not answer its work", 61.0, "give_up"), 66.0)
    play.exchange.commit()
    assert play.roster.columns.lost.tolist() == [False, False, True, False]


async def test_edges_hear_of_an_ask_when_it_begins_or_when_they_come(tmp_path: Path, thread: Thread) -> None:
    play = Play(tmp_path, SMALL, thread, gather=GATHER, stations=[b"edge"])
    play.exchange.station_joined(b"late")
    assert play.told == [(b"edge", GATHER), (b"late", GATHER)]


async def test_a_device_whose_reply_an_edge_had_is_not_lost_with_it(tmp_path: Path, thread: Thread) -> None:
    play = Play(tmp_path, SMALL, thread, gather=GATHER)
    held = edge.Held(ask=str(ASK), examples=3, steps=1, metrics={})
    play.exchange.held(DEVICES[0], held, b"edge", 1.0)
    assert play.roster.keepers == {b"edge"}, "its sum is read, also if its machines leave"
    for device in DEVICES[:2]:
        play.exchange.machine.give_up(device, Missed("sum", 600.0, "answer_timeout"), 601.0)
    play.exchange.commit()
    assert play.roster.columns.lost.tolist() == [False, True, False, False]
    assert play.exchange.bytes_up == 0


async def test_edges_are_not_told_of_an_ask_that_wants_each_reply_by_itself_and_one_that_keeps_a_reply_is_late(
    tmp_path: Path, thread: Thread
) -> None:
    play = Play(tmp_path, SMALL, thread, stations=[b"edge"])
    play.exchange.station_joined(b"other")
    play.exchange.held(DEVICES[0], edge.Held(ask=str(ASK), examples=3, steps=1, metrics={}), b"edge", 1.0)
    play.exchange.station_left(b"edge", 2.0)
    for device in DEVICES[:2]:
        play.reply(device, 3.0)
    await settle(play)
    assert play.sent[0] == (DEVICES[0], "late")
    assert play.verdicts[DEVICES[0]] == "accepted"
    assert play.told == []


async def test_the_bytes_of_a_reply_count_once_if_an_edge_has_it_and_it_comes_from_the_device(
    tmp_path: Path, thread: Thread
) -> None:
    play = Play(tmp_path, SMALL, thread, gather=GATHER)
    play.exchange.held(DEVICES[0], edge.Held(ask=str(ASK), examples=3, steps=1, metrics={}), b"edge", 1.0)
    play.reply(0, 2.0)
    assert play.verdicts == {0: "accepted"}
    assert play.exchange.bytes_up == play.exchange.parts.upload_bytes


async def test_a_reply_at_an_edge_that_does_not_count_is_answered_as_one_that_comes_from_the_device(
    tmp_path: Path, thread: Thread
) -> None:
    play = Play(tmp_path, SMALL, thread, gather=GATHER)
    play.reply(0, 1.0)
    for device in (DEVICES[0], DeviceId(9)):
        play.exchange.held(device, edge.Held(ask=str(ASK), examples=3, steps=1, metrics={}), b"edge", 2.0)
    refused = edge.Held(ask=str(ASK), examples=3, steps=1, metrics={}, reason="norm", detail="too large")
    play.exchange.held(DEVICES[1], refused, b"edge", 3.0)
    assert play.sent == [(0, "accepted"), (0, "duplicate"), (9, "late"), (1, "invalid")]
    assert play.exchange.rejections == {"norm": 1}


async def test_a_device_whose_reply_an_edge_has_does_not_fail_any_more(tmp_path: Path, thread: Thread) -> None:
    play = Play(tmp_path, SMALL, thread, gather=GATHER)
    play.exchange.held(DEVICES[0], edge.Held(ask=str(ASK), examples=3, steps=1, metrics={}), b"edge", 1.0)
    for device in DEVICES[:2]:
        play.exchange.receive(device, Failed(ask=str(ASK), reason="training"), (), 2.0)
    assert play.verdicts == {1: "failed"}


async def test_the_first_edge_that_has_a_reply_is_asked_for_its_sum_when_no_other_is_awaited(
    tmp_path: Path, thread: Thread
) -> None:
    play = Play(tmp_path, SMALL, thread, gather=GATHER, kind=VirtualAsk)
    held = edge.Held(ask=str(ASK), examples=3, steps=1, metrics={})
    play.exchange.held(DEVICES[0], held, b"early", 0.5)  # nobody has said yet that it may proceed
    for device in DEVICES:
        play.exchange.receive(device, Scheduled(ask=str(ASK), event="finish", at=1.0 + device), (), 0.5)
    for station in (b"edge", b"late"):
        play.exchange.held(DEVICES[0], held, station, 1.0)
    assert (play.told, play.roster.keepers) == ([], {b"edge"})
    play.reply(1, 2.0)
    assert play.told == [(b"edge", edge.Sum(ask=str(ASK), epoch=7, devices=(0,)))]
    play.sent.clear()
    play.exchange.station_left(b"late", 3.0)
    assert play.sent == []
    play.exchange.station_left(b"edge", 3.0)
    assert play.sent == [(0, "work"), (0, "proceed")]
    thread.may.release()
    await play.folding.values([])


async def test_the_sum_of_an_edge_is_asked_for_again_and_one_of_another_life_is_not_taken(
    tmp_path: Path, thread: Thread
) -> None:
    play = Play(tmp_path, SMALL, thread, gather=GATHER, kind=VirtualAsk)
    for device in DEVICES:
        play.exchange.receive(device, Scheduled(ask=str(ASK), event="finish", at=1.0 + device), (), 0.0)
    for device in DEVICES[:2]:
        play.exchange.held(device, edge.Held(ask=str(ASK), examples=3, steps=1, metrics={}), b"edge", 1.0)
    play.exchange.tick(3.0)
    assert play.told == [(b"edge", edge.Sum(ask=str(ASK), epoch=7, devices=(0, 1)))] * 2
    play.exchange.stalled(600.0)
    play.exchange.tick(603.0)
    sums = Partial({"model": total}, {"model/w": play.leaf})
    sums.fold([{"model/w": np.full(SMALL, value, np.float32)} for value in (1.0, 2.0)], [3, 3])
    packed = sums.pack().sums["model/w"]
    specs, frames = pack({"model/w": packed.digits})
    for epoch, outcomes in ((8, {}), (7, {0: "accepted", 1: "accepted", 2: "cancelled", 3: "cancelled"})):
        message = edge.Partial(
            ask=str(ASK), epoch=epoch, devices=(0, 1), examples=6, lowest=(packed.lowest,), tensors=specs
        )
        play.exchange.partial(b"edge", message, frames, 604.0)
        assert play.verdicts == outcomes
    assert [each.reply.device for each in play.exchange.contributions] == [0, 1]
    for _ in range(2):
        thread.may.release()
    assert (await play.folding.values([]))["model"]["w"].tolist() == [3.0] * SMALL


async def test_a_full_disk_ends_the_ask(tmp_path: Path, thread: Thread) -> None:
    play = Play(tmp_path, LARGE, thread, keeps=True)
    (tmp_path / "spill").write_text("a file where a folder is needed")
    play.reply(0, 1.0)
    thread.may.release()
    with pytest.raises(FedemuError, match=f"cannot keep a payload of {4 * LARGE} bytes"):
        await settle(play)


async def test_an_ask_that_is_given_up_takes_no_result_of_a_check(tmp_path: Path, thread: Thread) -> None:
    play = Play(tmp_path, LARGE, thread)
    play.reply(0, 1.0)
    await asyncio.sleep(0)
    play.exchange.discard()
    await asyncio.sleep(0)
    assert play.verdicts == {}


async def test_the_event_loop_goes_on_during_a_check(tmp_path: Path) -> None:
    heard = threading.Event()

    async def apart(function: Callable[..., Any], *arguments: Any) -> Any:
        def check() -> Any:
            assert heard.wait(30), "the loop was held"
            return function(*arguments)

        return await asyncio.to_thread(check)

    play = Play(tmp_path, LARGE, apart, wanted=1)
    play.reply(0, 1.0)
    asyncio.get_running_loop().call_soon(heard.set)
    await settle(play)
    assert play.verdicts[0] == "accepted"
