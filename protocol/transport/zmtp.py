"""ZMTP 3.0, the protocol of ZeroMQ connections, as far as a DEALER or ROUTER without keys needs it. Without sockets.

The specification is https://rfc.zeromq.org/spec/23/. ``line.py`` uses this in processes in which the threads of the
ZeroMQ library would cost more than the messages.

There is one extension. If both sides have told in their handshake that they take sealed memory (``SEALED``), a large
frame may be such memory: the descriptor goes over the Unix socket beside the bytes, and in place of the frame's bytes
only its place is sent (``passing.py``).
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from fedemu.protocol.codec import Buffer

GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""What both sides say first: version 3.0, no security, not a server."""
SMALL: Final = 64 * 1024
"""A frame of at least this size is neither copied when it is sent nor joined from pieces when it is received."""
SEALED: Final = b"X-Fedemu-Sealed"
"""The property of a handshake by which a side says that it takes sealed memory."""
MOST_DESCRIPTORS: Final = 64
"""The most pieces of sealed memory that one message refers to."""
_MORE, _LONG, _COMMAND, _SEALED = 1, 2, 4, 8
PLACE: Final = struct.Struct(">BQQ")
"""The body of a frame in sealed memory: which memory of the message, the bytes before the frame, and its size."""
_LONG_SIZE: Final = struct.Struct(">BQ")
_LONGEST_COMMAND: Final = 1024
_LONGEST_CONTEXT: Final = 16
"""The most bytes of a question's context, by the specification. They are sent back with the answer."""
_NOTHING: Final = memoryview(b"")


class ZmtpViolation(Exception):
    """The other side does not speak ZMTP 3 without keys, or a frame of it is too large. The connection is useless."""


def ready(kind: bytes, sealed: bool = False) -> bytes:
    """The command that ends the handshake, with the type of the socket."""
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", kind), (b"Identity", b""), *([(SEALED, b"1")] if sealed else [])):
        body += bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
    return _command(body)


def framed(message: Sequence[Buffer], places: Sequence[bytes | None] = ()) -> list[Buffer]:
    """The bytes of a message of one or several frames, as pieces to be sent one after the other.

    A frame that has one of ``places`` in sealed memory is sent as this place, see ``PLACE``.
    """
    pieces: list[Buffer] = []
    small = bytearray()
    last = len(message) - 1
    for position, frame in enumerate(message):
        flags = _MORE if position < last else 0
        if places and (place := places[position]) is not None:
            flags, frame = flags | _SEALED, place
        size = len(frame)
        small += bytes((flags, size)) if size < 256 else _LONG_SIZE.pack(flags | _LONG, size)
        if size < SMALL:
            small += frame
        else:
            pieces += [bytes(small), frame]
            small = bytearray()
    if small:
        pieces.append(bytes(small))
    return pieces


def _command(body: bytes) -> bytes:
    return bytes((_COMMAND, len(body))) + body


class Incoming:
    """Cuts the bytes of one connection into messages.

    ``answers`` collects what has to be sent back to the other side's questions. A message keeps at most ``most_frames``
    frames. A frame of more than ``most_bytes`` is a violation, before any memory is taken for it. ``kind`` is the type
    of the socket on this side. ``sealed`` says that this side takes sealed memory.
    """

    def __init__(self, most_frames: int, most_bytes: int, kind: bytes = b"DEALER", sealed: bool = False) -> None:
        self.ready = False
        """Whether the handshake is over, so that messages may be sent."""
        self.offers_sealed = sealed
        """Whether this side takes sealed memory."""
        self.sealed = False
        """Whether both sides take sealed memory."""
        self._memories: deque[memoryview] = deque()
        """Sealed memory that has come, and to which no message has referred yet."""
        self.answers: list[bytes] = []
        self.large: memoryview | None = None
        """The part of a large frame that is still to come. If there is one, the next bytes belong into it."""
        self._kind = kind
        self._most_frames = most_frames
        self._most_bytes = most_bytes
        self._greeted = False
        self._rest = b""
        self._frames: list[Buffer] = []
        self._referred: list[memoryview] = []
        """The sealed memory to which the present message has referred."""
        self._parts_bytes = 0
        self._filling = _NOTHING
        self._flags = 0

    @property
    def unfinished(self) -> int:
        """The bytes that have come of a message that has not ended."""
        coming = 0 if self.large is None else len(self._filling) - len(self.large)
        return self._parts_bytes + len(self._rest) + coming

    def feed(self, data: bytes) -> Iterator[list[Buffer]]:
        """The messages that are complete with ``data``. Raises ZmtpViolation."""
        if self._rest:
            data = self._rest + data
        self._rest = data
        if not self._greeted:
            if len(data) < len(GREETING):
                return
            _check_greeting(data)
            self._greeted = True
            data = data[len(GREETING) :]
            self.answers.append(ready(self._kind, self.offers_sealed))
        place = 0
        while len(data) - place >= 2:
            flags = data[place]
            start = place + (9 if flags & _LONG else 2)
            if start > len(data):
                break
            size = int.from_bytes(data[place + 1 : start], "big")
            self._check_frame(flags, size)
            end = start + size
            if end > len(data):
                if size >= SMALL:
                    self._filling, self._flags = _room_for(size), flags
                    self._filling[: len(data) - start] = data[start:]
                    self.large = self._filling[len(data) - start :]
                    place = len(data)
                break
            place = end
            if flags & _COMMAND:
                self._obey(data[start:end])
            elif flags & _SEALED:
                if (message := self._framed(flags, self._in_memory(data[start:end]))) is not None:
                    yield message
            elif (message := self._framed(flags, data[start:end])) is not None:
                yield message
        self._rest = data[place:]

    def passed(self, memories: Sequence[memoryview]) -> None:
        """Sealed memory has come beside the bytes that are fed next. Raises ZmtpViolation if it is too much."""
        self._memories.extend(memories)
        if len(self._memories) > MOST_DESCRIPTORS:
            raise ZmtpViolation("much memory came, to which no message refers")

    def filled(self, size: int) -> list[Buffer] | None:
        """``size`` more bytes are in ``large``. Returns the message if this completes it."""
        assert self.large is not None
        self.large = self.large[size:]
        if len(self.large):
            return None
        frame, self.large, self._filling = self._filling, None, _NOTHING
        return self._framed(self._flags, frame)

    def _framed(self, flags: int, frame: Buffer) -> list[Buffer] | None:
        if len(self._frames) < self._most_frames:
            self._frames.append(frame)
        if flags & _MORE:
            self._parts_bytes += len(frame) + 2
            return None
        message, self._frames, self._parts_bytes = self._frames, [], 0
        if self._referred:
            self._referred = []
        return message

    def _in_memory(self, body: bytes) -> memoryview:
        """The frame of which the body tells the place in sealed memory."""
        number: int
        number, offset, size = PLACE.unpack(body)
        if size > self._most_bytes:
            raise ZmtpViolation(f"a frame has {size} bytes, at most {self._most_bytes} are read")
        if number == len(self._referred) and self._memories:
            self._referred.append(self._memories.popleft())
        if number >= len(self._referred) or offset + size > len(self._referred[number]):
            raise ZmtpViolation("a frame is in memory that has not come")
        return self._referred[number][offset : offset + size]

    def _check_frame(self, flags: int, size: int) -> None:
        a_place = self.sealed and flags & ~_MORE == _SEALED and size == PLACE.size
        if flags & ~(_MORE | _LONG | _COMMAND) and not a_place:
            raise ZmtpViolation(f"a frame has the unknown flags {flags:#x}")
        most = _LONGEST_COMMAND if flags & _COMMAND else self._most_bytes
        if size > most:
            raise ZmtpViolation(f"a frame has {size} bytes, at most {most} are read")
        if not self.ready and not flags & _COMMAND:
            raise ZmtpViolation("a message came before the end of the handshake")

    def _obey(self, body: bytes) -> None:
        name, rest = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if name == b"READY":
            self.ready = True
            self.sealed = self.offers_sealed and SEALED in rest
        elif name == b"ERROR":
            raise ZmtpViolation(f"the other side refuses the connection: {rest[1:].decode('ascii', 'replace')}")
        elif name == b"PING":
            if len(rest) > 2 + _LONGEST_CONTEXT:
                raise ZmtpViolation(f"a question has more than {_LONGEST_CONTEXT} bytes of context")
            self.answers.append(_command(b"\x04PONG" + rest[2:]))


def _room_for(size: int) -> memoryview:
    """Memory for a frame. Nothing is written there before it comes, so that a size alone takes none."""
    try:
        return np.empty(size, np.uint8).data
    except MemoryError:
        raise ZmtpViolation(f"a frame has {size} bytes, for which there is no memory") from None


def _check_greeting(data: bytes) -> None:
    if data[0] != 0xFF or not data[9] & 1 or data[10] < 3:
        raise ZmtpViolation("the other side does not speak ZMTP 3")
    if data[12:32] != GREETING[12:32]:
        raise ZmtpViolation("the other side wants keys")
