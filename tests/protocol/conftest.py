"""Networks of every kind, and endpoints on them that record what they receive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.garbage import gc as sent_buffers

from fedemu.protocol.codec import DOWN, UP, Decoder, Envelope
from fedemu.protocol.errors import ConfigurationError, ProtocolError
from fedemu.protocol.transport.direct import DirectNetwork
from fedemu.protocol.transport.interface import Dealer, Dialer, Network, Router, Screen, let_all_pass
from fedemu.protocol.transport.memory import MemoryNetwork
from fedemu.protocol.transport.zeromq import ZmqNetwork

Eventually = Callable[[Callable[[], object]], Awaitable[None]]


async def _eventually(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Let the loop run until the condition holds. Fails if it does not hold in time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition():
        assert loop.time() < end, "the condition did not come true"
        await asyncio.sleep(0.001)


class Strangers(zmq.Context[zmq.Socket[bytes]]):
    """A context that keeps its sockets. One that the collector closes lingers, for ever if its messages go nowhere."""

    kept: list[zmq.Socket[bytes]]

    def socket(self, *arguments: Any, **named: Any) -> zmq.Socket[bytes]:
        self.kept.append(super().socket(*arguments, **named))
        return self.kept[-1]


@pytest.fixture
def context() -> Iterator[Strangers]:
    """A context of ZeroMQ for strangers. A test that fails must not leave it: at its end it waits for its sockets."""
    made = Strangers()
    made.kept = []
    yield made
    made.destroy(linger=0)


@dataclass
class Side:
    """An endpoint, and the messages and errors that it has received."""

    messages: list[Any] = field(default_factory=list)
    peers: list[bytes] = field(default_factory=list)
    frames: list[tuple[memoryview, ...]] = field(default_factory=list)
    rejected: list[ProtocolError] = field(default_factory=list)
    refused_peers: list[bytes] = field(default_factory=list)
    react: Callable[[Any, bytes], None] = lambda message, peer: None

    def from_peer(self, peer: bytes, envelope: Envelope) -> None:
        self.peers.append(peer)
        self.received(envelope, peer)

    def received(self, envelope: Envelope, peer: bytes = b"") -> None:
        self.messages.append(envelope.message)
        self.frames.append(envelope.frames)
        self.react(envelope.message, peer)

    def reject_peer(self, peer: bytes, error: ProtocolError) -> None:
        self.refused_peers.append(peer)
        self.rejected.append(error)


@dataclass
class RouterSide(Side):
    router: Router = field(init=False)


@dataclass
class DealerSide(Side):
    dealer: Dealer = field(init=False)


@dataclass
class Wire:
    """A network of one kind, and an address to listen at. ``dialer`` makes the Dealers, if not the network itself."""

    kind: str
    network: Network
    wildcard: str
    dialer: Dialer | None = None
    sides: list[Side] = field(default_factory=list)

    def listen(self, address: str | None = None, decoder: Decoder = UP, screen: Screen = let_all_pass) -> RouterSide:
        side = RouterSide()
        self.sides.append(side)
        side.router = self.network.bind(address or self.wildcard, decoder, side.from_peer, side.reject_peer, screen)
        return side

    async def listen_again(self, address: str) -> RouterSide:
        """Listen at an address that was just closed, as soon as it is free."""
        sides: list[RouterSide] = []

        def listening() -> bool:
            with contextlib.suppress(ConfigurationError):
                sides.append(self.listen(address))
            return bool(sides)

        await _eventually(listening)
        return sides[0]

    def join(self, address: str, decoder: Decoder = DOWN) -> DealerSide:
        side = DealerSide()
        self.sides.append(side)
        side.dealer = (self.dialer or self.network).connect(address, decoder, side.received, side.rejected.append)
        return side

    def close(self) -> None:
        if self.dialer is not None:
            self.dialer.close()
        self.network.close()


@pytest.fixture
def eventually() -> Eventually:
    """``await eventually(condition)``: let the loop run until the condition holds. Fails after 60 seconds."""
    return _eventually


@pytest.fixture
def socket_path(socket_folder: Path) -> Path:
    """The path of a socket in a new folder."""
    return socket_folder / "s"


@pytest.fixture(params=["tcp", "ipc", "direct-tcp", "direct-ipc", "direct-direct", "ipc-direct", "memory"])
async def wire(
    request: pytest.FixtureRequest, socket_path: Path, descriptors: Callable[[], set[str]]
) -> AsyncIterator[Wire]:
    """Each kind of network in turn.

    After a test no descriptor is left open, none is watched, and no callback of the loop has failed.
    """
    before, loop = descriptors(), asyncio.get_running_loop()
    watched = {*loop._selector.get_map()}  # type: ignore[attr-defined]
    failures: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    if request.param == "memory":
        made = Wire("memory", MemoryNetwork(), "memory://fleet:0")
    else:
        wildcard = "tcp://127.0.0.1:*" if request.param.endswith("tcp") else f"ipc://{socket_path}"
        network: Network = DirectNetwork(loop) if request.param.endswith("-direct") else ZmqNetwork()
        dialer: Dialer | None = DirectNetwork(loop) if request.param.startswith("direct-") else None
        if request.param == "ipc-direct":
            dialer = ZmqNetwork()
        made = Wire(request.param, network, wildcard, dialer)
    yield made
    made.close()
    for side in made.sides:
        side.frames.clear()  # frames in sealed memory hold its descriptor
    sent_buffers.stop()
    assert {*loop._selector.get_map()} <= watched  # type: ignore[attr-defined]
    await asyncio.sleep(0)  # what was to be called soon when the sides were closed
    await _eventually(lambda: not descriptors() - before)
    assert not failures


@pytest.fixture
async def tcp() -> AsyncIterator[Wire]:
    """A network over TCP alone, for tests of what only ZeroMQ has."""
    network = ZmqNetwork()
    yield Wire("tcp", network, "tcp://127.0.0.1:*")
    network.close()


@pytest.fixture(params=["zeromq", "plain"])
async def sockets(request: pytest.FixtureRequest, socket_path: Path) -> AsyncIterator[Wire]:
    """A network of ZeroMQ over TCP, then one on plain sockets."""
    network: Network = ZmqNetwork() if request.param == "zeromq" else DirectNetwork(asyncio.get_running_loop())
    yield Wire(request.param, network, "tcp://127.0.0.1:*" if request.param == "zeromq" else f"ipc://{socket_path}")
    network.close()
