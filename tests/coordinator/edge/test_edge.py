"""An edge between a hub and relays: what passes, what it keeps, and the sum that it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedemu.algorithms.interface import Reducer
from fedemu.coordinator.asks.branches import packed_of
from fedemu.coordinator.edge.allowances import PASSED_RATE, Allowances
from fedemu.coordinator.edge.behind import Behind
from fedemu.coordinator.edge.edge import Edge, EdgePlan
from fedemu.coordinator.sums.leaf import Leaf
from fedemu.coordinator.sums.partial import Partial
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import DOWN, Envelope, Limits, encode
from fedemu.protocol.ids import digest_of
from fedemu.protocol.sharing import edge_messages as edge
from fedemu.protocol.sharing.bundle import Bundle, BundleDecoder, parts_of
from fedemu.protocol.sharing.hub import Hub
from fedemu.protocol.tensors import pack
from fedemu.protocol.transport.interface import BOUNDLESS, let_all_pass
from fedemu.protocol.transport.memory import MemoryNetwork

BLOB = b"0123456789" * 1000
REF = wire.BlobRef(key="model", digest=digest_of(BLOB), size=len(BLOB))
STATIONED = edge.Stationed(run="run", devices=50, heartbeat_seconds=1.0, patience=5)
NOTHING = wire.BlobRef(key="nothing", digest=digest_of(b""), size=0)
GRANTED = wire.Granted(
    lease="lease",
    run="run",
    ranges=((0, 9),),
    experiment=NOTHING,
    partition=NOTHING,
    data=digest_of(b""),
    heartbeat_seconds=1.0,
    patience=5,
)
GATHER = edge.Gather(
    ask="1.0.0",
    epoch=7,
    leaves=(wire.TensorSpec(name="delta/w", dtype="float32", shape=(2,)),),
    reducers=(("delta", "weighted_mean", "delta"),),
    max_norm=100.0,
)
REDUCERS = {"delta": Reducer("weighted_mean")}
LEAVES = {"delta/w": Leaf("float32", (2,))}


class Root:
    """What a coordinator does of its own accord is done by the tests; it gives places to edges and devices."""

    def __init__(self, network: MemoryNetwork, address: str = "root") -> None:
        self.known: set[bytes] = set()
        self.heard: list[tuple[bytes, Any, tuple[memoryview, ...]]] = []
        self.needs = 0
        self.stationed = STATIONED
        self.hub = Hub(
            network,
            address,
            edge.up_decoder(Limits()),
            self._received,
            lambda peer, error: None,
            let_all_pass,
            replace(BOUNDLESS, knows=self.known.__contains__),
            asyncio.get_running_loop(),
            100,
            lambda peer: None,
        )

    def _received(self, peer: bytes, envelope: Envelope) -> None:
        message = envelope.message
        self.heard.append((peer, message, envelope.frames))
        match message:
            case edge.Station():
                self.known.add(peer)
                self.hub.send(peer, self.stationed)
            case wire.Enroll(host="machine"):
                self.hub.send(peer, GRANTED)
            case wire.Need():
                self.needs += 1
                blob = wire.Blob(digest=message.digest, offset=message.offset, size=len(BLOB))
                self.hub.send(peer, blob, (BLOB[message.offset : message.offset + message.length],))
            case wire.Hello():
                welcome = wire.Welcome(
                    device=message.device,
                    clock="virtual",
                    horizon=1.0,
                    heartbeat_seconds=1.0,
                    patience=5,
                    durable_round=0,
                )
                self.hub.send(peer, welcome)

    def last(self, kind: type) -> Any:
        found = [entry for entry in self.heard if isinstance(entry[1], kind)]
        return found[-1] if found else None

    def of(self, device: int) -> bytes:
        return next(p for p, m, _ in reversed(self.heard) if isinstance(m, wire.Hello) and m.device == device)

    @property
    def station(self) -> bytes:
        return next(iter(self.known))


class Device:
    """A device behind an edge."""

    def __init__(self, network: MemoryNetwork, number: int, address: str = "edge") -> None:
        self.got: list[Any] = []
        self.dealer = network.connect(address, DOWN, lambda e: self.got.append(e.message), lambda error: None)
        self.dealer.send(wire.Hello(device=number, incarnation=0, lease="lease"))

    def reply(self, values: list[float], examples: int) -> None:
        specs, frames = pack({"delta/w": np.array(values, np.float32)})
        result = wire.Result(ask="1.0.0", examples=examples, steps=1, metrics={"loss": 1.0}, epoch=7, tensors=specs)
        self.dealer.send(result, frames)

    def kinds(self) -> list[str]:
        return [message.type for message in self.got]


async def settle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[MemoryNetwork]:
    network = MemoryNetwork()
    tasks = []

    def start(up: str, down: str) -> None:
        plan = EdgePlan(up=up, down=down, folder=tmp_path / down)
        tasks.append(asyncio.ensure_future(Edge(plan, network, network).run()))

    network.start_edge = start  # type: ignore[attr-defined]
    yield network
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def value(message: edge.Partial, frames: tuple[memoryview, ...]) -> list[float]:
    sums = Partial(REDUCERS, LEAVES).unpack(packed_of(message, frames))
    return list(sums.finish()["delta"]["w"])


async def test_an_edge_sends_one_sum_of_the_results_that_it_keeps(network: Any) -> None:
    root = Root(network)
    network.start_edge("root", "edge")
    await settle()
    devices = [Device(network, number) for number in range(3)]
    await settle()
    root.hub.send(root.station, GATHER)
    await settle()
    for device, values, examples in zip(devices, ([1.0, 2.0], [4.0, 5.0], [100.0, 0.0]), (1, 2, 3), strict=True):
        device.reply(values, examples)
    await settle()
    held = [m for _, m, _ in root.heard if isinstance(m, edge.Held)]
    assert [(m.examples, m.metrics, m.reason) for m in held] == [
        (1, {"loss": 1.0}, ""),
        (2, {"loss": 1.0}, ""),
        (3, {"loss": 1.0}, ""),
    ]
    assert root.last(wire.Result) is None, "the tensors stay at the edge"
    root.hub.send(root.station, edge.Sum(ask="1.0.0", epoch=7, devices=(0, 1)))
    await settle()
    _, partial, frames = root.last(edge.Partial)
    assert (set(partial.devices), partial.examples) == ({0, 1}, 3)
    assert value(partial, frames) == [3.0, 4.0]


async def test_an_edge_checks_results_as_the_coordinator_does(network: Any) -> None:
    root = Root(network)
    network.start_edge("root", "edge")
    await settle()
    devices = [Device(network, number) for number in range(2)]
    await settle()
    root.hub.send(root.station, GATHER)
    await settle()
    devices[0].reply([float("nan"), 0.0], 1)
    devices[1].reply([1000.0, 0.0], 1)
    await settle()
    assert [m.reason for _, m, _ in root.heard if isinstance(m, edge.Held)] == ["nonfinite", "norm"]


async def test_results_of_another_ask_pass(network: Any) -> None:
    root = Root(network)
    network.start_edge("root", "edge")
    await settle()
    device = Device(network, 0)
    await settle()
    device.reply([1.0, 2.0], 1)
    await settle()
    assert isinstance(root.heard[-1][1], wire.Result)


async def test_a_new_edge_says_that_it_has_nothing_of_the_ask(network: Any) -> None:
    root = Root(network)
    network.start_edge("root", "edge")
    await settle()
    root.hub.send(root.station, edge.Sum(ask="1.0.0", epoch=7, devices=(0, 1)))
    await settle()
    assert root.last(edge.Partial)[1].devices == ()


async def test_a_blob_is_fetched_once_and_served_to_all(network: Any) -> None:
    root = Root(network)
    network.start_edge("root", "edge")
    await settle()
    devices = [Device(network, number) for number in range(3)]
    await settle()
    root.hub.send(root.of(0), wire.Offer(blobs=(REF,), round=1))
    await settle()
    for device in devices:
        device.dealer.send(wire.Need(digest=REF.digest, offset=0, length=REF.size))
    await settle()
    assert [device.kinds()[-1] for device in devices] == ["blob"] * 3
    assert root.needs == 1


async def test_edges_behind_edges_send_their_sums_through_them(network: Any) -> None:
    root = Root(network)
    network.start_edge("root", "upper")
    await settle()
    network.start_edge("upper", "lower")
    await settle()
    near, far = Device(network, 0, "upper"), Device(network, 1, "lower")
    await settle()
    root.hub.send(root.station, GATHER)
    await settle()
    near.reply([1.0, 2.0], 1)
    far.reply([4.0, 5.0], 2)
    await settle()
    root.hub.send(root.station, edge.Sum(ask="1.0.0", epoch=7, devices=(0, 1)))
    await settle()
    _, partial, frames = root.last(edge.Partial)
    assert set(partial.devices) == {0, 1}
    assert value(partial, frames) == [3.0, 4.0]


def enrolled(root: Root) -> int:
    """How many strangers' messages have come through the edge."""
    return sum(isinstance(message, wire.Enroll) for _, message, _ in root.heard)


async def test_a_stranger_can_neither_say_much_through_an_edge_nor_anything_long(network: Any) -> None:
    root = Root(network)
    network.start_edge("root", "edge")
    await settle()
    answers: list[Any] = []
    stranger = network.connect("edge", DOWN, lambda envelope: answers.append(envelope.message), lambda error: None)
    stranger.send(wire.Presence(until=1.0, intervals=((0.0, 1.0),) * 1000))
    await settle()
    assert [answer.reason for answer in answers] == ["unknown_peer"]
    assert root.last(wire.Presence) is None
    for _ in range(100):
        stranger.send(wire.Enroll(count=1, host="stranger"))
    await settle()
    assert enrolled(root) == 19, "twenty messages, of which one was long"
    honest = Device(network, 1)
    await settle()
    assert honest.kinds() == ["welcome"]


async def test_all_strangers_of_an_edge_have_one_allowance_together(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.coordinator.edge.allowances.PASSED_RATE", 1.0)
    root = Root(network)
    root.stationed = msgspec.structs.replace(STATIONED, devices=0)
    network.start_edge("root", "edge")
    await settle()
    device = Device(network, 1)
    await settle()
    for _ in range(5):
        stranger = network.connect("edge", DOWN, lambda envelope: None, lambda error: None)
        for _ in range(4):
            stranger.send(wire.Enroll(count=1, host="stranger"))
        await settle()
    assert enrolled(root) == 9, "ten at once, of which one was the device's Hello"
    for _ in range(20):
        device.dealer.send(wire.Presence(until=1.0, intervals=((0.0, 1.0),) * 1000))
    await settle()
    assert sum(isinstance(message, wire.Presence) for _, message, _ in root.heard) == 20, "it has its own"


class Station:
    """An edge of nobody, which says what it likes on channels."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.got: list[Any] = []
        self.dealer = network.connect(
            "edge", BundleDecoder(edge.down_decoder(Limits())), self.got.append, lambda error: None
        )
        self.dealer.send(edge.Station())

    def say(self, first: int, *messages: wire.Message) -> None:
        """Say each of the messages on a channel of its own."""
        names = tuple(range(first, first + len(messages)))
        frames = [frame for message in messages for frame in encode(message)]
        self.dealer.send(Bundle(channels=names, frames=(1,) * len(names)), frames)

    def refusals(self) -> list[str]:
        """The reasons for which messages on channels were refused."""
        heard = [
            part.frames for e in self.got if isinstance(e.message, Bundle) for part in parts_of(e.message, e.frames)
        ]
        return [m.reason for m in (DOWN.decode(frames).message for frames in heard) if isinstance(m, wire.Refused)]


def hello(device: int, lease: str = "lease") -> wire.Hello:
    return wire.Hello(device=device, incarnation=2**30, lease=lease)


def hellos(root: Root, incarnation: int = 2**30) -> list[int]:
    """The devices whose Hellos have come through the edge."""
    return [m.device for _, m, _ in root.heard if isinstance(m, wire.Hello) and m.incarnation == incarnation]


async def test_a_channel_cannot_speak_for_devices_of_a_machine_on_another_connection(network: Any) -> None:
    root = Root(network)
    network.start_edge("root", "edge")
    await settle()
    machine = network.connect("edge", DOWN, lambda envelope: None, lambda error: None)
    machine.send(wire.Enroll(count=3, host="machine"))
    thief = Station(network)
    await settle()
    thief.say(0, hello(1), hello(2, "another lease"))
    await settle()
    assert hellos(root) == [2]
    assert thief.refusals() == ["lease_unknown"]
    device = Device(network, 1)
    await settle()
    assert device.kinds() == ["welcome"]


async def test_devices_with_a_lease_get_through_when_strangers_have_used_up_what_may_pass(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.coordinator.edge.allowances.PASSED_RATE", 1.0)
    root = Root(network)
    network.start_edge("root", "edge")
    await settle()
    machine = network.connect("edge", DOWN, lambda envelope: None, lambda error: None)
    machine.send(wire.Enroll(count=3, host="machine"))
    flood = Station(network)
    await settle()
    flood.say(0, *[wire.Enroll(count=1, host="stranger")] * 100, *[hello(1, "no lease")] * 100)
    await settle()
    assert (enrolled(root), hellos(root)) == (9, []), "ten messages, of which one was that of the edge of nobody"
    device = Device(network, 1)
    await settle()
    assert device.kinds() == ["welcome"]


async def test_a_connection_whose_channels_say_more_than_an_edge_passes_on_is_closed(network: Any) -> None:
    root = Root(network)
    network.start_edge("root", "edge")
    await settle()
    flood = Station(network)
    await settle()
    for first in range(0, 10_000, 1000):
        flood.say(first, *[hello(1, "no lease")] * 1000)
    await settle()
    passed = len(hellos(root))
    assert 10 * PASSED_RATE <= passed < 5000
    flood.say(0, wire.Enroll(count=1, host="late"))
    await settle()
    assert (enrolled(root), len(hellos(root))) == (0, passed)


async def test_what_strangers_ask_while_the_coordinator_is_away_counts_when_it_is_back(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.coordinator.edge.allowances.PASSED_RATE", 1.0)
    root = Root(network)
    network.start_edge("root", "edge")
    await settle()
    root.hub.send(root.station, wire.Refused(reason="unknown_peer", detail="Who are you?"))
    await settle()
    for _ in range(30):
        network.connect("edge", DOWN, lambda envelope: None, lambda error: None).send(hello(1, "no lease"))
    await settle()
    assert hellos(root) == []
    for _ in range(200):
        await asyncio.sleep(0.05)
        if hellos(root):
            break
    await settle()
    assert len(hellos(root)) == 10


async def test_a_device_may_send_as_many_bytes_as_its_asks_need(network: Any) -> None:
    root = Root(network)
    network.start_edge("root", "edge")
    await settle()
    device = Device(network, 1)
    await settle()
    large = wire.BlobRef(key="model", digest=digest_of(b""), size=40 * 2**20)
    work = wire.Work(
        ask="1.0.0", program="train", task=0, start=0.0, shared=(large,), state=None, download_bytes=1,
        upload_bytes=1, passes=1.0, processed=1.0, deadline=9.0, durable_round=0, epoch=7,
    )  # fmt: skip
    root.hub.send(root.of(1), work)
    await settle()
    values = np.zeros(10 * 2**20, np.float32)
    specs, frames = pack({"delta/w": values})
    result = wire.Result(ask="1.0.0", examples=1, steps=1, metrics={}, epoch=7, tensors=specs)
    for _ in range(5):
        device.dealer.send(result, frames)
    await settle()
    assert sum(isinstance(message, wire.Result) for _, message, _ in root.heard) == 5


def test_a_connection_without_work_may_send_so_many_bytes_and_no_more() -> None:
    allowances = Allowances(50)
    size = 40 * 2**20
    assert [allowances.of_session(b"peer", size, 0.0) is None for _ in range(2)] == [True, False]
    allowances.asked(size)
    assert allowances.unfinished == 320 * 2**20
    assert [allowances.of_session(b"peer", size, 0.0) is None for _ in range(18)] == [True] * 16 + [False] * 2


def test_people_are_told_who_is_behind_an_edge_when_the_numbers_have_come_to_rest() -> None:
    told: list[str] = []
    behind = Behind(told.append)
    behind.grant(b"m", "lease")
    for number in range(1500):
        behind.devices[bytes([number >> 8, number & 255])] = number
        behind.look(number / 1000, 0)
    assert told == []
    behind.devices[b"its next life"] = 7
    behind.look(3.5, 0)
    behind.look(9.0, 0)
    behind.forget(b"m")
    behind.look(10.0, 1)
    behind.look(12.0, 1)
    assert told == [
        "behind this edge: 1 machine, 1,500 devices",
        "behind this edge: 0 machines, 1,500 devices, 1 edge",
    ]
