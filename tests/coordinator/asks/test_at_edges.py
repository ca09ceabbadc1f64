"""What edges keep of an ask: which sums are asked for, and what their coming and their absence mean."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fedemu.algorithms.interface import DeviceReply, Reducer
from fedemu.coordinator.asks.ask import LIVES, Give, Missed, Tell, Terms
from fedemu.coordinator.asks.at_edges import AtEdges
from fedemu.coordinator.asks.parts import Contribution
from fedemu.coordinator.asks.virtual import VirtualAsk
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.sums.leaf import Leaf
from fedemu.coordinator.sums.messages import message_of
from fedemu.coordinator.sums.partial import Partial
from fedemu.protocol.ids import AskId, DeviceId
from fedemu.protocol.messages import Scheduled, TensorSpec
from fedemu.protocol.sharing import edge_messages as edge

ASK = AskId(1, 0, 0)
GATHER = edge.Gather(
    ask="1.0.0",
    epoch=7,
    leaves=(TensorSpec(name="delta/w", dtype="float32", shape=(2,)),),
    reducers=(("delta", "total", "delta"),),
    max_norm=100.0,
)
REDUCERS = {"delta": Reducer("total")}
LEAVES = {"delta/w": Leaf("float32", (2,))}


class Awaiting:
    """In place of an AskMachine: it awaits what the test says, and its actions tell what it was told."""

    terms = Terms(ASK, (), 2, start=0.0, deadline=100.0, answer_timeout=60.0)

    def __init__(self) -> None:
        self.running: list[DeviceId] = []

    def awaits(self, *devices: int) -> None:
        self.running = [DeviceId(device) for device in devices]

    def kept(self, device: DeviceId, now: float) -> None: ...

    def pending(self, device: DeviceId) -> bool:
        return device in self.running

    def result(self, device: DeviceId, now: float) -> list[Any]:
        return [("accepted", device)]

    def lost(self, device: DeviceId, now: float) -> list[Any]:
        return [("lost", device)]

    def give_up(self, device: DeviceId, missed: Missed, now: float) -> list[Any]:
        return [("given up", device, missed.seconds)]


class Sums:
    """In place of a Folding: it adds up what edges send."""

    def __init__(self) -> None:
        self.total = Partial(REDUCERS, LEAVES)
        self.merge = self.total.merge

    def take(self, payload: Any, examples: int) -> None: ...

    def unpack(self, packed: Any) -> Partial:
        return self.total.unpack(packed)


class Kept:
    """What edges keep of an ask that awaits what the test says, and what they are asked for."""

    def __init__(self) -> None:
        self.machine = Awaiting()
        self.sent: list[tuple[bytes, Any]] = []
        self.sending: set[bytes] = set()
        self.edges: Any = AtEdges(GATHER, self.machine, Sums(), self.send, self.sending.__contains__, Observers())  # type: ignore[arg-type]
        self.collect = self.edges.collect

    def send(self, peer: bytes, message: Any) -> None:
        self.sent.append((peer, message))

    def keep(self, device: int, station: bytes, now: float = 0.0) -> None:
        self.edges.keep(DeviceId(device), station, reply_of(device), now)

    def take(self, station: bytes, *devices: int) -> tuple[list[int], list[Any]]:
        accepted, actions = self.edges.merge(station, *sum_of([1.0, 1.0], *devices), 0.0)
        assert all(accepted[device] == reply_of(device) for device in accepted)
        return [*accepted], actions


def reply_of(device: int) -> Contribution:
    return Contribution(DeviceReply(DeviceId(device), 3, 1, {}, None), None, None)


def sum_of(values: list[float], *devices: int, examples: int | None = None) -> tuple[edge.Partial, list[memoryview]]:
    part = Partial(REDUCERS, LEAVES)
    part.fold([{"delta/w": np.array(values, np.float32)}], [3])
    message, frames = message_of(part.pack(), GATHER, devices)
    return replace(message, examples=3 * len(devices) if examples is None else examples), frames


def test_sums_are_asked_for_when_nobody_else_is_awaited() -> None:
    kept = Kept()
    kept.machine.awaits(0, 1, 2)
    kept.keep(0, b"a")
    kept.keep(1, b"b")
    kept.machine.awaits(1, 2)
    kept.collect(0.0)
    assert kept.sent == []
    kept.machine.awaits(0, 1)
    kept.collect(0.0)
    assert [(peer, message.devices) for peer, message in kept.sent] == [(b"a", (0,)), (b"b", (1,))]
    kept.collect(1.0)
    assert len(kept.sent) == 2
    kept.collect(2.5)
    assert len(kept.sent) == 4, "the question may have been lost"
    kept.collect(5.0)
    assert len(kept.sent) == 4, "or else the edge needs some time"
    kept.collect(6.5)
    assert len(kept.sent) == 6


def test_a_sum_that_is_on_its_way_is_not_asked_for_again() -> None:
    kept = Kept()
    kept.sending.add(b"a")
    kept.machine.awaits(0)
    kept.keep(0, b"a")
    for now in range(60):
        kept.collect(float(now))
    assert len(kept.sent) == 1
    kept.machine.awaits(0, 1)
    kept.keep(1, b"b", 60.0)
    kept.collect(65.0)
    assert [peer for peer, _ in kept.sent] == [b"a", b"b", b"b"], "another edge is asked again"
    kept.sending.clear()
    kept.machine.awaits(0)
    kept.keep(0, b"a", 65.0)
    assert [peer for peer, _ in kept.sent[3:]] == [b"a"]


def test_an_edge_is_asked_at_once_for_more_devices_and_for_the_rest_of_a_long_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(edge, "MOST_DEVICES", 2)
    kept = Kept()
    for device in (5, 3, 4):
        kept.keep(device, b"a")
    assert kept.sent == []
    kept.machine.awaits(5)
    kept.collect(0.0)
    kept.machine.awaits(5, 3, 4)
    kept.collect(0.5)
    kept.take(b"a", 3, 4)
    kept.machine.awaits(5)
    kept.collect(1.0)
    assert [message.devices for _, message in kept.sent] == [(5,), (3, 4), (5,)]


def test_a_sum_that_lacks_devices_costs_asking_these_again() -> None:
    kept, nothing = Kept(), ([], [])
    kept.machine.awaits(0, 1)
    for device in (0, 1):
        kept.keep(device, b"a")
    for devices in ((), (0,)):
        assert kept.take(b"b", *devices) == nothing, "another edge was not asked"
    kept.machine.awaits(0, 1, 2)
    kept.keep(2, b"b")
    assert kept.take(b"a", 0, 2) == nothing, "it was not asked for all of these"
    kept.machine.awaits(1)
    for devices in ((0,), (0, 1)):
        assert kept.take(b"a", *devices) == nothing, "it holds a reply that counts no more"
    kept.machine.awaits(0, 1)
    assert kept.take(b"a", 0) == ([0], [("accepted", 0), ("lost", 1)])
    assert not kept.edges.has(DeviceId(1))
    assert kept.take(b"a", 0) == nothing, "it has come before"
    assert kept.collect(100.0) == [], "nothing is awaited of the edge any more"


def test_the_replies_of_an_edge_that_is_gone_are_lost() -> None:
    kept = Kept()
    kept.machine.awaits(0, 1)
    kept.keep(0, b"a")
    kept.keep(1, b"b")
    assert kept.edges.lose(b"a", 1.0) == [("lost", 0)]
    assert [kept.edges.has(DeviceId(device)) for device in range(2)] == [False, True]
    assert kept.edges.lose(b"a", 1.0) == []
    assert kept.collect(100.0) == [("given up", 1, 100.0)], "nothing is awaited of the one that is gone"
    assert not kept.edges.has(DeviceId(1))
    assert kept.collect(100.0) == []
    kept.machine.awaits(2)
    kept.keep(2, b"a", 100.0)
    kept.machine.awaits()
    kept.keep(2, b"b", 100.0)
    kept.machine.awaits(2)
    assert kept.edges.lose(b"b", 100.0) == [("lost", 2)]
    assert kept.take(b"a", 2) == ([], []), "it is asked again, and may reply otherwise"


def test_a_peer_that_leaves_and_keeps_nothing_costs_the_same_however_much_edges_keep(calls_in: Any) -> None:
    steps = []
    for devices in (10, 1000):
        kept = Kept()
        for device in range(devices):
            kept.keep(device, Name(b"a"))
        steps.append(calls_in(functools.partial(kept.edges.lose, Name(b"a device"), 0.0)))
    assert steps[0] == steps[1]


class Name(bytes):
    """The name of a peer. Whoever compares it calls a function."""

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)

    __hash__ = bytes.__hash__


class Play:
    """An ask of two devices behind the edges ``a`` and ``b``, which may both proceed."""

    def __init__(self, answer_timeout: float = 600.0) -> None:
        devices = (DeviceId(0), DeviceId(1))
        terms = Terms(ASK, devices, 2, start=0.0, deadline=100.0, give_up=60.0, answer_timeout=answer_timeout)
        self.machine = VirtualAsk(terms, devices)
        self.machine.open(0.0)
        for device in devices:
            self.machine.scheduled(device, Scheduled(ask="1.0.0", event="finish", at=10.0), 0.0)
        self.sums, self.done, self.told = Sums(), list[Any](), list[Any]()
        self.asked: list[tuple[bytes, Any]] = []
        observers = Observers([self])  # type: ignore[list-item]
        self.edges = AtEdges(GATHER, self.machine, self.sums, self.send, lambda station: False, observers)  # type: ignore[arg-type]

    def send(self, peer: bytes, message: Any) -> None:
        self.asked.append((peer, message))

    def event(self, name: str, **facts: Any) -> None:
        self.told.append((name, facts))

    def keep(self, device: int, station: bytes, now: float) -> None:
        self.done += self.edges.keep(DeviceId(device), station, reply_of(device), now)

    def send_sum(self, station: bytes, values: list[float], *devices: int, examples: int | None = None) -> None:
        _, actions = self.edges.merge(station, *sum_of(values, *devices, examples=examples), 1.0)
        self.done += actions

    def given(self) -> list[int]:
        return [action.device for action in self.done if isinstance(action, Give)]


def test_a_reply_at_an_edge_is_accepted_when_its_sum_has_come() -> None:
    play = Play()
    play.keep(0, b"a", 0.0)
    play.keep(1, b"b", 0.0)
    assert [peer for peer, _ in play.asked] == [b"a", b"b"]
    play.send_sum(b"b", [1.0, 2.0], 1)
    assert play.machine.verdicts == {1: "accepted"}
    play.send_sum(b"a", [4.0, 8.0], 0)
    assert play.machine.end == 10.0
    assert [action.message.type for action in play.done if isinstance(action, Tell)] == ["accepted", "accepted"]
    assert play.sums.total.finish()["delta"]["w"].tolist() == [5.0, 10.0]


def test_the_devices_of_an_edge_that_is_gone_are_asked_again_and_those_of_others_are_not() -> None:
    play = Play()
    play.keep(0, b"a", 0.0)
    play.keep(1, b"b", 0.0)
    play.done += play.edges.lose(b"a", 1.0)
    assert play.given() == [0]
    play.keep(0, b"b", 2.0)
    assert [(peer, message.devices) for peer, message in play.asked[2:]] == [(b"b", (0, 1))]


@pytest.mark.parametrize(
    ("devices", "examples", "why"),
    [
        ((0, 1), 7, "the examples of a sum are not those of its results"),
        ((0, 1, 1), 6, "the parts of a sum do not fit each other"),
    ],
)
def test_a_sum_that_is_not_one_of_the_replies_is_not_used(devices: tuple[int, ...], examples: int, why: str) -> None:
    play = Play()
    play.keep(0, b"a", 0.0)
    play.keep(1, b"a", 0.0)
    play.send_sum(b"a", [1.0, 1.0], *devices, examples=examples)
    assert play.told == [("edge", {"ask": "1.0.0", "detail": f"a sum cannot be used: {why}"})]
    assert (play.machine.verdicts, play.given()) == ({}, [0, 1])


def test_an_edge_that_sends_unusable_sums_again_and_again_costs_its_devices_their_replies() -> None:
    play = Play()
    play.keep(1, b"b", 0.0)
    for _ in range(LIVES + 1):
        assert play.machine.end is None
        play.keep(0, b"a", 0.0)
        play.send_sum(b"a", [1.0, 1.0], 0, examples=7)
    assert play.machine.given_up == {0: ("is behind edges that lost its replies", 0.0, "20 replies")}
    assert play.given() == [0] * LIVES
    play.send_sum(b"b", [1.0, 2.0], 1)
    assert play.machine.verdicts == {0: "failed", 1: "accepted"}


def test_nothing_is_awaited_of_a_device_whose_reply_is_at_an_edge() -> None:
    play = Play()
    play.keep(0, b"a", 30.0)
    play.machine.left(DeviceId(0), 31.0)
    assert play.machine.awaited(40.0) is None, "it is not missed while it is away"
    for now in range(31, 151):
        actions = play.machine.tick(float(now))
        assert all(action.device == 1 for action in actions), "nor reminded"
    assert play.machine.joined(DeviceId(0), 150.0) == [], "nor asked again when it is back"
    play.machine.tick(151.0)
    assert [*play.machine.given_up] == [1], "the other one may take four times the 30 s that the first one took"


def test_a_reply_that_was_lost_while_its_device_is_away_is_awaited_again() -> None:
    play = Play()
    play.keep(0, b"a", 0.0)
    play.machine.left(DeviceId(0), 1.0)
    play.done += play.edges.lose(b"a", 50.0)
    assert play.given() == []
    assert play.machine.joined(DeviceId(0), 51.0) == [Give(DeviceId(0)), Tell(DeviceId(0), play.machine._proceed)]


def test_an_edge_that_never_sends_its_sum_costs_its_devices_their_replies() -> None:
    play = Play(answer_timeout=120.0)
    play.keep(0, b"a", 0.0)
    play.keep(1, b"b", 0.0)
    play.send_sum(b"b", [1.0, 2.0], 1)
    play.edges.stalled(50.0)
    play.edges.collect(170.0)
    assert not play.machine.given_up
    play.edges.collect(171.0)
    assert play.machine.given_up == {0: ("is behind an edge that sent no sum", 121.0, "fleet.answer_timeout")}
    assert play.machine.verdicts == {1: "accepted", 0: "failed"}
    assert play.machine.perturbed


def test_a_device_whose_reply_came_past_its_edge_is_not_given_up_for_the_sum() -> None:
    play = Play(answer_timeout=120.0)
    play.keep(0, b"a", 0.0)
    play.keep(1, b"b", 0.0)
    play.machine.result(DeviceId(0), 1.0)
    play.edges.collect(121.0)
    assert (play.machine.verdicts, [*play.machine.given_up]) == ({0: "accepted", 1: "failed"}, [1])
