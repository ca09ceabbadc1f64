"""How the connection of a Dealer comes about and ends: names, attempts, handshakes and farewells."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import struct
import threading
import time
import weakref
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from fedemu.protocol import lookup
from fedemu.protocol.codec import DOWN, UP, encode
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.lookup import Lookups
from fedemu.protocol.messages import Beat, Bye, Heartbeat, Result, TensorSpec
from fedemu.protocol.transport import direct, direct_router
from fedemu.protocol.transport.direct import DirectNetwork
from fedemu.protocol.transport.direct_router import DirectRouter
from fedemu.protocol.transport.outgoing import Outgoing
from fedemu.protocol.transport.zeromq import ZmqNetwork
from fedemu.protocol.transport.zmtp import GREETING, framed, ready


async def test_a_name_with_addresses_of_both_kinds_leads_to_the_one_where_the_coordinator_listens(
    tcp: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: Any, port: int, family: int = 0, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))
        four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
        return [found for found in (six, four) if family in (0, found[0])]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    await require_found("localhost", tcp, eventually)


async def test_a_name_in_brackets_that_has_addresses_of_ipv4_only_is_found_under_these_as_by_zeromq(
    tcp: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **named: real("127.0.0.1", *more, **named))
    await require_found("[coordinator.example]", tcp, eventually)


async def require_found(host: str, tcp: Any, eventually: Any) -> None:
    """A device finds a coordinator, which listens at an address of IPv4, by this name of its host."""
    coordinator = tcp.listen()
    tcp.dialer = DirectNetwork(asyncio.get_running_loop())
    device = tcp.join(coordinator.router.address.replace("127.0.0.1", host))
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
    tcp: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch, descriptors: Any
) -> None:
    server = NameServer(monkeypatch)
    server.answer.set()
    before = descriptors()
    tcp.dialer = DirectNetwork(asyncio.get_running_loop())
    tcp.join("tcp://nobody.example:5577").dealer.send(Heartbeat())
    await eventually(lambda: len(server.threads) == 2)
    tcp.dialer.close()
    await eventually(lambda: not descriptors() - before)


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
    tcp: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch, descriptors: Any
) -> None:
    server = NameServer(monkeypatch)
    before = descriptors()
    tcp.dialer = DirectNetwork(asyncio.get_running_loop(), linger_seconds=0.1)
    tcp.join("tcp://coordinator.example:5577").dealer.send(Heartbeat())
    await eventually(lambda: server.threads)
    tcp.dialer.close()
    assert not server.answer.is_set()
    server.answer.set()
    await eventually(lambda: not descriptors() - before)


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


def test_a_question_whose_answer_the_system_cannot_watch_leaves_no_descriptor(descriptors: Any) -> None:
    class Full:
        def add_reader(self, descriptor: int, callback: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    before = descriptors()
    with pytest.raises(OSError, match="No space"):
        lookup.Lookup(Full(), "coordinator.example", 5555, print)  # type: ignore[arg-type]
    assert not descriptors() - before


@pytest.mark.parametrize(
    ("place", "refusal"),
    [((Lookups, "find"), OSError(errno.EMFILE, "Too many open files")), ((lookup, "start_new_thread"), RuntimeError())],
    ids=["no descriptors", "no threads"],
)
async def test_a_dealer_that_cannot_ask_for_a_name_asks_again(
    tcp: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], refusal: Exception
) -> None:
    ask, refused = getattr(*place), []

    def refuse_first(*arguments: Any) -> Any:
        if not refused:
            refused.append(arguments)
            raise refusal
        return ask(*arguments)

    monkeypatch.setattr(*place, refuse_first)
    NameServer(monkeypatch).answer.set()
    coordinator = tcp.listen()
    network = DirectNetwork(asyncio.get_running_loop())
    address = coordinator.router.address.replace("127.0.0.1", "coordinator.example")
    network.connect(address, DOWN, print, print).send(Heartbeat())
    await eventually(lambda: coordinator.messages)
    assert refused
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


async def test_a_dealer_tells_when_it_has_had_no_connection_for_as_long_as_it_is_patient(
    eventually: Any, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, lost, now = asyncio.get_running_loop(), list[float](), [100.0]

    class Hurried:
        """The loop, in which waits end at once, and a clock shows them all the same."""

        def __getattr__(self, name: str) -> Any:
            return getattr(loop, name)

        def call_later(self, delay: float, callback: Any) -> asyncio.Handle:
            now[0] += delay
            return loop.call_soon(callback)

    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(direct, "time", clock)
    own = DirectNetwork(Hurried(), lost=lambda: lost.append(now[0]), patience=3.0)
    dealer = own.connect(f"ipc://{socket_path}", DOWN, print, print)
    await eventually(lambda: len(lost) >= 2)
    assert lost[:2] == pytest.approx([103.5, 106.5])  # 0.1 + 0.2 + 0.4 + 0.8 + 1 + 1, and then 3 times 1
    dealer.close()
    monkeypatch.undo()
    own.close()


@pytest.mark.parametrize("side", ["dealer", "router"])
async def test_a_connection_on_which_the_kernel_refuses_to_send_is_made_anew(
    eventually: Any, socket_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    loop, lost, peers, answers = asyncio.get_running_loop(), list[str](), list[bytes](), list[Any]()
    network, own = DirectNetwork(loop), DirectNetwork(loop, lost=lambda: lost.append("lost"))
    router = network.bind(f"ipc://{socket_path}", UP, lambda peer, envelope: peers.append(peer), print)
    dealer = own.connect(router.address, DOWN, answers.append, print)
    dealer.send(Heartbeat())
    await eventually(lambda: peers)
    with monkeypatch.context() as patched:
        patched.setattr(Outgoing, "send", lambda *_: _refuse(errno.ENOBUFS))
        if side == "dealer":
            dealer.send(Heartbeat())
        else:
            router.send(peers[0], Beat())
    await eventually(lambda: lost)
    dealer.send(Heartbeat())
    await eventually(lambda: peers[-1] != peers[0])
    router.send(peers[-1], Beat())
    await eventually(lambda: answers)
    own.close()
    network.close()


@pytest.mark.parametrize("module", [direct, direct_router], ids=["dealer", "router"])
async def test_a_connection_that_the_system_cannot_watch_is_tried_again(
    eventually: Any, socket_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    line, refused, heard = module.Line, list[Any](), list[bytes]()

    def refuse_first(*arguments: Any, **named: Any) -> Any:
        if not refused:
            refused.append(arguments)
            _refuse(errno.ENOSPC)
        return line(*arguments, **named)

    monkeypatch.setattr(module, "Line", refuse_first)
    network = DirectNetwork(asyncio.get_running_loop())
    router = network.bind(f"ipc://{socket_path}", UP, lambda peer, envelope: heard.append(peer), print)
    network.connect(router.address, DOWN, print, print).send(Heartbeat())
    await eventually(lambda: heard)
    assert refused
    network.close()


def _refuse(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))


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


async def test_a_dealer_for_whose_watch_no_socket_is_left_is_refused_with_a_sentence() -> None:
    network = ZmqNetwork(max_sockets=1, watched=True)
    with pytest.raises(ConfigurationError, match="no file descriptors or sockets left"):
        network.connect("tcp://127.0.0.1:5577", UP, lambda envelope: None, lambda error: None)
    network.close()


async def test_closing_waits_a_bounded_time_for_an_absent_coordinator() -> None:
    network = ZmqNetwork(linger_seconds=0.05)
    dealer = network.connect("tcp://127.0.0.1:9", UP, lambda envelope: None, lambda error: None)
    assert dealer.send(Heartbeat())
    start = asyncio.get_running_loop().time()
    network.close()
    assert asyncio.get_running_loop().time() - start < 5.0
