"""What only real sockets have: bytes of strangers, full queues, addresses, and the loop."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import logging
import os
import resource
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from fedemu.protocol.codec import DOWN, UP, Decoder, Limits, encode
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.lookup import Lookups
from fedemu.protocol.messages import Beat, Blob, Bye, Heartbeat, Hello, Result, TensorSpec, Up
from fedemu.protocol.transport import direct, direct_router
from fedemu.protocol.transport.direct import DirectNetwork
from fedemu.protocol.transport.direct_router import DirectRouter
from fedemu.protocol.transport.zeromq import ZmqNetwork
from fedemu.protocol.transport.zmtp import GREETING, framed, ready


@pytest.fixture
def notes(socket_path: Path) -> Iterator[Path]:
    """A file that somebody wants to keep."""
    socket_path.write_text("precious")
    yield socket_path
    assert socket_path.read_text() == "precious"


async def test_garbage_is_rejected_by_reason_and_harms_nobody(sockets: Any, eventually: Any, context: Any) -> None:
    coordinator = sockets.listen()
    honest = sockets.join(coordinator.router.address)
    stranger = context.socket(zmq.DEALER)
    stranger.connect(coordinator.router.address)
    for garbage in ([b""], [b"\xc1" * 50], [b"\x81\xa1v\x09"], [b""] * 9000, [*encode(Heartbeat()), b"more"]):
        stranger.send_multipart(garbage)
    await eventually(lambda: len(coordinator.rejected) == 5)
    assert [error.reason for error in coordinator.rejected] == ["encoding", "encoding", "version", "frames", "frames"]
    assert len(set(coordinator.refused_peers)) == 1
    honest.dealer.send(Heartbeat())
    await eventually(lambda: coordinator.messages)
    assert coordinator.peers[0] not in coordinator.refused_peers


async def test_bytes_that_are_not_zeromq_harm_nobody(tcp: Any, eventually: Any) -> None:
    coordinator = tcp.listen()
    port = int(coordinator.router.address.rpartition(":")[2])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    for stranger, garbage in zip(strangers, (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 64), strict=True):
        stranger.sendall(garbage)
    device = tcp.join(coordinator.router.address)
    device.dealer.send(Heartbeat())
    await eventually(lambda: coordinator.messages)
    for stranger in strangers:
        stranger.close()


async def test_a_frame_beyond_the_limit_never_takes_memory(sockets: Any, eventually: Any) -> None:
    limits = Limits(header_bytes=1000, frame_bytes=1000)
    coordinator = sockets.listen(decoder=Decoder(Up, limits))
    device = sockets.join(coordinator.router.address)
    device.dealer.send(Heartbeat(), [bytes(1001)])
    await eventually(lambda: device.dealer.send(Heartbeat()) and coordinator.messages)
    assert coordinator.router.bytes_received < 1000 * len(coordinator.messages)
    assert coordinator.rejected == []


async def test_a_peer_that_reads_nothing_fills_its_own_queue_only(
    sockets: Any, eventually: Any, context: Any, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = sockets.listen()
    deaf = context.socket(zmq.DEALER)
    deaf.rcvhwm = 1
    deaf.connect(coordinator.router.address)
    deaf.send(encode(Hello(device=1, incarnation=0, lease=""))[0])
    device = sockets.join(coordinator.router.address)
    device.dealer.send(Hello(device=2, incarnation=0, lease=""))
    await eventually(lambda: len(coordinator.messages) == 2)
    peers = {message.device: peer for message, peer in zip(coordinator.messages, coordinator.peers, strict=True)}
    chunk = bytes(100_000)
    filled = 0

    async def fill(again: bool = False) -> None:
        nonlocal filled
        quiet = 0
        while quiet < 20:  # The system takes some more each time, until its own buffers are full.
            sent = 0
            blob = Blob(digest="a" * 64, offset=0, size=100_000)
            while coordinator.router.send(peers[1], blob, [chunk], again=again):
                sent += 1
                assert sent < 5000
            filled += sent > 0
            quiet = 0 if sent else quiet + 1
            await asyncio.sleep(0.01)

    with caplog.at_level(logging.WARNING):
        await fill(again=True)
        assert not caplog.records, "of what is sent again the log does not tell"
        filled = 1
        for _ in range(5):
            assert not coordinator.router.send(peers[1], Beat())
        while await asyncio.to_thread(deaf.poll, 200):  # it reads everything, and is told of when it is full again
            deaf.recv_multipart()
        before = filled
        await fill()
        assert filled > before
    assert [record.message for record in caplog.records] == [
        f"the queue to peer {peers[1].hex()} is full; its messages are dropped"
    ] * filled
    assert coordinator.router.send(peers[2], Beat())
    await eventually(lambda: device.messages)


async def test_questions_of_a_peer_that_reads_nothing_are_not_all_answered(socket_path: Path) -> None:
    network = DirectNetwork(asyncio.get_running_loop())
    router = network.bind(f"ipc://{socket_path}", UP, lambda peer, envelope: None, lambda peer, error: None)
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(str(socket_path))
    pings = b"\x04\x07\x04PING\x00\x00" * 400_000

    def read_all() -> int:
        read = 0
        stranger.settimeout(0.5)
        with suppress(TimeoutError):
            while data := stranger.recv(2**16):
                read += len(data)
        stranger.settimeout(None)
        return read

    await asyncio.wait_for(asyncio.to_thread(stranger.sendall, GREETING + ready(b"DEALER") + pings), 60)
    assert 0 < await asyncio.to_thread(read_all) < len(pings) / 4
    await asyncio.to_thread(stranger.sendall, b"\x04\x07\x04PING\x00\x00")
    assert await asyncio.to_thread(read_all) == len(b"\x04\x05\x04PONG"), "one that reads is answered"
    stranger.close()
    router.close()
    network.close()


async def test_a_peer_that_reads_no_more_is_heard_until_its_end_and_not_written_to(
    eventually: Any, socket_path: Path
) -> None:
    network = DirectNetwork(asyncio.get_running_loop())
    heard: list[bytes] = []
    router = network.bind(f"ipc://{socket_path}", UP, lambda peer, envelope: heard.append(peer), print)
    heartbeat = b"".join(framed(encode(Heartbeat())))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(socket_path))
        stranger.sendall(GREETING + ready(b"DEALER") + heartbeat)
        await eventually(lambda: heard)
        stranger.shutdown(socket.SHUT_RD)
        router.send(heard[0], Beat())
        assert [events for _, events, _ in router.wants()] == [select.POLLIN], "nothing is to be written"
        stranger.sendall(heartbeat)
        await eventually(lambda: len(heard) == 2)
    await eventually(lambda: not router.wants())
    network.close()


async def test_a_callback_that_raises_is_reported_and_the_next_message_still_comes(
    sockets: Any, eventually: Any
) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    coordinator = sockets.listen()

    def fail_first(message: object, peer: bytes) -> None:
        if len(coordinator.messages) == 1:
            raise RuntimeError("a mistake")

    coordinator.react = fail_first
    device = sockets.join(coordinator.router.address)
    for _ in range(3):
        device.dealer.send(Heartbeat())
    await eventually(lambda: len(coordinator.messages) == 3)
    assert [str(context["exception"]) for context in reported] == ["a mistake"]


async def test_a_flood_leaves_the_loop_its_turns(sockets: Any, eventually: Any) -> None:
    coordinator = sockets.listen()
    device = sockets.join(coordinator.router.address)
    loop = asyncio.get_running_loop()
    turns: list[int] = []

    def turn() -> None:
        turns.append(len(coordinator.messages))
        for _ in range(1000):
            device.dealer.send(Heartbeat())
        if len(coordinator.messages) < 6000:
            loop.call_soon(turn)

    loop.call_soon(turn)
    await eventually(lambda: len(coordinator.messages) >= 6000)
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 1024


async def test_slow_messages_leave_the_loop_its_turns(sockets: Any, eventually: Any) -> None:
    coordinator = sockets.listen()
    device = sockets.join(coordinator.router.address)
    coordinator.react = lambda message, peer: time.sleep(0.002)
    loop = asyncio.get_running_loop()
    turns: list[int] = []

    def turn() -> None:
        turns.append(len(coordinator.messages))
        if len(coordinator.messages) < 100:
            loop.call_soon(turn)

    for _ in range(100):
        device.dealer.send(Heartbeat())
    loop.call_soon(turn)
    await eventually(lambda: len(coordinator.messages) == 100)
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 8


async def test_many_busy_peers_together_leave_the_loop_its_turns(sockets: Any, eventually: Any) -> None:
    coordinator = sockets.listen()
    devices = [sockets.join(coordinator.router.address) for _ in range(20)]
    for device in devices:
        device.dealer.send(Heartbeat())
    await eventually(lambda: len(coordinator.messages) == 20)
    loop = asyncio.get_running_loop()
    turns: list[int] = []

    def turn() -> None:
        turns.append(len(coordinator.messages))
        if len(coordinator.messages) < 220:
            loop.call_soon(turn)

    coordinator.react = lambda message, peer: time.sleep(0.002)
    for device in devices:
        for _ in range(10):
            device.dealer.send(Heartbeat())
    loop.call_soon(turn)
    await eventually(lambda: len(coordinator.messages) == 220)
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 16
    assert len(set(coordinator.peers[20:140])) == 20, "each has had its turn before anyone has a third"


async def test_messages_that_arrive_while_others_wait_get_no_second_turn(tcp: Any, eventually: Any) -> None:
    coordinator = tcp.listen()
    busy, *others = (tcp.join(coordinator.router.address) for _ in range(40))
    for device in (busy, *others):
        device.dealer.send(Heartbeat())
    await eventually(lambda: len(coordinator.messages) == 40)
    loop = asyncio.get_running_loop()
    turns: list[int] = []

    def react(message: object, peer: bytes) -> None:
        if others and len(turns) > 1:
            others.pop().dealer.send(Heartbeat())
        time.sleep(0.002)

    def turn() -> None:
        turns.append(len(coordinator.messages))
        if len(coordinator.messages) < 179:
            loop.call_soon(turn)

    coordinator.react = react
    for _ in range(100):
        busy.dealer.send(Heartbeat())
    loop.call_soon(turn)
    await eventually(lambda: len(coordinator.messages) == 179)
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 8


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("tcp://127.0.0.1:99999", r"with a port from 0 \(or \*, for any free one\) to 65535"),
        ("tcp://:5577", r"is not of the form"),
        ("tcp://127.0.0.1", r"not of the form tcp://HOST:PORT"),
        ("tcp://192.0.2.1:5577", r"no network interface of this machine has that address"),
        ("tcp://no-such-interface:5577", r"no network interface of this machine has that address"),
        ("5577", r"the address '5577' is not of the form"),
        ("tcp://", r"is not of the form"),
        ("tcp://a\nb:1", r"is not of the form"),
        ("udp://127.0.0.1:5577", r"starts with udp://; only tcp:// and ipc:// are supported"),
        ("ipc:///nowhere/at/all/s", r"its folder does not exist"),
        ("ipc:///tmp/" + "x" * 200, r"the path is longer than 107 bytes"),
    ],
)
async def test_a_bad_address_is_refused_in_one_sentence(tcp: Any, address: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        tcp.listen(address)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:*", "tcp://127.0.0.1:0", "tcp://*:5577", "tcp://:", "nonsense", "inproc://x"]
)
async def test_nobody_connects_to_what_cannot_be_an_address(tcp: Any, address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"not of the form|only tcp"):
        tcp.join(address)
    network = ZmqNetwork(watched=True)
    with pytest.raises(ConfigurationError, match=r"not of the form|only tcp"):
        network.connect(address, DOWN, print, print)
    network.close()  # a socket that was left would stop it


async def test_the_path_of_another_process_is_not_taken_away(sockets: Any, socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(socket_path))
        other.listen()
        with pytest.raises(ConfigurationError, match="in use by another process"):
            sockets.listen(f"ipc://{socket_path}")
    assert sockets.listen(f"ipc://{socket_path}").router.address == f"ipc://{socket_path}"


async def test_a_file_is_not_replaced_by_a_socket(sockets: Any, notes: Path) -> None:
    with pytest.raises(ConfigurationError, match="a file that is no socket"):
        sockets.listen(f"ipc://{notes}")


async def test_a_closed_ipc_router_leaves_no_file(sockets: Any, socket_path: Path) -> None:
    router = sockets.listen(f"ipc://{socket_path}").router
    assert os.listdir(socket_path.parent) == ["s"]
    router.close()
    assert os.listdir(socket_path.parent) == []


async def test_a_router_whose_file_was_removed_says_that_nobody_can_connect_any_more(
    sockets: Any, socket_path: Path
) -> None:
    router = sockets.listen(f"ipc://{socket_path}").router
    router.look()
    os.unlink(socket_path)
    with pytest.raises(FedemuError, match="s was removed, so no process can connect there any more"):
        router.look()
    router.close()
    router.look()


async def test_plain_sockets_listen_within_a_machine_alone_and_find_a_free_name(eventually: Any) -> None:
    network = DirectNetwork(asyncio.get_running_loop())
    with pytest.raises(ConfigurationError, match="it is not of the form ipc://PATH"):
        network.bind("tcp://127.0.0.1:0", UP, print, print)
    heard: list[bytes] = []
    routers = [network.bind("ipc://*", UP, lambda peer, envelope: heard.append(peer), print) for _ in range(2)]
    assert routers[0].address != routers[1].address
    network.connect(routers[1].address, DOWN, print, print).send(Heartbeat())
    await eventually(lambda: heard)
    network.close()


async def test_a_name_with_addresses_of_both_kinds_leads_to_the_one_where_the_coordinator_listens(
    tcp: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: Any, port: int, family: int = 0, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))
        four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
        return [found for found in (six, four) if family in (0, found[0])]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    coordinator = tcp.listen()
    tcp.dialer = DirectNetwork(asyncio.get_running_loop())
    device = tcp.join(coordinator.router.address.replace("127.0.0.1", "localhost"))
    device.dealer.send(Heartbeat())
    await eventually(lambda: coordinator.messages)
    tcp.dialer.close()


class NameServer:
    """Knows one name, and says so when it is told to. ``threads`` are those in which it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[int] = []
        self.answer = threading.Event()
        self._resolve = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._asked)

    def _asked(self, host: Any, *more: Any, **named: Any) -> Any:
        self.threads.append(threading.get_ident())
        self.answer.wait(2)
        if host != b"coordinator.example":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return self._resolve("127.0.0.1", *more, **named)


async def test_a_name_server_that_does_not_answer_stops_no_loop_and_is_asked_once(
    tcp: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = NameServer(monkeypatch)
    coordinator = tcp.listen()
    tcp.dialer = DirectNetwork(asyncio.get_running_loop())
    address = coordinator.router.address.replace("127.0.0.1", "coordinator.example")
    for _ in range(3):
        tcp.join(address).dealer.send(Heartbeat())
    await eventually(lambda: server.threads)
    assert threading.get_ident() not in server.threads
    server.answer.set()
    await eventually(lambda: len(coordinator.messages) == 3)
    assert len(server.threads) == 1
    tcp.dialer.close()


async def test_a_name_is_sought_again_until_it_is_known(
    tcp: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = NameServer(monkeypatch)
    server.answer.set()
    tcp.dialer = DirectNetwork(asyncio.get_running_loop())
    tcp.join("tcp://nobody.example:5577").dealer.send(Heartbeat())
    await eventually(lambda: len(server.threads) == 2)
    tcp.dialer.close()


async def test_closing_waits_for_a_name_and_says_what_was_to_be_said(
    tcp: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = NameServer(monkeypatch)
    coordinator = tcp.listen()
    tcp.dialer = DirectNetwork(asyncio.get_running_loop(), linger_seconds=20)
    device = tcp.join(coordinator.router.address.replace("127.0.0.1", "coordinator.example"))
    device.dealer.send(Heartbeat())
    await eventually(lambda: server.threads)
    threading.Timer(0.05, server.answer.set).start()
    tcp.dialer.close()
    await eventually(lambda: coordinator.messages)


async def test_closing_does_not_wait_for_a_name_longer_than_it_lingers(
    tcp: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = NameServer(monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    tcp.dialer = DirectNetwork(asyncio.get_running_loop(), linger_seconds=0.1)
    tcp.join("tcp://coordinator.example:5577").dealer.send(Heartbeat())
    await eventually(lambda: server.threads)
    tcp.dialer.close()
    assert not server.answer.is_set()
    server.answer.set()
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


async def test_a_closed_connection_ends_as_soon_as_its_last_words_are_sent(tcp: Any, eventually: Any) -> None:
    coordinator = tcp.listen()
    tcp.dialer = DirectNetwork(asyncio.get_running_loop(), linger_seconds=60)
    device = tcp.join(coordinator.router.address)
    device.dealer.send(Heartbeat())
    await eventually(lambda: coordinator.messages)
    size = 20_000_000  # more than the kernel takes at once
    last = Result(
        ask="1.0.0",
        examples=1,
        steps=1,
        metrics={},
        tensors=(TensorSpec(name="x", dtype="uint8", shape=(size,)),),
    )
    device.dealer.send(last, [bytes(size)])
    device.dealer.close()
    await eventually(lambda: coordinator.messages == [Heartbeat(), last])
    await eventually(lambda: not coordinator.router.send(coordinator.peers[0], Beat()))


async def test_a_connection_that_has_come_about_is_not_ended_by_the_time_for_its_handshake(
    eventually: Any, socket_path: Path
) -> None:
    loop, timers, answers = asyncio.get_running_loop(), [], []

    class Noting:
        def __getattr__(self, name: str) -> Any:
            return getattr(loop, name)

        def call_later(self, delay: float, callback: Any, *arguments: Any) -> asyncio.TimerHandle:
            timers.append(loop.call_later(delay, callback, *arguments))
            return timers[-1]

    network, own = DirectNetwork(loop), DirectNetwork(Noting())
    router = network.bind(f"ipc://{socket_path}", UP, lambda peer, envelope: router.send(peer, Beat()), print)
    own.connect(router.address, DOWN, answers.append, print).send(Heartbeat())
    await eventually(lambda: answers)
    assert [timer.cancelled() for timer in timers] == [True]
    own.close()
    network.close()


@pytest.mark.parametrize("said", [b"", GREETING], ids=["nothing", "a greeting"])
async def test_a_peer_that_does_not_end_its_handshake_is_left_and_tried_again(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(direct, "_HANDSHAKE_SECONDS", 0.05)
    network = DirectNetwork(asyncio.get_running_loop())
    with socket.socket(socket.AF_UNIX) as mute, ExitStack() as connections:
        mute.bind(str(socket_path))
        mute.listen()
        mute.settimeout(60)
        network.connect(f"ipc://{socket_path}", DOWN, print, print)
        for _ in range(2):
            connection, _ = await asyncio.to_thread(mute.accept)
            connections.enter_context(connection).sendall(said)
    network.close()


async def test_closing_a_connection_that_the_other_side_has_reset_does_no_harm(eventually: Any) -> None:
    network = DirectNetwork(asyncio.get_running_loop(), linger_seconds=0.1)
    with socket.create_server(("127.0.0.1", 0)) as door:
        dealer = network.connect(f"tcp://127.0.0.1:{door.getsockname()[1]}", DOWN, print, print)
        dealer.send(Heartbeat())
        connection, _ = await asyncio.to_thread(door.accept)
        connection.sendall(GREETING + ready(b"ROUTER"))
        heartbeat = b"".join(framed(encode(Heartbeat())))
        said = b""
        while not said.endswith(heartbeat):
            said += await asyncio.to_thread(connection.recv, 4096)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    dealer.close()
    await eventually(lambda: not dealer.wants())


async def test_a_farewell_while_nobody_listens_is_heard_if_somebody_soon_does(
    sockets: Any, eventually: Any, socket_path: Path
) -> None:
    address = f"ipc://{socket_path}"
    device = sockets.join(address)
    await asyncio.sleep(0.25)  # it waits for its next attempt to connect
    device.dealer.send(Bye(reason="leave"))
    device.dealer.close()
    coordinator = sockets.listen(address)
    await eventually(lambda: coordinator.messages)
    assert coordinator.messages == [Bye(reason="leave")]


async def test_a_farewell_to_nobody_is_given_up_when_the_linger_is_over(eventually: Any, socket_path: Path) -> None:
    network = DirectNetwork(asyncio.get_running_loop(), linger_seconds=0.1)
    dealer = network.connect(f"ipc://{socket_path}", DOWN, print, print)
    dealer.send(Bye(reason="leave"))
    dealer.close()
    gone = weakref.ref(dealer)
    del dealer
    await eventually(lambda: gc.collect() >= 0 and gone() is None)
    network.close()


async def test_attempts_to_connect_come_more_and_more_rarely_until_one_succeeds(
    eventually: Any, socket_path: Path
) -> None:
    loop, waits, heard = asyncio.get_running_loop(), list[float](), list[bytes]()

    class Hurried:
        """The loop, without the waits between attempts."""

        def __getattr__(self, name: str) -> Any:
            return getattr(loop, name)

        def call_later(self, delay: float, callback: Any) -> asyncio.Handle:
            if delay > 1:
                return loop.call_later(delay, callback)
            waits.append(delay)
            return loop.call_soon(callback)

    network, own = DirectNetwork(loop), DirectNetwork(Hurried())
    own.connect(f"ipc://{socket_path}", DOWN, print, print).send(Heartbeat())
    await eventually(lambda: len(waits) >= 6)
    assert waits[:6] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    router = network.bind(f"ipc://{socket_path}", UP, lambda peer, envelope: heard.append(peer), print)
    await eventually(lambda: heard)
    waits.clear()
    router.close()
    await eventually(lambda: waits)
    assert waits[0] == 0.1
    own.close()
    network.close()


async def test_a_dealer_that_cannot_ask_for_a_name_asks_again(
    tcp: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, refused = Lookups.find, []

    def refuse_first(*arguments: Any) -> Any:
        if not refused:
            refused.append(arguments)
            raise OSError(errno.EMFILE, "Too many open files")
        return find(*arguments)

    monkeypatch.setattr(Lookups, "find", refuse_first)
    coordinator = tcp.listen()
    network = DirectNetwork(asyncio.get_running_loop())
    network.connect(coordinator.router.address, DOWN, print, print).send(Heartbeat())
    await eventually(lambda: coordinator.messages)
    assert refused
    network.close()


async def test_a_router_without_descriptors_accepts_again_when_it_has_some(
    eventually: Any, socket_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(direct_router, "_PAUSE_SECONDS", 0.05)
    network = DirectNetwork(asyncio.get_running_loop())
    heard: list[bytes] = []
    router = network.bind(f"ipc://{socket_path}", UP, lambda peer, envelope: heard.append(peer), print)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = socket.socket(socket.AF_UNIX)
    waiting.connect(str(socket_path))
    lowest_free = os.dup(waiting.fileno())
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, most))
    try:
        await eventually(lambda: caplog.records)
        turns = len(caplog.records)
        await asyncio.sleep(0.2)
        assert turns <= len(caplog.records) <= turns + 5, "it does not spin"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    network.connect(router.address, DOWN, print, print).send(Heartbeat())
    await eventually(lambda: heard)
    waiting.close()
    network.close()


async def test_a_dealer_tells_only_of_the_loss_of_a_connection_that_had_come_about(
    eventually: Any, socket_path: Path
) -> None:
    loop, lost, heard = asyncio.get_running_loop(), list[str](), list[bytes]()
    network, own = DirectNetwork(loop), DirectNetwork(loop, lost=lambda: lost.append("lost"))
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(socket_path))
        mute.listen()
        dealer = own.connect(f"ipc://{socket_path}", DOWN, print, print)
        dealer.send(Heartbeat())
        for _ in range(2):
            connection, _ = await asyncio.to_thread(mute.accept)
            connection.close()
    assert lost == [], "nobody had shaken hands"

    def listen() -> DirectRouter:
        return network.bind(f"ipc://{socket_path}", UP, lambda peer, envelope: heard.append(peer), print)

    router = listen()
    await eventually(lambda: heard)
    router.close()
    await eventually(lambda: lost)
    listen()
    dealer.send(Heartbeat())
    await eventually(lambda: len(heard) == 2)
    dealer.close()
    await eventually(lambda: not dealer.wants())
    assert lost == ["lost"], "it has closed the second connection itself"
    own.close()
    network.close()


async def test_a_dealer_that_ends_with_nothing_to_say_waits_for_no_handshake(
    eventually: Any, socket_path: Path
) -> None:
    network = DirectNetwork(asyncio.get_running_loop(), linger_seconds=60)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(socket_path))
        mute.listen()
        dealer = network.connect(f"ipc://{socket_path}", DOWN, print, print)
        await eventually(dealer.wants)
        began = time.monotonic()
        network.close()
        assert time.monotonic() < began + 30


async def test_a_router_that_ends_waits_for_no_stranger(eventually: Any, socket_path: Path) -> None:
    network = DirectNetwork(asyncio.get_running_loop(), linger_seconds=60)
    router = network.bind(f"ipc://{socket_path}", UP, print, print)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(socket_path))
        await eventually(router.wants)
        began = time.monotonic()
        network.close()
        assert time.monotonic() < began + 30
        assert not router.wants()


async def test_a_router_that_ends_waits_a_bounded_time_for_a_peer_that_reads_nothing(
    eventually: Any, socket_path: Path
) -> None:
    network = DirectNetwork(asyncio.get_running_loop(), linger_seconds=0.1)
    heard: list[bytes] = []
    router = network.bind(f"ipc://{socket_path}", UP, lambda peer, envelope: heard.append(peer), print)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(str(socket_path))
        header = bytes(encode(Heartbeat())[0])
        deaf.sendall(GREETING + ready(b"DEALER") + bytes([0, len(header)]) + header)
        await eventually(lambda: heard)
        while router.send(heard[0], Blob(digest="a" * 64, offset=0, size=100_000), [bytes(100_000)]):
            pass
        network.close()
        assert not router.wants()
        while await asyncio.to_thread(deaf.recv, 2**20):
            pass


async def test_a_closed_router_ends_as_soon_as_its_last_words_are_sent(eventually: Any, socket_path: Path) -> None:
    network = DirectNetwork(asyncio.get_running_loop(), linger_seconds=600)
    heard: list[bytes] = []
    router = network.bind(f"ipc://{socket_path}", UP, lambda peer, envelope: heard.append(peer), print)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(60)
        peer.connect(str(socket_path))
        peer.sendall(GREETING + ready(b"DEALER") + b"".join(framed(encode(Heartbeat()))))
        await eventually(lambda: heard)
        size = 20_000_000  # more than the kernel takes at once
        router.send(heard[0], Blob(digest="a" * 64, offset=0, size=size), [bytes(size)])
        router.close()
        gone = weakref.ref(router)
        del router
        read = 0
        while data := await asyncio.to_thread(peer.recv, 2**20):
            read += len(data)
        assert read > size
        await eventually(lambda: gc.collect() >= 0 and gone() is None)
    network.close()


async def test_more_sockets_than_agreed_are_refused_in_one_sentence() -> None:
    network = ZmqNetwork(max_sockets=2)
    router = network.bind("tcp://127.0.0.1:*", UP, lambda peer, envelope: None, lambda peer, error: None)
    network.connect(router.address, UP, lambda envelope: None, lambda error: None)
    with pytest.raises(ConfigurationError, match="no file descriptors or sockets left"):
        network.connect(router.address, UP, lambda envelope: None, lambda error: None)
    network.close()


async def test_a_dealer_for_whose_watch_no_socket_is_left_is_refused_with_a_sentence() -> None:
    network = ZmqNetwork(max_sockets=1, watched=True)
    with pytest.raises(ConfigurationError, match="no file descriptors or sockets left"):
        network.connect("tcp://127.0.0.1:5577", UP, lambda envelope: None, lambda error: None)
    network.close()


def test_more_sockets_than_a_process_can_hold_are_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match=r"one process holds 1 to \d+ sockets, not 1000000"):
        ZmqNetwork(max_sockets=10**6)


async def test_closing_waits_a_bounded_time_for_an_absent_coordinator() -> None:
    network = ZmqNetwork(linger_seconds=0.05)
    dealer = network.connect("tcp://127.0.0.1:9", UP, lambda envelope: None, lambda error: None)
    assert dealer.send(Heartbeat())
    start = asyncio.get_running_loop().time()
    network.close()
    assert asyncio.get_running_loop().time() - start < 5.0


async def test_connections_that_are_gone_leave_no_garbage_to_be_found(eventually: Any, socket_path: Path) -> None:
    loop = asyncio.get_running_loop()
    network = DirectNetwork(loop)
    router = network.bind(f"ipc://{socket_path}", UP, lambda peer, envelope: router.send(peer, Beat()), print)
    answers: list[object] = []

    async def live() -> None:
        told = len(answers)
        own = DirectNetwork(loop)
        own.connect(router.address, DOWN, answers.append, print).send(Heartbeat())
        await eventually(lambda: len(answers) > told)
        own.close()
        await eventually(lambda: not router.wants())

    await live()
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            await live()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [type(each).__name__ for each in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    network.close()
    assert not {"Line", "_Peer", "DirectDealer", "Incoming"} & set(left), left
