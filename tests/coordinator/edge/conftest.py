"""An edge below a coordinator that the tests play, and the devices and strangers behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedemu.coordinator.edge.edge import Edge
from fedemu.coordinator.edge.plan import EdgePlan
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


class Root:
    """What a coordinator does of its own accord is done by the tests; it gives places to edges and devices."""

    def __init__(self, network: MemoryNetwork, devices: int) -> None:
        self.known: set[bytes] = set()
        self.heard: list[tuple[bytes, Any, tuple[memoryview, ...]]] = []
        self.needs = 0
        self.lacks: set[str] = set()
        """The blobs that it does not have."""
        self.edge: asyncio.Task[str] | None = None
        """The edge at ``edge``."""
        self.stationed = edge.Stationed(run="run", devices=devices, heartbeat_seconds=1.0, patience=5)
        self.hub = Hub(
            network,
            "root",
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
            case wire.Need() if message.digest in self.lacks:
                self.hub.send(peer, wire.Refused(reason="unknown_blob", detail="Its ask is over."))
            case wire.Need():
                self.needs += 1
                blob = wire.Blob(digest=message.digest, offset=message.offset, size=len(BLOB))
                self.hub.send(peer, blob, (BLOB[message.offset : message.offset + message.length],))
            case wire.Hello(lease="stolen"):
                self.hub.send(peer, wire.Refused(reason="lease_unknown", detail="It is another machine's."))
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

    def heard_of(self, kind: type) -> list[Any]:
        """The messages of this kind that it has heard."""
        return [message for _, message, _ in self.heard if isinstance(message, kind)]

    def last(self, kind: type) -> Any:
        found = [entry for entry in self.heard if isinstance(entry[1], kind)]
        return found[-1] if found else None

    async def hears(self, kind: type, count: int = 1) -> Any:
        """The newest message of this kind, once so many have come; computations at an edge take real time."""
        async with asyncio.timeout(30):
            while len(self.heard_of(kind)) < count:  # noqa: ASYNC110 - a message of any kind
                await asyncio.sleep(0.001)
        return self.last(kind)

    def of(self, device: int) -> bytes:
        return next(p for p, m, _ in reversed(self.heard) if isinstance(m, wire.Hello) and m.device == device)

    @property
    def station(self) -> bytes:
        return next(iter(self.known))


class Peer:
    """A connection to an edge, and the messages that came on it."""

    def __init__(self, network: MemoryNetwork, address: str = "edge") -> None:
        self.got: list[Any] = []
        self.dealer = network.connect(address, DOWN, lambda e: self.got.append(e.message), lambda error: None)

    def kinds(self) -> list[str]:
        return [message.type for message in self.got]


class Device(Peer):
    """A device behind an edge."""

    def __init__(self, network: MemoryNetwork, number: int, address: str) -> None:
        super().__init__(network, address)
        self.dealer.send(wire.Hello(device=number, incarnation=0, lease="lease"))

    def reply(self, values: list[float], examples: int, ask: str = "1.0.0") -> None:
        specs, frames = pack({"delta/w": np.array(values, np.float32)})
        result = wire.Result(ask=ask, examples=examples, steps=1, metrics={"loss": 1.0}, epoch=7, tensors=specs)
        self.dealer.send(result, frames)


class Stranger:
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


async def _settle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.fixture
def settle() -> Callable[[], Awaitable[None]]:
    """Let all messages arrive that are under way."""
    return _settle


@pytest.fixture
def blob() -> wire.BlobRef:
    """A blob that the coordinator has."""
    return wire.BlobRef(key="model", digest=digest_of(BLOB), size=len(BLOB))


@pytest.fixture
def fleet() -> int:
    """The number of devices of the run."""
    return 50


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an edge pass on one message of strangers a second, and ten at once."""
    monkeypatch.setattr("fedemu.coordinator.edge.allowances.PASSED_RATE", 1.0)


@pytest.fixture
async def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
async def start_edge(network: MemoryNetwork, tmp_path: Path) -> AsyncIterator[Callable[[str, str], Awaitable[Any]]]:
    """Start an edge between two addresses, the one above first. Gives its task."""
    tasks = []

    async def start(up: str, down: str) -> asyncio.Task[str]:
        plan = EdgePlan(up=up, down=down, folder=tmp_path / down)
        tasks.append(asyncio.ensure_future(Edge(plan, network, network).run()))
        await _settle()
        return tasks[-1]

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def give_places(network: MemoryNetwork, fleet: int) -> Callable[[], Root]:
    """Start a coordinator at ``root``."""
    return lambda: Root(network, fleet)


@pytest.fixture
async def root(give_places: Callable[[], Root], start_edge: Any) -> Root:
    """A coordinator at ``root``, with an edge at ``edge``."""
    root = give_places()
    root.edge = await start_edge("root", "edge")
    return root


@pytest.fixture
def connect(network: MemoryNetwork) -> Callable[[], Peer]:
    """Open a connection to the edge, and say nothing."""
    return lambda: Peer(network)


@pytest.fixture
def join(network: MemoryNetwork) -> Callable[..., Awaitable[Device]]:
    """Connect a device, by its number and the address of its edge, and let it say Hello."""

    async def join(number: int, address: str = "edge") -> Device:
        device = Device(network, number, address)
        await _settle()
        return device

    return join


@pytest.fixture
def intrude(network: MemoryNetwork) -> Callable[[], Awaitable[Stranger]]:
    """Connect a stranger who takes the place of an edge."""

    async def intrude() -> Stranger:
        stranger = Stranger(network)
        await _settle()
        return stranger

    return intrude
