"""What only real sockets have: bytes of strangers, full queues, addresses, and the loop."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import itertools
import logging
import os
import re
import resource
import select
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from fedemu.ops.stress.strangers.attacks import FIRST_NAMES
from fedemu.protocol.addresses import check_address, reason
from fedemu.protocol.codec import DOWN, UP, Decoder, Limits, encode
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.messages import Beat, Blob, Heartbeat, Hello, Up
from fedemu.protocol.transport import direct_router
from fedemu.protocol.transport.direct import DirectNetwork
from fedemu.protocol.transport.zeromq import ZmqNetwork
from fedemu.protocol.transport.zmtp import GREETING, framed, ready
from fedemu.protocol.wording import is_milestone


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


async def test_nobody_foresees_how_the_next_peer_is_called(tcp: Any, eventually: Any) -> None:
    """A stranger may take any name, and ZeroMQ aborts the process if it is about to give it to another peer."""
    named = set()
    for _ in range(3):
        ctypes.CDLL(None).srand(1)  # as in a process that has just begun
        coordinator = tcp.listen()
        device = tcp.join(coordinator.router.address)
        device.dealer.send(Heartbeat())
        await eventually(lambda side=coordinator: side.peers)
        named.add(coordinator.peers[0])
    assert len(named) == 3
    assert not named & {b"\0" + first.to_bytes(4) for first in FIRST_NAMES}


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
        while await asyncio.to_thread(deaf.poll, 200):  # it reads everything, and its queue is full again later
            deaf.recv_multipart()
        before = filled
        await fill()
        assert filled > before
    assert [record.message for record in caplog.records] == [
        f"the queue to peer {peers[1].hex()} is full; its messages are dropped (full queues so far: {times})"
        for times in range(1, filled + 1)
        if is_milestone(times)
    ]
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


@pytest.mark.parametrize(
    ("address", "listens", "connects"),
    [
        ("tcp://127.0.0.1:0", True, False),
        ("tcp://127.0.0.1:*", True, False),
        ("tcp://127.0.0.1:1", True, True),
        ("tcp://[::1]:65535", True, True),
        ("tcp://*:65536", False, False),
        ("tcp://127.0.0.1:" + 5000 * "1", False, False),
        ("tcp://127.0.0.1:²", False, False),
        ("tcp://127.0.0.1:٣", False, False),
        ("tcp://:*", False, False),
        ("ipc:///" + 106 * "x", True, True),
        ("ipc:///" + 107 * "x", False, False),
        ("ipc:///" + 54 * "é", False, False),
        ("ipc://", False, False),
        ("ipc", False, False),
    ],
)
def test_an_address_is_held_against_what_it_is_for(address: str, listens: bool, connects: bool) -> None:
    for listening, fits in ((True, listens), (False, connects)):
        with nullcontext() if fits else pytest.raises(ConfigurationError, match=re.escape(repr(address))):
            check_address(address, listening)


async def test_the_path_of_another_process_is_not_taken_away(sockets: Any, socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(socket_path))
        other.listen(0)
        for _ in range(2):  # the first look leaves no room for another connection
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


async def test_a_router_without_descriptors_accepts_again_when_it_has_some(
    eventually: Any, socket_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(direct_router, "_PAUSE_SECONDS", 0.05)
    network = DirectNetwork(asyncio.get_running_loop())
    heard: list[bytes] = []
    router = network.bind(f"ipc://{socket_path}", UP, lambda peer, envelope: heard.append(peer), print)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = socket.socket(socket.AF_UNIX)
    waiting.connect(str(socket_path))
    lowest_free = os.dup(waiting.fileno())
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        await eventually(lambda: caplog.records)
        assert caplog.messages[0].endswith("the limit of open files is reached; raise it (ulimit -n)")
        turns = len(caplog.records)
        await asyncio.sleep(0.2)
        assert turns <= len(caplog.records) <= turns + 5, "it does not spin"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    network.connect(router.address, DOWN, print, print).send(Heartbeat())
    await eventually(lambda: heard)
    waiting.close()
    network.close()


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


@pytest.mark.parametrize("sockets", [0, 10**6])
def test_no_sockets_and_more_than_a_process_can_hold_are_refused_in_one_sentence(sockets: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"one process holds 1 to \d+ sockets, not {sockets}; use more"):
        ZmqNetwork(max_sockets=sockets)
    ZmqNetwork(max_sockets=1).close()


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


def test_why_an_address_cannot_be_used_is_told_in_words() -> None:
    assert reason(OSError(errno.ENOSPC, "No space left on device", "/tmp/bus")) == "the disk is full; make room there"
    assert reason(zmq.ZMQError(errno.ENODEV)) == "no network interface of this machine has that address"
    assert reason(zmq.ZMQError(errno.EIO)) == "Input/output error"
