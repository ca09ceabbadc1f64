"""Dealers on plain sockets, without the ZeroMQ library and its threads. The other side is an ordinary ZeroMQ ROUTER.

Hundreds of device processes take turns on few cores. With the library each message wakes three threads; here it wakes
one. Keys (CURVE) need the library, see ``zeromq.py``.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from fedemu.protocol.codec import Buffer, Decoder, Envelope, Packed, encode
from fedemu.protocol.errors import ProtocolError
from fedemu.protocol.messages import Message
from fedemu.protocol.transport.interface import ReaderLoop
from fedemu.protocol.transport.sockets import check_address
from fedemu.protocol.transport.zmtp import GREETING, Incoming, ZmtpViolation, framed

_MOST_WAITING: Final = 2000
"""The most messages that wait until they can be sent."""
_READ: Final = 256 * 1024
_HANDSHAKE_SECONDS: Final = 10.0
_RECONNECT_SECONDS: Final = (0.1, 1.0)
"""The first and the longest wait before the next attempt to connect."""
_MOST_PIECES: Final = 512
"""The most pieces that go to the kernel in one call."""


class SocketLoop(ReaderLoop, Protocol):
    """The part of an event loop that a direct Dealer uses. Every asyncio loop has it."""

    def add_writer(self, descriptor: int, callback: Callable[[], object], /) -> object:
        """Call ``callback`` whenever the descriptor can be written."""
        ...

    def remove_writer(self, descriptor: int, /) -> bool:
        """Stop watching whether the descriptor can be written. Returns whether this was watched."""
        ...

    def call_later(self, delay: float, callback: Callable[..., object], /, *arguments: Any) -> Any:
        """Call ``callback`` with the arguments after some seconds. The result has a method ``cancel``."""
        ...


class DirectNetwork:
    """Dealers on plain sockets, on one event loop. ``close`` waits at most ``linger_seconds`` for the last messages."""

    def __init__(self, loop: SocketLoop, linger_seconds: float = 1.0) -> None:
        self._loop = loop
        self._linger = linger_seconds
        self._dealers: set[DirectDealer] = set()

    def connect(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[Envelope], None],
        rejected: Callable[[ProtocolError], None],
    ) -> DirectDealer:
        check_address(address, listening=False)
        dealer = DirectDealer(self._loop, address, decoder, received, rejected, self._linger, self._dealers.discard)
        self._dealers.add(dealer)
        return dealer

    def close(self) -> None:
        for dealer in list(self._dealers):
            dealer.close()
        deadline = time.monotonic() + self._linger
        while self._dealers and (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            by_descriptor = {}
            for dealer in self._dealers:
                descriptor, events = dealer.wants()
                if descriptor is not None:
                    by_descriptor[descriptor] = dealer
                    poll.register(descriptor, events)
            for descriptor, _ in poll.poll(min(left, 0.05) * 1000):
                by_descriptor[descriptor].progress()
        for dealer in list(self._dealers):
            dealer.abandon()


class DirectDealer:
    """One connection, which is made anew whenever it is lost. Messages that could not be sent yet wait, in order."""

    def __init__(
        self,
        loop: SocketLoop,
        address: str,
        decoder: Decoder,
        received: Callable[[Envelope], None],
        rejected: Callable[[ProtocolError], None],
        linger_seconds: float,
        closed: Callable[[DirectDealer], None],
    ) -> None:
        self.bytes_received = 0
        self.bytes_sent = 0
        self._loop = loop
        self._address = address
        self._decoder = decoder
        self._received = received
        self._rejected = rejected
        self._linger = linger_seconds
        self._closed = closed
        self._waiting: deque[list[Buffer]] = deque()
        """Messages of which nothing was sent, as pieces."""
        self._pieces: deque[memoryview] = deque()
        """The rest of what is being sent."""
        self._arrived: deque[list[Buffer]] = deque()
        self._delivering = self._writing = False
        self._leaving = False
        """Whether the Dealer is closed. It may still have something to send."""
        self._over = False
        self._pause = _RECONNECT_SECONDS[0]
        self._timer: Any = None
        self._socket: socket.socket | None = None
        self._descriptor = -1
        self._incoming = self._fresh()
        self._loop.call_soon(self._connect)

    def send(self, message: Message | Packed, frames: Sequence[Buffer] = ()) -> bool:
        if self._leaving or len(self._waiting) >= _MOST_WAITING:
            return False
        parts = encode(message, frames)
        self.bytes_sent += sum(map(len, parts))
        self._waiting.append(framed(parts))
        if self._incoming.ready and not self._writing:
            self._write()
        return True

    def close(self) -> None:
        if self._leaving:
            return
        self._leaving = True
        self._arrived.clear()
        if not self._incoming.ready and not self._waiting:
            self.abandon()
            return
        self._set_timer(self._linger, self.abandon)
        if self._incoming.ready and not self._writing:
            self._write()

    def wants(self) -> tuple[int | None, int]:
        """The descriptor that a closing Dealer waits for, and the events of ``select.poll``. None if there is none."""
        if self._socket is None:
            self._connect()
        if self._socket is None:
            return None, 0
        return self._descriptor, select.POLLIN | (select.POLLOUT if self._writing else 0)

    def progress(self) -> None:
        """Do what the descriptor is ready for."""
        if self._writing:
            self._write()
        if self._socket is not None:
            self._read()

    def abandon(self) -> None:
        """End the connection at once, whatever was not sent."""
        self._leaving = self._over = True
        self._drop()
        self._set_timer(None)
        self._closed(self)

    def _fresh(self) -> Incoming:
        limits = self._decoder.limits
        return Incoming(limits.frames + 2, max(limits.frame_bytes, limits.header_bytes))

    def _connect(self) -> None:
        """Begin to connect. It goes on when the socket can be written."""
        if self._socket is not None or self._over:
            return
        try:
            self._socket = _begin(self._address)
        except OSError:
            self._later()
            return
        self._descriptor = self._socket.fileno()
        self._incoming = self._fresh()
        self._pieces = deque([memoryview(GREETING)])
        self._loop.add_reader(self._descriptor, self._read)
        self._watch_writing(True)
        if not self._leaving:
            self._set_timer(_HANDSHAKE_SECONDS, self._lose)

    def _read(self) -> None:
        sock, incoming = self._socket, self._incoming
        assert sock is not None
        shaking_hands = not incoming.ready
        try:
            if incoming.large is not None:
                size = sock.recv_into(incoming.large)
                if size == 0:
                    self._lose()
                    return
                if (whole := incoming.filled(size)) is not None:
                    self._arrived.append(whole)
            else:
                data = sock.recv(_READ)
                if not data:
                    self._lose()
                    return
                self._arrived.extend(incoming.feed(data))
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ZmtpViolation):
            self._lose()
            return
        if incoming.answers or (shaking_hands and incoming.ready):
            self._answer()
        if self._leaving:
            self._arrived.clear()
        elif self._arrived and not self._delivering:
            self._deliver()

    def _answer(self) -> None:
        """Send what the handshake, or a question of the other side, demands, and then what waits."""
        incoming = self._incoming
        self._pieces.extend(map(memoryview, incoming.answers))
        incoming.answers.clear()
        if incoming.ready:
            self._pause = _RECONNECT_SECONDS[0]
            if not self._leaving:
                self._set_timer(None)
        self._write()

    def _deliver(self) -> None:
        """Hand on what has arrived. If a callback raises, the rest is handed on later."""
        self._delivering = True
        try:
            while self._arrived:
                frames = self._arrived.popleft()
                self.bytes_received += sum(map(len, frames))
                try:
                    envelope = self._decoder.decode(frames)
                except ProtocolError as error:
                    self._rejected(error)
                else:
                    self._received(envelope)
        finally:
            self._delivering = False
            if self._arrived:
                self._loop.call_soon(self._deliver)

    def _write(self) -> None:
        """Send as much as the kernel takes."""
        sock, pieces = self._socket, self._pieces
        assert sock is not None
        try:
            while True:
                while self._incoming.ready and self._waiting and len(pieces) < _MOST_PIECES:
                    pieces.extend(map(memoryview, self._waiting.popleft()))
                if not pieces:
                    break
                sent = sock.sendmsg([pieces[place] for place in range(min(len(pieces), _MOST_PIECES))])
                while sent:
                    first = len(pieces[0])
                    if sent < first:
                        pieces[0] = pieces[0][sent:]
                        break
                    sent -= first
                    pieces.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                self._lose()
                return
        self._watch_writing(bool(pieces))
        if self._leaving and self._incoming.ready and not pieces and not self._waiting:
            # The other side reads what is under way, and closes the connection then.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)

    def _watch_writing(self, wanted: bool) -> None:
        if wanted == self._writing:
            return
        self._writing = wanted
        if wanted:
            self._loop.add_writer(self._descriptor, self._write)
        else:
            self._loop.remove_writer(self._descriptor)

    def _lose(self) -> None:
        """The connection is gone. Connect anew later, or end if the Dealer is closed and has nothing left to say."""
        self._drop()
        if self._leaving and not self._waiting:
            self.abandon()
        else:
            self._later()

    def _drop(self) -> None:
        if self._socket is not None:
            self._watch_writing(False)
            self._loop.remove_reader(self._descriptor)
            self._socket.close()
            self._socket = None
        self._incoming = self._fresh()
        self._pieces.clear()

    def _later(self) -> None:
        if self._leaving:  # its timer is that of the end
            self._loop.call_later(self._pause, self._connect)
        else:
            self._set_timer(self._pause, self._connect)
        self._pause = min(2 * self._pause, _RECONNECT_SECONDS[1])

    def _set_timer(self, seconds: float | None, callback: Callable[[], None] = lambda: None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, callback)


def _begin(address: str) -> socket.socket:
    """A socket that is connecting. Raises OSError."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        target: Any = f"\0{rest[1:]}" if rest.startswith("@") else rest
    else:
        host, _, port = rest.rpartition(":")
        name: Any = host.strip("[]")
        if name.isascii():
            name = name.encode()  # a name as text needs a codec whose import takes a millisecond
        family, kind, protocol, _, target = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # The kernel notices within two minutes that the machine at the other end is gone.
        for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    try:
        sock.connect(target)
    except OSError as error:
        # A TCP connection is under way. On ipc the error means that too many others are waiting.
        if error.errno != errno.EINPROGRESS:
            sock.close()
            raise
    return sock
