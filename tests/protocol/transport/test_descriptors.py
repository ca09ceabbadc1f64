"""Callbacks for descriptors: who is called when, and that nothing spins."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest

from fedemu.protocol.transport.descriptors import Descriptors

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def watch() -> Iterator[Descriptors]:
    made = Descriptors()
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def called(watch: Descriptors) -> list[object]:
    return [callback() for callback in watch.ready()]


def is_awake(watch: Descriptors) -> bool:
    """Whether a loop that watches the descriptor would be woken."""
    return bool(select.select([watch], [], [], 0)[0])


def test_each_callback_is_called_for_its_own_events_and_both_at_the_end_of_the_other_side(
    watch: Descriptors, pair: Pair
) -> None:
    here, there = pair
    watch.add_reader(here.fileno(), lambda: "read")
    assert called(watch) == []
    watch.add_writer(here.fileno(), lambda: "write")
    assert called(watch) == ["write"]
    there.send(b"x")
    assert called(watch) == ["read", "write"]
    here.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while here.send(bytes(65536)):
            pass
    assert called(watch) == ["read"]
    here.recv(1)
    there.close()
    assert called(watch) == ["read", "write"]


def test_what_nobody_waits_for_any_more_wakes_no_loop(watch: Descriptors, pair: Pair) -> None:
    here, there = pair
    watch.add_reader(here.fileno(), lambda: "read")
    watch.add_writer(here.fileno(), lambda: "write")
    assert is_awake(watch)
    assert [watch.remove_writer(here.fileno()) for _ in range(2)] == [True, False]
    assert not is_awake(watch)
    there.send(b"x")
    assert is_awake(watch)
    assert [watch.remove_reader(here.fileno()) for _ in range(2)] == [True, False]
    assert not is_awake(watch)
    watch.add_writer(here.fileno(), lambda: "write again")
    assert called(watch) == ["write again"]


def test_a_descriptor_that_the_system_does_not_watch_can_be_watched_later(
    watch: Descriptors, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = MagicMock(register=MagicMock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with monkeypatch.context() as patched:
        patched.setattr(watch, "_poll", full)
        with pytest.raises(OSError, match="No space"):
            watch.add_reader(pair[0].fileno(), lambda: "read")
    watch.add_reader(pair[0].fileno(), lambda: "read")
    pair[1].send(b"!")
    assert called(watch) == ["read"]
