"""ZMTP without sockets: exact bytes, messages in pieces, violations, and questions of the other side."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from fedemu.protocol.transport.zmtp import GREETING, SMALL, Incoming, ZmtpViolation, framed

_BODY = b"\x05READY\x0bSocket-Type\0\0\0\x06ROUTER"
READY = bytes([4, len(_BODY)]) + _BODY


def connected(most_frames: int = 10, most_bytes: int = 1_000_000) -> Incoming:
    incoming = Incoming(most_frames, most_bytes)
    assert list(incoming.feed(GREETING + READY)) == []
    assert incoming.ready
    incoming.answers.clear()
    return incoming


def test_the_handshake_says_what_the_specification_says() -> None:
    incoming = Incoming(10, 1000)
    assert GREETING[:12] == b"\xff\0\0\0\0\0\0\0\0\x7f\x03\x00"
    assert (GREETING[12:16], len(GREETING)) == (b"NULL", 64)
    assert list(incoming.feed(GREETING[:63])) == []
    assert (incoming.answers, incoming.ready) == ([], False)
    assert list(incoming.feed(GREETING[63:])) == []
    command = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
    assert incoming.answers == [bytes([4, len(command)]) + command]
    assert list(incoming.feed(READY)) == []
    assert incoming.ready


def test_frames_have_a_flag_for_more_and_a_size_of_one_or_eight_bytes() -> None:
    assert framed([b"ab"]) == [b"\x00\x02ab"]
    assert framed([b"ab", b""]) == [b"\x01\x02ab\x00\x00"]
    assert framed([bytes(255)]) == [b"\x00\xff" + bytes(255)]
    assert framed([bytes(256)]) == [b"\x02" + (256).to_bytes(8, "big") + bytes(256)]


def test_large_frames_are_sent_without_a_copy() -> None:
    large = bytes(SMALL)
    pieces = framed([b"h", large, b"t"])
    assert pieces[0] == b"\x01\x01h\x03" + SMALL.to_bytes(8, "big")
    assert pieces[1] is large
    assert pieces[2] == b"\x00\x01t"


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_messages_come_out_whole_however_their_bytes_are_cut(piece: int) -> None:
    incoming = connected()
    messages = [[b"one"], [b"head", bytes(300), b""], [b""]]
    data = b"".join(bytes(part) for message in messages for part in framed(message))
    found = [each for start in range(0, len(data), piece) for each in incoming.feed(data[start : start + piece])]
    assert found == messages


def test_a_large_frame_is_filled_in_place() -> None:
    incoming = connected()
    content = bytes(range(256)) * (SMALL // 256 + 1)
    data = b"".join(bytes(part) for part in framed([b"head", content]))
    assert list(incoming.feed(data[:50])) == []
    rest = data[50:]
    assert incoming.large is not None
    assert len(incoming.large) == len(rest)
    incoming.large[:1000] = rest[:1000]
    assert incoming.filled(1000) is None
    incoming.large[:] = rest[1000:]
    message = incoming.filled(len(rest) - 1000)
    assert message == [b"head", content]
    assert isinstance(message[1], memoryview)
    memory = weakref.ref(message[1].obj)
    del message
    assert memory() is None, "nothing of it is kept"
    assert list(incoming.feed(b"\x00\x01x")) == [[b"x"]]


class Counted(bytes):
    """Bytes that count what is copied out of them, and out of these copies."""

    copied = 0

    def __getitem__(self, place: Any) -> Any:
        part = super().__getitem__(place)
        if isinstance(part, int):
            return part
        Counted.copied += len(part)
        return Counted(part)


def test_many_small_messages_at_once_are_copied_once() -> None:
    incoming, data = connected(), Counted(b"\x00\x01x" * 8000)
    Counted.copied = 0
    assert list(incoming.feed(data)) == [[b"x"]] * 8000
    assert Counted.copied == 2 * 8000, "of each message its length and its content"


def test_a_message_keeps_no_more_frames_than_agreed() -> None:
    incoming = connected(most_frames=3)
    assert list(incoming.feed(b"\x01\x01a" * 1000 + b"\x00\x01z")) == [[b"a"] * 3]


def test_the_bytes_of_a_message_without_an_end_are_counted_also_those_that_are_not_kept() -> None:
    incoming = connected(most_frames=3)
    assert list(incoming.feed(b"\x01\x01a" * 1000 + b"\x01\x00" * 1000 + b"\x01")) == []
    assert incoming.unfinished == 5001
    assert list(incoming.feed(b"\x00\x02" + SMALL.to_bytes(8, "big") + bytes(10))) == []
    assert incoming.unfinished == 5002 + 10
    assert incoming.filled(SMALL - 10) == [b"a"] * 3
    assert incoming.unfinished == 0


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x00" * 64, "does not speak ZMTP 3"),
        (b"\x00" + GREETING[1:], "does not speak ZMTP 3"),
        (GREETING[:9] + b"\x7e" + GREETING[10:], "does not speak ZMTP 3"),
        (GREETING[:10] + b"\x02" + GREETING[11:], "does not speak ZMTP 3"),
        (GREETING.replace(b"NULL\0", b"CURVE"), "wants keys"),
        (GREETING + b"\x00\x01x", "before the end of the handshake"),
        (GREETING + READY + b"\x02" + (2**53).to_bytes(8, "big"), "at most 1000000 are read"),
        (GREETING + READY + b"\x06" + (2000).to_bytes(8, "big"), "at most 1024 are read"),
        (GREETING + READY + b"\x10\x00", "unknown flags 0x10"),
        (GREETING + READY + b"\x06" + (307).to_bytes(8, "big") + b"\x04PING\0\0" + bytes(300), "16 bytes of context"),
        (GREETING + b"\x04\x0a\x05ERROR\x03bad", "refuses the connection: bad"),
    ],
)
def test_a_violation_is_named_and_takes_no_memory(data: bytes, reason: str) -> None:
    incoming = Incoming(10, 1_000_000)
    with pytest.raises(ZmtpViolation, match=reason):
        list(incoming.feed(data))
    assert incoming.large is None


def test_the_size_of_a_frame_is_read_when_all_of_it_has_come() -> None:
    size = 256 * SMALL
    incoming = connected(most_bytes=size)
    header = b"\x02" + size.to_bytes(8, "big")
    assert list(incoming.feed(header[:-1])) == []
    assert incoming.large is None
    assert list(incoming.feed(header[-1:])) == []
    assert incoming.large is not None
    assert len(incoming.large) == size, "a frame may be as large as is allowed"


def test_a_frame_for_which_no_machine_has_memory_is_a_violation_whatever_is_allowed() -> None:
    incoming = connected(most_bytes=2**60)
    with pytest.raises(ZmtpViolation, match="there is no memory"):
        list(incoming.feed(b"\x02" + (2**56).to_bytes(8, "big") + b"abc"))
    assert incoming.large is None


@pytest.mark.parametrize("context", [b"", b"hi", b"sixteen bytes..."])
def test_a_ping_is_answered_with_its_context(context: bytes) -> None:
    incoming = connected()
    assert list(incoming.feed(bytes([4, 7 + len(context)]) + b"\x04PING\x00\x0a" + context)) == []
    assert incoming.answers == [bytes([4, 5 + len(context)]) + b"\x04PONG" + context]


@pytest.mark.parametrize("command", [b"", b"\x00", b"\x09SUBSCRIBE", b"\xffcut"])
def test_a_command_that_means_nothing_here_is_passed_over(command: bytes) -> None:
    incoming = connected()
    assert list(incoming.feed(bytes([4, len(command)]) + command + b"\x00\x01x")) == [[b"x"]]
    assert incoming.answers == []
