"""The relay of a campaign: it passes everything on, unless it is told to cut connections or to be silent."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest

from fedemu.ops.running.launch import free_address
from fedemu.ops.stress.campaign.relay import Relay


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(30)
        yield listening


@pytest.fixture
def relay(server: socket.socket) -> Iterator[Relay]:
    relay = Relay(free_address(), f"tcp://127.0.0.1:{server.getsockname()[1]}")
    yield relay
    relay.close()


def connect(relay: Relay, server: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(("127.0.0.1", int(relay.address.rpartition(":")[2])), timeout=30)
    far, _ = server.accept()
    far.settimeout(30)
    return near, far


def test_both_directions_pass_and_the_end_of_one_side_is_the_end_of_the_other(
    relay: Relay, server: socket.socket
) -> None:
    near, far = connect(relay, server)
    with near, far:
        near.sendall(b"up")
        assert far.recv(8) == b"up"
        far.sendall(b"down")
        far.close()
        assert near.recv(8) == b"down"
        assert near.recv(8) == b""


def test_connections_are_cut_all_or_some_and_new_ones_are_taken(relay: Relay, server: socket.socket) -> None:
    chance = random.Random(1)
    assert relay.cut(chance, all=True) == (0, 0)
    pairs = [connect(relay, server) for _ in range(3)]
    struck, there = relay.cut(chance, all=False)
    assert 1 <= struck <= there == 3
    relay.cut(chance, all=True)
    for near, far in pairs:
        with near, far:
            assert ended(near)
            assert ended(far)
    near, far = connect(relay, server)
    with near, far:
        near.sendall(b"again")
        assert far.recv(8) == b"again"


def test_silence_holds_everything_back_and_loses_nothing(relay: Relay, server: socket.socket) -> None:
    near, far = connect(relay, server)
    with near, far:
        relay.silence()
        near.sendall(b"later")
        far.settimeout(0.05)
        with pytest.raises(TimeoutError):
            far.recv(8)
        far.settimeout(30)
        relay.resume()
        assert far.recv(8) == b"later"


def test_a_network_that_is_down_ends_new_connections_at_once(relay: Relay) -> None:
    relay.shut()
    with socket.create_connection(("127.0.0.1", int(relay.address.rpartition(":")[2])), timeout=30) as near:
        assert ended(near)


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(8) == b""
    except ConnectionError:
        return True
