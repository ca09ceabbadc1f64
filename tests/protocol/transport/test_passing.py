"""Large frames on plain sockets within a machine: they go as sealed memory, and as bytes where they cannot."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fedemu.protocol.codec import DOWN, UP
from fedemu.protocol.host import sealed
from fedemu.protocol.host.sealed import place_of, seal
from fedemu.protocol.messages import Blob, Hello, Result, TensorSpec
from fedemu.protocol.transport import line, outgoing
from fedemu.protocol.transport.direct import DirectNetwork
from fedemu.protocol.transport.passing import handed
from fedemu.protocol.transport.zmtp import (
    GREETING,
    MOST_DESCRIPTORS,
    PLACE,
    SEALED,
    SMALL,
    Incoming,
    ZmtpViolation,
    ready,
)

LARGE = bytes(range(256)) * (SMALL // 256)


def result(*sizes: int) -> Result:
    specs = tuple(TensorSpec(name=f"t{place}", dtype="uint8", shape=(size,)) for place, size in enumerate(sizes))
    return Result(ask="1.0.0", examples=1, steps=1, metrics={}, tensors=specs)


class Sides:
    """A Router, and one Dealer that is connected to it. ``up`` and ``down`` are what they have received."""

    def __init__(self, network: DirectNetwork, path: Path) -> None:
        self.network = network
        self.up: list[Any] = []
        self.down: list[Any] = []
        self.peers: list[bytes] = []
        self.router = network.bind(f"ipc://{path}", UP, self._came, lambda peer, error: self.up.append(error))
        self.dealer = network.connect(self.router.address, DOWN, self.down.append, self.down.append)

    def _came(self, peer: bytes, envelope: Any) -> None:
        self.peers.append(peer)
        self.up.append(envelope)


@pytest.fixture
async def sides(socket_path: Path, descriptors: Any) -> AsyncIterator[Sides]:
    before = descriptors()
    made = Sides(DirectNetwork(asyncio.get_running_loop()), socket_path)
    made.dealer.send(Hello(device=0, incarnation=0, lease=""))
    yield made
    made.network.close()
    made.up.clear()
    made.down.clear()
    assert not descriptors() - before


async def test_large_frames_arrive_in_sealed_memory_and_small_ones_as_bytes(sides: Sides, eventually: Any) -> None:
    sides.dealer.send(result(len(LARGE), 3, 2 * len(LARGE)), [LARGE, b"abc", LARGE + LARGE])
    await eventually(lambda: len(sides.up) == 2)
    first, small, last = sides.up[1].frames
    assert (bytes(first), bytes(small), bytes(last)) == (LARGE, b"abc", LARGE + LARGE)
    assert place_of(small) is None
    assert place_of(first).descriptor == place_of(last).descriptor


async def test_what_is_passed_on_is_the_same_memory(sides: Sides, eventually: Any) -> None:
    blob = {"digest": "0" * 64, "offset": 0, "size": len(LARGE)}
    (copy,) = seal([LARGE])
    await eventually(lambda: sides.up)
    sides.router.send(sides.peers[0], Blob(**blob), [copy])
    await eventually(lambda: sides.down)
    (came,) = sides.down[0].frames
    sides.dealer.send(result(len(LARGE)), [came])
    await eventually(lambda: len(sides.up) == 2)
    files = [os.fstat(place_of(view).descriptor).st_ino for view in (copy, came, sides.up[1].frames[0])]
    assert len(set(files)) == 1


async def test_order_is_kept_between_messages_of_both_kinds(sides: Sides, eventually: Any) -> None:
    sizes = [0, 5, SMALL, 3 * SMALL, 1, SMALL + 1] * 20
    for size in sizes:
        sides.dealer.send(result(size), [bytes(size)])
    await eventually(lambda: len(sides.up) == 1 + len(sizes))
    assert [len(envelope.frames[0]) if envelope.frames else 0 for envelope in sides.up[1:]] == sizes


@pytest.mark.parametrize("failing", ["memfd_create", "sendmsg", "kept"])
async def test_a_large_frame_that_cannot_go_as_memory_goes_as_bytes(
    sides: Sides, eventually: Any, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def refuse(*arguments: object) -> Any:
        raise OSError(errno.ETOOMANYREFS if failing == "sendmsg" else errno.ENFILE, "no more")

    if failing == "memfd_create":
        monkeypatch.setattr(os, "memfd_create", refuse)
    elif failing == "sendmsg":
        monkeypatch.setattr(outgoing, "send", refuse)
    else:
        monkeypatch.setattr(sealed, "MOST_KEPT", 0)
    sides.dealer.send(result(len(LARGE), 1), [LARGE, b"x"])
    await eventually(lambda: len(sides.up) == 2)
    assert [bytes(frame) for frame in sides.up[1].frames] == [LARGE, b"x"]
    assert place_of(sides.up[1].frames[0]) is None


@pytest.mark.parametrize("kept", [sealed.MOST_KEPT, MOST_DESCRIPTORS + 3])
async def test_a_message_may_refer_to_many_pieces_of_memory(
    sides: Sides, eventually: Any, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setattr(sealed, "MOST_KEPT", kept)
    frames = [view for _ in range(sealed.MOST_KEPT) for view in seal([LARGE])]
    frames += [LARGE] * (MOST_DESCRIPTORS + 3 - len(frames))
    sides.dealer.send(result(*map(len, frames)), frames)
    del frames
    await eventually(lambda: len(sides.up) == 2)
    assert [bytes(frame) for frame in sides.up[1].frames] == [LARGE] * (MOST_DESCRIPTORS + 3)


@pytest.mark.parametrize("what", ["an open file", "descriptors without a message", "a place beyond the memory"])
async def test_a_peer_that_misuses_memory_loses_its_connection_and_nobody_else(
    sides: Sides, eventually: Any, what: str
) -> None:
    await eventually(lambda: sides.up)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(sides.router.address.removeprefix("ipc://"))
        peer.sendall(GREETING + ready(b"DEALER", sealed=True))
        peer.setblocking(False)
        (memory,) = seal([LARGE])
        descriptor, places = place_of(memory).descriptor, b"\x08" + bytes([PLACE.size]) + PLACE.pack(0, 1, len(LARGE))
        if what == "an open file":
            descriptor = os.open(__file__, os.O_RDONLY)
        with os.fdopen(os.dup(descriptor)) as passed:
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [passed.fileno()]))]
            for _ in range(1 if what != "descriptors without a message" else MOST_DESCRIPTORS + 1):
                peer.sendmsg([places if what == "a place beyond the memory" else b"\x00"], beside)
                await asyncio.sleep(0)
        if what == "an open file":
            os.close(descriptor)

        def is_closed() -> bool:
            try:
                while peer.recv(4096):
                    pass
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True
            return True

        await eventually(is_closed)
    sides.up.clear()
    sides.dealer.send(result(len(LARGE)), [LARGE])
    await eventually(lambda: sides.up)
    assert bytes(sides.up[0].frames[0]) == LARGE


def told(sealed: bool, other: bool) -> Incoming:
    incoming = Incoming(10, 1000, sealed=sealed)
    assert list(incoming.feed(GREETING + ready(b"ROUTER", other))) == []
    return incoming


@pytest.mark.parametrize(("ours", "theirs"), [(False, False), (False, True), (True, False)])
def test_memory_is_taken_only_if_both_sides_take_it(ours: bool, theirs: bool) -> None:
    incoming = told(ours, theirs)
    assert not incoming.sealed
    assert (SEALED in incoming.answers[0]) is ours
    with pytest.raises(ZmtpViolation, match="unknown flags 0x8"):
        list(incoming.feed(b"\x08" + bytes([PLACE.size]) + PLACE.pack(0, 0, 1)))


def test_frames_lie_where_their_places_say() -> None:
    incoming = told(True, True)
    incoming.passed([memoryview(b"abcdef"), memoryview(b"xyz"), memoryview(b"next")])
    frames = [(9, 0, 1, 3), (9, 1, 0, 3), (8, 0, 0, 1), (8, 0, 0, 4)]
    data = b"".join(bytes([flags, PLACE.size]) + PLACE.pack(*place) for flags, *place in frames)
    assert list(incoming.feed(data)) == [[b"bcd", b"xyz", b"a"], [b"next"]]
    incoming.passed([memoryview(b"last")])
    assert list(incoming.feed(b"\x08" + bytes([PLACE.size]) + PLACE.pack(0, 0, 4))) == [[b"last"]]


@pytest.mark.parametrize("place", [(0, 4, 3), (0, 0, 7), (1, 0, 1), (2, 0, 0), (0, 2**63, 1)])
def test_a_place_outside_of_the_memory_that_came_is_a_violation(place: tuple[int, int, int]) -> None:
    incoming = told(True, True)
    incoming.passed([memoryview(b"abcdef")])
    with pytest.raises(ZmtpViolation, match="memory that has not come"):
        list(incoming.feed(b"\x08" + bytes([PLACE.size]) + PLACE.pack(*place)))


def test_a_place_in_memory_of_which_none_came_is_a_violation_and_so_is_one_of_another_size() -> None:
    with pytest.raises(ZmtpViolation, match="memory that has not come"):
        list(told(True, True).feed(b"\x08" + bytes([PLACE.size]) + PLACE.pack(0, 0, 1)))
    for size in (PLACE.size - 1, PLACE.size + 1):
        with pytest.raises(ZmtpViolation, match="unknown flags 0x8"):
            list(told(True, True).feed(b"\x08" + bytes([size]) + bytes(size)))


def test_a_frame_in_memory_may_not_be_larger_than_others() -> None:
    incoming = told(True, True)
    incoming.passed([memoryview(bytes(2000))])
    with pytest.raises(ZmtpViolation, match="has 1001 bytes, at most 1000"):
        list(incoming.feed(b"\x08" + bytes([PLACE.size]) + PLACE.pack(0, 0, 1001)))


def test_small_messages_are_framed_as_ever() -> None:
    assert handed([b"ab", bytes(10)]) == ([b"\x01\x02ab\x00\x0a" + bytes(10)], [], [b"ab", bytes(10)])


def test_a_process_that_has_hardly_any_descriptors_left_takes_large_frames_as_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for room, takes in ((MOST_DESCRIPTORS, False), (MOST_DESCRIPTORS + 1, True)):
            monkeypatch.setattr(line, "open_files", lambda room=room: ours.fileno() + room)
            assert line.incoming_for(UP.limits, b"ROUTER", ours).offers_sealed == takes
