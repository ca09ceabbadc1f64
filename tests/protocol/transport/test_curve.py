"""Keys of connections, over real sockets: who comes in, who does not, and what each of them is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import zmq

from fedemu.protocol.codec import DOWN, UP, Envelope, Limits, encode
from fedemu.protocol.errors import ConfigurationError, HandshakeFailed, KeyRevoked, ProtocolError
from fedemu.protocol.messages import Beat, Heartbeat, Message
from fedemu.protocol.transport import curve
from fedemu.protocol.transport.curve import ClientKeys, ServerKeys, connect_with
from fedemu.protocol.transport.handshakes import HandshakeWatch
from fedemu.protocol.transport.sockets import bound, make_context
from fedemu.protocol.transport.zeromq import ZmqNetwork

Eventually = Callable[[Callable[[], object]], Awaitable[None]]
Pair = tuple[str, str]


def a_pair() -> Pair:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class Place:
    """A coordinator with keys, and machines that connect to it. ``approved`` may change at any time."""

    def __init__(self) -> None:
        self.public, secret = a_pair()
        self.approved: set[str] = set()
        self.broken = False
        self.heard: list[tuple[bytes, Message]] = []
        self.rejected: list[ProtocolError] = []
        self.refused: list[bytes] = []
        self.edges: set[str] = set()
        keys = ServerKeys(self.public, secret, self._approve, self.edges.__contains__)
        self._networks = [ZmqNetwork(keys=keys, linger_seconds=0.1)]
        self.router = self._networks[0].bind(
            "tcp://127.0.0.1:*",
            UP,
            lambda peer, envelope: self.heard.append((peer, envelope.message)),
            self._rejected,
        )

    def _approve(self, key: str) -> bool:
        if self.broken:
            raise OSError("the disk is gone")
        return key in self.approved

    def _rejected(self, peer: bytes, error: ProtocolError) -> None:
        self.refused.append(peer)
        self.rejected.append(error)

    def join(self, pair: Pair | None, server: str | None = None) -> Machine:
        machine = Machine(self.router.address, pair, server or self.public)
        self._networks.append(machine.network)
        return machine

    def close(self) -> None:
        for network in self._networks:
            network.close()


class Machine:
    """A connection that has said a heartbeat."""

    def __init__(self, address: str, pair: Pair | None, server: str) -> None:
        self.heard: list[Message] = []
        self.told: list[ProtocolError] = []
        keys = None if pair is None else ClientKeys(address, *pair, server)
        self.network = ZmqNetwork(keys=keys, watched=True, linger_seconds=0.1)
        self.dealer = self.network.connect(address, DOWN, self._received, self.told.append)
        self.dealer.send(Heartbeat())

    def _received(self, envelope: Envelope) -> None:
        self.heard.append(envelope.message)


@pytest.fixture
async def place(eventually: Eventually, descriptors: Any) -> AsyncIterator[Place]:
    """After a test no descriptor is left open, none is watched, and no callback of the loop has failed."""
    before, loop = descriptors(), asyncio.get_running_loop()
    watched = {*loop._selector.get_map()}  # type: ignore[attr-defined]
    failures: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    made = Place()
    yield made
    made.close()
    assert {*loop._selector.get_map()} <= watched  # type: ignore[attr-defined]
    await eventually(lambda: not descriptors() - before)
    assert not failures


async def test_an_approved_key_comes_in(place: Place, eventually: Eventually) -> None:
    pair = a_pair()
    place.approved.add(pair[0])
    machine = place.join(pair)
    await eventually(lambda: place.heard)
    assert place.heard[0][1] == Heartbeat()
    peer = place.heard[0][0]
    assert (place.router.key_of(peer), place.router.may_be_edge(peer)) == (pair[0], False)
    place.edges.add(pair[0])
    assert place.router.may_be_edge(peer)
    place.router.send(place.heard[0][0], Beat())
    await eventually(lambda: machine.heard)
    assert machine.told == []


async def test_a_key_that_is_not_approved_is_told_how_to_get_in(
    place: Place, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    pair = a_pair()
    machine = place.join(pair)
    await eventually(lambda: machine.told)
    [error] = machine.told
    assert isinstance(error, HandshakeFailed)
    assert error.final, "ZeroMQ does not try again by itself"
    assert str(error).endswith(f"has not approved this machine's key; say there: fedemu keys approve NAME '{pair[0]}'")
    assert f"a machine with the key {pair[0]} was refused" in caplog.text
    assert "broke off" not in caplog.text
    place.approved.add(pair[0])
    place.join(pair)
    await eventually(lambda: place.heard)


async def test_refused_keys_are_logged_once_each_and_not_too_many_of_them(
    place: Place, eventually: Eventually, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "_MOST_STRANGERS", 2)
    pairs = [a_pair() for _ in range(4)]
    for pair in (pairs[0], *pairs):
        machine = place.join(pair)
        await eventually(lambda machine=machine: machine.told)  # type: ignore[misc]
    named = [pair[0] for pair in pairs if f"a machine with the key {pair[0]} was refused" in caplog.text]
    assert (named, caplog.text.count("was refused")) == ([pairs[0][0], pairs[1][0]], 2)


async def test_without_keys_nobody_comes_in(
    place: Place, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    machine = place.join(None)
    await eventually(lambda: machine.told)
    await eventually(lambda: "connections that broke off in the handshake so far: 1 (they had no keys" in caplog.text)
    said = "wants keys (give its public key with --server-key; `fedemu keys list` shows it there)"
    assert said in str(machine.told[0])
    assert place.heard == []


async def test_a_refusal_is_heard_however_soon_it_comes(
    place: Place, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*arguments: Any) -> HandshakeWatch:
        time.sleep(0.3)  # far longer than a refusal takes
        return HandshakeWatch(*arguments)

    monkeypatch.setattr("fedemu.protocol.transport.zeromq.HandshakeWatch", slow)
    machine = place.join(None)
    await eventually(lambda: machine.told)


async def test_another_key_of_the_coordinator_is_not_accepted(place: Place, eventually: Eventually) -> None:
    pair = a_pair()
    place.approved.add(pair[0])
    machine = place.join(pair, server=a_pair()[0])
    await eventually(lambda: machine.told)
    assert "its key is not the one of --server-key" in str(machine.told[0])
    assert place.heard == []


async def test_a_key_that_is_revoked_is_not_heard_any_more(place: Place, eventually: Eventually) -> None:
    pairs = [a_pair(), a_pair()]
    place.approved.update(public for public, _ in pairs)
    machines = [place.join(pair) for pair in pairs]
    await eventually(lambda: len(place.heard) == 2)
    place.approved.remove(pairs[0][0])
    for _ in range(3):
        machines[0].dealer.send(Heartbeat())
    await eventually(lambda: len(place.rejected) == 3)
    assert all(isinstance(error, KeyRevoked) for error in place.rejected)
    assert place.refused[0] in {peer for peer, _ in place.heard}
    machines[1].dealer.send(Heartbeat())
    await eventually(lambda: len(place.heard) == 3)
    assert place.heard[2][0] != place.refused[0]


async def test_a_peer_that_only_listens_is_told_that_its_key_was_revoked_and_then_parted_from(
    place: Place, eventually: Eventually
) -> None:
    pairs = [a_pair(), a_pair()]
    place.approved.update(public for public, _ in pairs)
    for pair in pairs:
        place.join(pair)
    await eventually(lambda: len(place.heard) == 2)
    place.router.look()
    assert place.rejected == []
    place.approved.remove(pairs[0][0])
    place.router.look()
    assert [str(error)[:22] for error in place.rejected] == ["The key of this connec"]
    assert place.router.key_of(place.refused[0]) == pairs[0][0]
    place.router.look()
    await eventually(lambda: [*map(place.router.key_of, place.router._connections.peers)] == [pairs[1][0]])
    assert len(place.rejected) == 1


async def test_a_name_that_another_key_has_chosen_is_not_its_peer(
    place: Place, eventually: Eventually, context: Any
) -> None:
    """Two machines call their connections by the same name, one after the other."""
    pairs = [a_pair(), a_pair()]
    place.approved.update(public for public, _ in pairs)
    for number, (public, secret) in enumerate(pairs, 1):
        with context.socket(zmq.DEALER) as socket:
            socket.linger = 1000
            socket.setsockopt(zmq.IDENTITY, b"the same")
            connect_with(socket, ClientKeys(place.router.address, public, secret, place.public))
            socket.connect(place.router.address)
            socket.send_multipart(encode(Heartbeat()))
            await eventually(lambda count=number: len(place.heard) == count)
        await eventually(lambda: place.router.look() or place.router._connections.peers == [])
    peers = [peer for peer, _ in place.heard]
    assert [*map(place.router.key_of, peers)] == [public for public, _ in pairs]
    assert peers[0] != peers[1]


async def test_an_error_while_a_key_is_looked_up_refuses_it_and_the_next_one_is_looked_up(
    place: Place, eventually: Eventually
) -> None:
    pair = a_pair()
    place.approved.add(pair[0])
    place.broken = True
    machine = place.join(pair)
    await eventually(lambda: machine.told)
    assert "could not check this machine's key" in str(machine.told[0])
    place.broken = False
    place.join(pair)
    await eventually(lambda: place.heard)


async def test_nobody_comes_in_while_nobody_answers_for_keys(eventually: Eventually) -> None:
    context = make_context(16)
    public, secret = a_pair()
    socket = bound(context, "tcp://127.0.0.1:*", Limits(), 0, ServerKeys(public, secret, lambda key: True), 64)
    machine = Machine(socket.getsockopt_string(zmq.LAST_ENDPOINT), a_pair(), public)
    await eventually(lambda: machine.told)
    assert not socket.poll(0)
    machine.network.close()
    socket.close(0)
    context.term()


def test_a_library_without_curve_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve.zmq, "has", lambda capability: False)
    with pytest.raises(ConfigurationError, match="was built without CURVE, so it cannot use keys; install pyzmq's own"):
        curve.require_curve()


def test_secret_keys_are_not_shown() -> None:
    public, secret = a_pair()
    assert secret not in repr(ServerKeys(public, secret, lambda key: True))
    assert secret not in repr(ClientKeys("tcp://here:1", public, secret, public))


async def test_connections_that_only_end_are_told_once_three_of_them_have_come_in_a_row() -> None:
    told: list[ProtocolError] = []
    context = zmq.Context()
    with context, context.socket(zmq.DEALER) as socket:
        watch = HandshakeWatch(socket, asyncio.get_running_loop(), "tcp://there:1", None, told.append)
        counts = []
        for event in "ff+fffff":  # the coordinator may end just now, and come back
            watch._heard(zmq.EVENT_CONNECTED, 0)
            watch._heard(zmq.EVENT_HANDSHAKE_SUCCEEDED if event == "+" else zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 0)
            watch._heard(zmq.EVENT_DISCONNECTED, 0)
            counts.append(len(told))
        watch._heard(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0)  # the other side speaks otherwise
        watch.close()
    assert counts == [0, 0, 0, 0, 0, 1, 1, 1]
    assert [isinstance(error, HandshakeFailed) and error.final for error in told] == [False, True]
    said = (
        "the coordinator at tcp://there:1 breaks off the connection: most likely it wants keys (give its public key "
        "with --server-key; `fedemu keys list` shows it there)"
    )
    assert [*map(str, told)] == [f"{said}, or the network between the two is unstable", said]


@pytest.mark.parametrize(
    ("answer", "with_keys"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", True),
        (bytes(64), True),
        (bytes(64), False),
        (bytes(range(255, 0, -1)), True),
        (bytes(range(255, 0, -1)), False),
    ],
)
async def test_what_speaks_no_zeromq_is_told_apart_from_a_coordinator_that_is_away(
    answer: bytes, with_keys: bool, eventually: Eventually
) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(answer)

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    machine = Machine(address, a_pair() if with_keys else None, a_pair()[0])
    try:
        await eventually(lambda: machine.told)
        [error] = machine.told
        assert isinstance(error, HandshakeFailed)
        assert error.final, "ZeroMQ does not try again by itself"
        assert str(error).startswith(f"what answers at {address} is no coordinator; it may be a web server")
    finally:
        machine.network.close()
        server.close()
