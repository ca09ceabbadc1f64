"""Connections that take too much, over real sockets: those without an end, those that say nothing, and too many."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import select
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from fedemu.ops.stress.strangers.zmtp import MORE, dial, frame, shake_hands
from fedemu.protocol.codec import UP, encode
from fedemu.protocol.messages import Heartbeat
from fedemu.protocol.transport import connections as room
from fedemu.protocol.transport import direct_router
from fedemu.protocol.transport.direct import DirectNetwork
from fedemu.protocol.transport.interface import Bounds, Network
from fedemu.protocol.transport.zeromq import ZmqNetwork

Eventually = Callable[[Callable[[], object]], Awaitable[None]]
MIB = 2**20


class Place:
    """A Router with bounds, whose peers are all known, or all strangers. ``ended`` are the reasons of closed ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, known: bool, address: str, plain: bool, **more: Any) -> None:
        monkeypatch.setattr(room, "LOOK_SECONDS", 0.0)
        self.ended: list[str] = []
        self.closed: list[bytes] = []
        self.heard: list[bytes] = []
        self.network: Network = (
            DirectNetwork(asyncio.get_running_loop(), 0.1) if plain else ZmqNetwork(linger_seconds=0.1)
        )
        bounds = Bounds(
            **{"connections": 100, "most_strangers": lambda: 100} | more,
            knows=lambda peer: known,
            ended=self.ended.append,
            closed=self._closed,
            most_unfinished=lambda: 4 * MIB,
        )
        self.router = self.network.bind(
            address, UP, lambda peer, envelope: self._heard(peer), lambda peer, error: None, bounds=bounds
        )
        self.said: Callable[[], None] = lambda: None
        self.over: Callable[[], None] = lambda: None
        self.strangers: list[socket.socket] = []

    def _heard(self, peer: bytes) -> None:
        self.heard.append(peer)
        self.said()

    def _closed(self, peer: bytes) -> None:
        self.closed.append(peer)
        self.over()

    def stranger(self) -> socket.socket:
        made = dial(self.router.address)
        self.strangers.append(made)
        return made

    def looked(self, condition: Callable[[], object]) -> Callable[[], object]:
        """The condition, after one more look."""

        def look() -> object:
            self.router.look()
            return condition()

        return look

    def close(self) -> None:
        for stranger in self.strangers:
            stranger.close()
        self.network.close()


Make = Callable[..., Place]


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Makes Routers of ZeroMQ."""
    made: list[Place] = []

    def place(known: bool = False, address: str = "tcp://127.0.0.1:*", plain: bool = False, **more: Any) -> Place:
        made.append(Place(monkeypatch, known, address, plain, **more))
        return made[-1]

    yield place
    for each in made:
        each.close()


@pytest.fixture(params=["zeromq", "plain"])
def make_any(request: pytest.FixtureRequest, make: Make, socket_folder: Path) -> Make:
    """Makes Routers of ZeroMQ, then Routers on plain sockets."""
    if request.param == "zeromq":
        return make
    numbers = itertools.count()
    return lambda known=False, **more: make(known, f"ipc://{socket_folder}/{next(numbers)}", True, **more)


def is_over(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection. It drops what the other side has sent before."""
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def pour(connection: socket.socket, data: bytes, times: int = 1) -> None:
    """Send all of it, or as much as the other side takes before it closes the connection."""
    connection.settimeout(20)
    with contextlib.suppress(OSError):
        for _ in range(times):
            connection.sendall(data)


@pytest.mark.parametrize(("known", "parts", "ends"), [(False, 2, True), (True, 2, False), (True, 6, True)])
async def test_a_message_without_an_end_is_held_up_to_its_bound(
    make_any: Make, eventually: Eventually, known: bool, parts: int, ends: bool
) -> None:
    place = make_any(known)
    stranger = place.stranger()
    await asyncio.to_thread(shake_hands, stranger)
    pour(stranger, frame(Heartbeat().type.encode()))
    await eventually(lambda: place.router.bytes_received)
    place.router.look()
    for _ in range(parts):
        await asyncio.to_thread(pour, stranger, frame(bytes(MIB), MORE))
    if ends:
        await eventually(place.looked(lambda: place.ended))
        await eventually(lambda: is_over(stranger))
        assert place.ended == ["unfinished"]
    else:
        for _ in range(5):
            place.router.look()
        assert place.ended == []
        assert not is_over(stranger)


async def test_a_peer_is_sending_while_more_and_more_of_a_long_message_comes(
    make: Callable[..., Any], eventually: Eventually
) -> None:
    place = make(known=True)
    friend = place.stranger()
    await asyncio.to_thread(shake_hands, friend)
    pour(friend, frame(b"x"))
    await eventually(lambda: place.router.bytes_received)
    (peer,) = place.router._connections.peers
    for _ in range(2):
        place.router.look()
    assert not place.router.is_sending(peer)
    pour(friend, frame(bytes(MIB // 2), MORE))
    await eventually(place.looked(lambda: place.router.is_sending(peer)))
    await eventually(place.looked(lambda: not place.router.is_sending(peer)))
    pour(friend, frame(bytes(MIB // 2)))
    await eventually(place.looked(lambda: place.router.bytes_received > MIB))
    place.router.look()
    assert not place.router.is_sending(peer)
    assert not place.router.is_sending(b"nobody")


async def test_a_message_without_an_end_before_any_other_is_ended_too(make_any: Make, eventually: Eventually) -> None:
    place = make_any()
    stranger = place.stranger()
    await asyncio.to_thread(shake_hands, stranger)
    await asyncio.to_thread(pour, stranger, frame(bytes(2 * MIB), MORE))
    await eventually(place.looked(lambda: place.ended == ["unfinished"]))
    await eventually(lambda: is_over(stranger))


@pytest.mark.parametrize("greets", [False, True])
async def test_a_message_without_an_end_is_noticed_between_two_looks_by_the_memory_that_it_takes(
    make: Make, eventually: Eventually, greets: bool
) -> None:
    place = make()
    stranger = place.stranger()
    await asyncio.to_thread(shake_hands, stranger)
    if greets:
        pour(stranger, frame(Heartbeat().type.encode()))
        await eventually(lambda: place.router.bytes_received)
    before = psutil.Process().memory_info().rss
    pouring = asyncio.create_task(asyncio.to_thread(pour, stranger, frame(bytes(MIB), MORE), 1024))
    await eventually(lambda: place.ended)
    # The kernel may let a sender wait for the window of a socket that the other side has closed without reading all.
    with contextlib.suppress(OSError):
        stranger.shutdown(socket.SHUT_WR)
    await pouring
    assert place.ended == ["unfinished"]
    assert psutil.Process().memory_info().rss < before + 512 * MIB
    await eventually(lambda: is_over(stranger))


@pytest.mark.parametrize("known", [False, True])
async def test_a_message_without_an_end_at_an_ipc_address_is_noticed_by_the_memory_that_it_takes(
    make: Make, eventually: Eventually, known: bool, socket_path: Any
) -> None:
    place = make(known, address=f"ipc://{socket_path}")
    friend, stranger = place.stranger(), place.stranger()
    for each in (friend, stranger):
        await asyncio.to_thread(shake_hands, each)
        pour(each, frame(b"x"))
    await eventually(lambda: place.router.bytes_received == 2)
    pouring = asyncio.create_task(asyncio.to_thread(pour, stranger, frame(bytes(MIB), MORE), 512))
    await eventually(place.looked(lambda: place.ended == ["unfinished"]))
    await pouring
    await eventually(lambda: is_over(stranger))
    assert not is_over(friend)


@pytest.mark.parametrize("greets", [False, True])
async def test_a_stranger_that_says_nothing_is_parted_from_and_a_peer_that_is_known_is_not(
    make_any: Make, eventually: Eventually, greets: bool
) -> None:
    place = make_any(idle_seconds=0.0)
    stranger = place.stranger()
    if greets:
        await asyncio.to_thread(shake_hands, stranger)
        pour(stranger, frame(b"x"))
        await eventually(lambda: place.router.bytes_received)
    await eventually(place.looked(lambda: place.ended == ["idle"]))
    await eventually(lambda: is_over(stranger))
    await eventually(place.looked(lambda: len(place.closed) == greets))
    friendly = make_any(known=True, idle_seconds=0.0)
    friend = friendly.stranger()
    await asyncio.to_thread(shake_hands, friend)
    pour(friend, frame(b"x"))
    await eventually(lambda: friendly.router.bytes_received)
    friendly.router.look()
    assert friendly.ended == []
    silent = friendly.stranger()
    await eventually(friendly.looked(lambda: friendly.ended == ["idle"]))
    await eventually(lambda: is_over(silent))
    assert not is_over(friend)


@pytest.mark.parametrize("known", [False, True])
async def test_many_messages_that_end_are_no_message_without_an_end(
    make_any: Make, eventually: Eventually, known: bool
) -> None:
    place = make_any(known)
    size = MIB if known else MIB // 4  # of which a sixth is beyond the bound
    peer = place.stranger()
    await asyncio.to_thread(shake_hands, peer)
    for count in range(1, 7):
        await asyncio.to_thread(pour, peer, frame(bytes(size)))
        await eventually(lambda count=count: place.router.bytes_received == count * size)  # type: ignore[misc]
        for _ in range(2):
            place.router.look()
    assert place.ended == []
    assert not is_over(peer)


@pytest.mark.parametrize("kind", ["tcp", "ipc", "plain"])
async def test_the_oldest_silent_connections_are_closed_at_once_when_there_are_too_many(
    make: Make, eventually: Eventually, kind: str, socket_path: Any
) -> None:
    address = "tcp://127.0.0.1:*" if kind == "tcp" else f"ipc://{socket_path}"
    place = make(address=address, plain=kind == "plain", connections=3)
    strangers = [place.stranger() for _ in range(5)]
    await eventually(lambda: len(place.ended) == 2)
    await eventually(lambda: sum(map(is_over, strangers)) == 2)
    assert set(place.ended) == {"connections"}
    assert [is_over(stranger) for stranger in strangers] == [True, True, False, False, False]
    place.router.look()
    strangers += [place.stranger() for _ in range(2)]
    await eventually(lambda: len(place.ended) == 4)
    await eventually(lambda: [is_over(stranger) for stranger in strangers] == [True] * 4 + [False] * 3)


@pytest.mark.parametrize("speak", [False, True])
async def test_the_strangers_that_were_silent_longest_go_when_there_are_too_many(
    make_any: Make, eventually: Eventually, speak: bool
) -> None:
    place = make_any(most_strangers=lambda: 1)
    first = place.stranger()
    await asyncio.to_thread(shake_hands, first)
    second = place.stranger()
    silent, other = first, second
    if speak:
        await asyncio.to_thread(shake_hands, second)
        for count, each in enumerate((second, first), 1):
            pour(each, frame(b"x"))
            await eventually(lambda count=count: place.router.bytes_received == count)  # type: ignore[misc]
        silent, other = second, first
    await eventually(place.looked(lambda: place.ended == ["connections"]))
    await eventually(lambda: is_over(silent))
    assert not is_over(other)


async def test_a_stranger_has_less_time_for_its_handshake_than_for_its_silence(
    make: Make, eventually: Eventually, socket_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_router, "_HANDSHAKE_SECONDS", 0.0)
    place = make(address=f"ipc://{socket_path}", plain=True)
    slow, quick = place.stranger(), place.stranger()
    await asyncio.to_thread(shake_hands, quick)
    pour(quick, frame(b"x"))
    await eventually(lambda: place.router.bytes_received)
    await eventually(place.looked(lambda: place.ended == ["idle"]))
    assert [is_over(slow), is_over(quick)] == [True, False]


async def test_a_peer_is_cut_and_its_end_is_told(make_any: Make, eventually: Eventually) -> None:
    place = make_any(known=True)
    device = ZmqNetwork(linger_seconds=0.1)
    dealer = device.connect(place.router.address, UP, print, print)
    dealer.send(Heartbeat())
    await eventually(lambda: place.heard)
    place.router.cut(place.heard[0])
    await eventually(place.looked(lambda: place.closed == [place.heard[0]]))
    dealer.send(Heartbeat())
    await eventually(lambda: len(place.heard) == 2)
    assert place.heard[1] != place.heard[0], "an honest device comes back on a new connection"
    device.close()


async def test_a_router_on_plain_sockets_hands_on_nothing_more_of_a_peer_that_is_cut(
    make: Make, eventually: Eventually, socket_path: Any
) -> None:
    place = make(known=True, address=f"ipc://{socket_path}", plain=True)
    peer, _ = await first_word(place, eventually)
    place.said = lambda: place.router.cut(place.heard[0])
    pour(peer, frame(encode(Heartbeat())[0]) * 2000)
    await eventually(lambda: is_over(peer))
    await eventually(lambda: place.closed)
    assert len(place.heard) == 2, "the rest came in the same read as the message for which it was cut"


async def test_the_end_of_every_peer_is_told_also_if_its_message_is_read_later(
    make: Make, eventually: Eventually
) -> None:
    place = make()
    for turn in range(20):
        device = ZmqNetwork(linger_seconds=5.0)
        device.connect(place.router.address, UP, print, print).send(Heartbeat())
        device.close()  # once it is sent
        if turn % 3 == 0:
            await asyncio.sleep(0.01)
    await eventually(lambda: len(place.heard) == 20)
    await eventually(place.looked(lambda: set(place.closed) == set(place.heard)))


class Frame:
    """A frame of a message that came on the socket with this descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def get(self, name: str) -> int:
        return self._descriptor


Counted = tuple[room.Connections, list[bytes]]


@pytest.fixture
async def counted() -> AsyncIterator[Counted]:
    """The connections of a Router to which nobody connects, and the peers whose ends were told."""
    closed: list[bytes] = []
    bounds = Bounds(
        connections=9, most_strangers=lambda: 9, knows=lambda peer: False, ended=lambda reason: None,
        closed=closed.append, most_unfinished=lambda: MIB,
    )  # fmt: skip
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind("tcp://127.0.0.1:*")
        connections = room.Connections(router, asyncio.get_running_loop(), bounds, None)
        yield connections, closed
        connections.close()


async def test_a_late_message_of_a_connection_that_has_gone_is_not_taken_for_one_of_its_successor(
    counted: Counted,
) -> None:
    connections, closed = counted
    gone, new = b"\0gone", b"\0new "
    first = socket.socket()
    place = first.fileno()
    assert connections.heard(gone, Frame(place))  # type: ignore[arg-type]
    first.close()
    assert not connections.heard(b"\0else", Frame(place))  # type: ignore[arg-type]
    with socket.socket() as second:
        assert second.fileno() == place
        assert connections.heard(new, Frame(place))  # type: ignore[arg-type]
        assert not connections.heard(gone, Frame(place))  # type: ignore[arg-type]
        connections.drained()
        assert (connections.peers, closed) == ([new], [gone])


async def test_a_first_message_that_came_late_does_not_take_the_connection_of_its_successor(counted: Counted) -> None:
    connections, closed = counted
    with socket.socket() as second:
        assert connections.heard(b"\0gone", Frame(second.fileno()))  # type: ignore[arg-type]
        assert connections.heard(b"\0new ", Frame(second.fileno()))  # type: ignore[arg-type]
        assert (connections.peers, closed) == ([b"\0new "], [b"\0gone"])


async def test_in_a_flood_that_is_never_read_to_its_end_the_ends_of_peers_are_told_all_the_same(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections, closed = counted
    monkeypatch.setattr(room, "PAST", 3)
    names = [b"\0%d" % number for number in range(6)]
    for name in names:
        with socket.socket() as connection:
            assert connections.heard(name, Frame(connection.fileno()))  # type: ignore[arg-type]
    assert closed == names[:4], "the fifth waits, and the sixth is not known to have gone"
    assert connections.parting


async def test_the_end_of_a_peer_is_noticed_also_if_zeromq_does_not_tell_it(
    make: Make, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = room.Connections._event
    monkeypatch.setattr(
        room.Connections,
        "_event",
        lambda self, event, value: event == zmq.EVENT_DISCONNECTED or told(self, event, value),
    )
    place = make(known=True)
    device = ZmqNetwork(linger_seconds=5.0)
    device.connect(place.router.address, UP, print, print).send(Heartbeat())
    await eventually(lambda: place.heard)
    device.close()
    await eventually(place.looked(lambda: place.closed == place.heard))


async def first_word(place: Place, eventually: Eventually) -> tuple[socket.socket, list[str]]:
    """A peer that has said one message, and a list of what the router tells of it: messages, and the end."""
    told: list[str] = []
    place.said = lambda: told.append("message")
    place.over = lambda: told.append("end")
    peer = place.stranger()
    await asyncio.to_thread(shake_hands, peer)
    # The router's READY. A socket that is closed before it has read all drops what it has not sent yet.
    await asyncio.to_thread(peer.recv, 4096)
    pour(peer, frame(encode(Heartbeat())[0]))
    await eventually(lambda: place.heard)
    return peer, told


async def test_a_router_of_zeromq_hands_on_the_last_words_of_a_peer_before_it_tells_its_end(
    make: Make, eventually: Eventually
) -> None:
    place = make(known=True)
    peer, told = await first_word(place, eventually)
    [connection] = place.router._connections._open.values()  # type: ignore[attr-defined]
    pour(peer, frame(encode(Heartbeat())[0]) * 200)
    peer.close()
    # Nothing is read until ZeroMQ has closed its side of the connection.
    until = time.monotonic() + 20
    while room._inode(connection.descriptor) == connection.inode and time.monotonic() < until:
        pass
    place.router.look()
    assert told == ["message"]
    await eventually(lambda: place.closed)
    assert told == ["message"] * 201 + ["end"]


async def test_a_message_that_comes_while_the_end_of_a_peer_is_told_does_not_wait_for_the_next_one(
    make: Make, eventually: Eventually
) -> None:
    place = make(known=True)
    leaving, _ = await first_word(place, eventually)
    staying, _ = await first_word(place, eventually)
    await eventually(lambda: len(place.heard) == 2)

    def over() -> None:
        pour(staying, frame(encode(Heartbeat())[0]))
        select.select([place.router._descriptor], [], [], 20)  # type: ignore[attr-defined]
        place.router.send(place.heard[1], Heartbeat())  # this takes notice of the message, which the loop then does not

    place.over = over
    leaving.close()
    await eventually(place.looked(lambda: place.closed))
    await eventually(lambda: len(place.heard) == 3)


async def test_a_peer_that_goes_while_the_queue_to_it_is_full_is_forgotten(make: Make, eventually: Eventually) -> None:
    place = make(known=True, queue=1)
    peer, _ = await first_word(place, eventually)
    router, large = place.router, [bytes(MIB)]
    while router.send(place.heard[0], Heartbeat(), large):
        pass
    assert router._full == {place.heard[0]}  # type: ignore[attr-defined]
    peer.close()
    await eventually(place.looked(lambda: place.closed))
    router.look()
    assert router._full == set()  # type: ignore[attr-defined]


async def test_a_router_on_plain_sockets_hands_on_the_last_words_of_a_peer_before_it_tells_its_end(
    make: Make, eventually: Eventually, socket_path: Any
) -> None:
    place = make(known=True, address=f"ipc://{socket_path}", plain=True)
    peer, told = await first_word(place, eventually)
    pour(peer, frame(encode(Heartbeat())[0]) * 2000)
    peer.close()
    assert not place.router.send(b"nobody", Heartbeat())
    place.router.send(place.heard[0], Heartbeat())  # this finds that nobody reads any more
    await eventually(lambda: place.closed)
    assert told == ["message"] * 2001 + ["end"]


async def test_a_router_on_plain_sockets_takes_no_memory_for_the_size_that_a_stranger_says(
    make: Make, socket_path: Any
) -> None:
    place = make(address=f"ipc://{socket_path}", plain=True)
    strangers = [place.stranger() for _ in range(8)]
    before = psutil.Process().memory_info().rss
    for stranger in strangers:
        await asyncio.to_thread(shake_hands, stranger)
        pour(stranger, b"\x02" + (200 * MIB).to_bytes(8, "big") + b"the first bytes of much more")
    await asyncio.sleep(0.2)
    assert not any(map(is_over, strangers))
    assert psutil.Process().memory_info().rss < before + 50 * MIB
