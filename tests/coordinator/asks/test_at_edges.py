"""What edges keep of an ask: which sums are asked for, and what their coming and their absence mean."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from fedemu.algorithms.interface import DeviceReply, Reducer
from fedemu.coordinator.asks.ask import LIVES, Give, Tell, Terms
from fedemu.coordinator.asks.at_edges import AtEdges
from fedemu.coordinator.asks.branches import Branches
from fedemu.coordinator.asks.parts import Contribution
from fedemu.coordinator.asks.virtual import VirtualAsk
from fedemu.coordinator.sums.leaf import Leaf
from fedemu.coordinator.sums.partial import Partial
from fedemu.protocol.ids import AskId, DeviceId
from fedemu.protocol.messages import Scheduled, TensorSpec
from fedemu.protocol.sharing import edge_messages as edge
from fedemu.protocol.tensors import pack

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


def branches() -> tuple[Branches[str], list[tuple[bytes, Any]]]:
    sent: list[tuple[bytes, Any]] = []
    return Branches(GATHER, lambda peer, message: sent.append((peer, message)), 2.0), sent


def partial(*devices: int) -> edge.Partial:
    return edge.Partial(ask="1.0.0", epoch=7, devices=devices, examples=1, lowest=(), tensors=())


def test_sums_are_asked_for_when_nobody_else_is_awaited() -> None:
    kept, sent = branches()
    running = [DeviceId(0), DeviceId(1), DeviceId(2)]
    kept.keep(DeviceId(0), b"a", "zero")
    kept.keep(DeviceId(1), b"b", "one")
    kept.collect(running, 0.0)
    kept.collect(running[1:], 0.0)
    assert sent == []
    kept.collect(running[:2], 0.0)
    assert [(peer, message.devices) for peer, message in sent] == [(b"a", (0,)), (b"b", (1,))]
    kept.collect(running[:2], 1.0)
    assert len(sent) == 2
    kept.collect(running[:2], 2.5)
    assert len(sent) == 4, "the question may have been lost"
    kept.collect(running[:2], 5.0)
    assert len(sent) == 4, "or else the edge needs some time"
    kept.collect(running[:2], 6.5)
    assert len(sent) == 6


def test_a_sum_that_is_on_its_way_is_not_asked_for_again() -> None:
    kept, sent = branches()
    kept.is_sending = {b"a"}.__contains__
    kept.keep(DeviceId(0), b"a", "zero")
    for now in range(600):
        kept.collect([DeviceId(0)], float(now))
    assert len(sent) == 1
    kept.keep(DeviceId(1), b"b", "one")
    for now in (600.0, 605.0):
        kept.collect([DeviceId(0), DeviceId(1)], now)
    assert [peer for peer, _ in sent] == [b"a", b"b", b"b"], "another edge is asked again"
    kept.is_sending = lambda station: False
    kept.collect([DeviceId(0)], 610.0)
    assert [peer for peer, _ in sent[3:]] == [b"a"]


def test_an_edge_is_asked_at_once_for_more_devices_and_for_the_rest_of_a_long_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(edge, "MOST_DEVICES", 2)
    kept, sent = branches()
    running = [DeviceId(device) for device in (5, 3, 4)]
    for device in running:
        kept.keep(device, b"a", str(device))
    kept.collect([], 0.0)
    kept.collect(running[:1], 0.0)
    kept.collect(running, 0.5)
    kept.take(b"a", partial(3, 4), running)
    kept.collect(running[:1], 1.0)
    assert [message.devices for _, message in sent] == [(5,), (3, 4), (5,)]


def test_a_sum_that_lacks_devices_costs_asking_these_again() -> None:
    kept, _ = branches()
    running = [DeviceId(0), DeviceId(1)]
    for device in running:
        kept.keep(device, b"a", str(device))
    kept.collect(running, 0.0)
    for devices in ((), (0,)):
        assert kept.take(b"b", partial(*devices), running) is None, "another edge was not asked"
    kept.keep(DeviceId(2), b"b", "2")
    assert kept.take(b"a", partial(0, 2), [*running, DeviceId(2)]) is None, "it was not asked for all of these"
    for devices in ((0,), (0, 1)):
        assert kept.take(b"a", partial(*devices), [DeviceId(1)]) is None, "it holds a reply that counts no more"
    assert kept.take(b"a", partial(0), running) == ({0: "0"}, [1])
    assert not kept.has(DeviceId(1))
    assert kept.take(b"a", partial(0), running) is None, "it has come before"
    assert kept.overdue(100.0, 60.0) == {}


def test_the_replies_of_an_edge_that_is_gone_are_lost() -> None:
    kept, _ = branches()
    kept.keep(DeviceId(0), b"a", "zero")
    kept.keep(DeviceId(1), b"b", "one")
    kept.collect([DeviceId(0), DeviceId(1)], 0.0)
    assert kept.lose(b"a") == [0]
    assert [kept.has(DeviceId(device)) for device in range(2)] == [False, True]
    assert kept.lose(b"a") == []
    assert kept.overdue(100.0, 60.0) == {1: 100.0}, "nothing is awaited of the one that is gone"
    assert not kept.has(DeviceId(1))
    assert kept.overdue(100.0, 60.0) == {}
    kept.keep(DeviceId(2), b"a", "two")
    kept.collect([DeviceId(2)], 100.0)
    kept.keep(DeviceId(2), b"b", "two")
    assert kept.lose(b"b") == [2]
    assert kept.take(b"a", partial(2), [DeviceId(2)]) is None, "it is asked again, and may reply otherwise"


def test_a_peer_that_leaves_and_keeps_nothing_costs_the_same_however_much_edges_keep(calls_in: Any) -> None:
    steps = []
    for devices in (10, 1000):
        kept, _ = branches()
        for device in range(devices):
            kept.keep(DeviceId(device), Name(b"a"), "reply")
        steps.append(calls_in(functools.partial(kept.lose, Name(b"a device"))))
    assert steps[0] == steps[1]


class Name(bytes):
    """The name of a peer. Whoever compares it calls a function."""

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)

    __hash__ = bytes.__hash__


class Sums:
    """In place of a Folding: it adds up what edges send."""

    def __init__(self) -> None:
        self.total = Partial(REDUCERS, LEAVES)
        self.merge = self.total.merge

    def take(self, payload: Any, examples: int) -> None: ...

    def unpack(self, packed: Any) -> Partial:
        return self.total.unpack(packed)


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
        branches = Branches[Contribution](GATHER, lambda peer, message: self.asked.append((peer, message)), 2.0)
        self.edges = AtEdges(self.machine, branches, self.sums, self.accept, self.done.extend, self.told.append)

    def accept(self, device: DeviceId, contribution: Contribution, now: float) -> None:
        self.done += self.machine.result(device, now)

    def keep(self, device: int, station: bytes, now: float) -> None:
        reply = DeviceReply(DeviceId(device), 3, 1, {}, None)
        self.edges.keep(DeviceId(device), station, Contribution(reply, None, None), now)

    def send_sum(self, station: bytes, values: list[float], *devices: int, examples: int | None = None) -> None:
        part = Partial(REDUCERS, LEAVES)
        part.fold([{"delta/w": np.array(values, np.float32)}], [3])
        packed = part.pack()
        specs, frames = pack({name: leaf.digits for name, leaf in packed.sums.items()})
        lowest = tuple(packed.sums[spec.name].lowest for spec in specs)
        told = 3 * len(devices) if examples is None else examples
        message = edge.Partial(ask="1.0.0", epoch=7, devices=devices, examples=told, lowest=lowest, tensors=specs)
        self.edges.merge(station, message, frames, 1.0)

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
    play.edges.lose(b"a", 1.0)
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
    assert play.told == [f"a sum cannot be used: {why}"]
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
    play.edges.lose(b"a", 50.0)
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
