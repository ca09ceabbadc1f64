"""The small event loop: readers, timers and turns in the order that asyncio would have them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from fedemu.device.process.poll_loop import PollLoop
from fedemu.protocol.codec import DOWN, UP, Envelope
from fedemu.protocol.messages import Beat, Heartbeat, Message
from fedemu.protocol.transport.zeromq import ZmqNetwork


@pytest.fixture
def errors() -> list[Exception]:
    return []


@pytest.fixture
def loop(errors: list[Exception]) -> Iterator[PollLoop]:
    made = PollLoop(errors.append)
    yield made
    made.close()


def test_timers_run_in_order_of_their_time(loop: PollLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    loop.call_at(now + 0.003, heard.append, "third")
    loop.call_at(now - 1.0, heard.append, "first")
    loop.call_later(0.001, heard.append, "second")
    loop.call_at(now + 0.004, loop.stop)
    monkeypatch.undo()
    loop.run()
    assert heard == ["first", "second", "third"]


def test_a_cancelled_timer_does_nothing(loop: PollLoop) -> None:
    heard: list[str] = []
    timer = loop.call_at(0.0, heard.append, "never")
    timer.cancel()
    loop.call_later(0.001, loop.stop)
    loop.run()
    assert timer.cancelled()
    assert heard == []


def test_callbacks_that_are_due_soon_run_in_order_and_before_any_wait(loop: PollLoop) -> None:
    heard: list[str] = []

    def first() -> None:
        heard.append("first")
        loop.call_soon(heard.append, "third")
        loop.call_soon(loop.stop)

    loop.call_soon(first)
    loop.call_soon(heard.append, "second")
    loop.run()
    assert heard == ["first", "second", "third"]


def test_a_reader_is_called_while_there_is_something_to_read(loop: PollLoop) -> None:
    reading, writing = os.pipe()
    heard: list[bytes] = []

    def read() -> None:
        heard.append(os.read(reading, 1))
        if len(heard) == 2:
            assert loop.remove_reader(reading)
            assert not loop.remove_reader(reading)
            loop.call_soon(loop.stop)

    loop.add_reader(reading, read)
    os.write(writing, b"abc")
    loop.run()
    assert heard == [b"a", b"b"]
    os.close(reading)
    os.close(writing)


def test_a_writer_is_called_while_there_is_room_and_beside_a_reader(loop: PollLoop) -> None:
    left, right = socket.socketpair()
    heard: list[str] = []

    def write() -> None:
        heard.append("write")
        right.send(b"x")
        assert loop.remove_writer(left.fileno())
        assert not loop.remove_writer(left.fileno())

    def read() -> None:
        heard.append(left.recv(10).decode())
        assert loop.remove_reader(left.fileno())
        loop.stop()

    loop.add_reader(left.fileno(), read)
    loop.add_writer(left.fileno(), write)
    loop.run()
    assert heard == ["write", "x"]
    left.close()
    right.close()


def test_an_error_in_a_callback_is_told_and_the_loop_goes_on(loop: PollLoop, errors: list[Exception]) -> None:
    loop.call_soon(lambda: 1 // 0)
    loop.call_later(0.001, loop.stop)
    loop.run()
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_a_network_that_is_given_the_loop_needs_no_asyncio(loop: PollLoop, errors: list[Exception]) -> None:
    network = ZmqNetwork(loop=loop)
    heard: list[Message] = []

    def greeted(peer: bytes, envelope: Envelope) -> None:
        heard.append(envelope.message)
        router.send(peer, Beat())

    def answered(envelope: Envelope) -> None:
        heard.append(envelope.message)
        loop.stop()

    router = network.bind("tcp://127.0.0.1:*", UP, greeted, lambda peer, error: errors.append(error))
    network.connect(router.address, DOWN, answered, errors.append).send(Heartbeat())
    loop.call_later(10.0, loop.stop)
    loop.run()
    network.close()
    assert heard == [Heartbeat(), Beat()]
    assert errors == []
