"""Plain sockets instead of the ZeroMQ library and its threads: Dealers, and Routers within a machine.

Hundreds of device processes take turns on few cores. With the library each message wakes three threads on its way; here
it wakes one. Either side may be an ordinary ZeroMQ socket. Keys (CURVE) need the library, see ``zeromq.py``.
"""

from __future__ import annotations

import errno
import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from fedemu.protocol.addresses import check_address
from fedemu.protocol.codec import Buffer, Decoder, Envelope, Limits, Packed, encode
from fedemu.protocol.errors import ProtocolError
from fedemu.protocol.lookup import Lookup, Lookups, Target
from fedemu.protocol.messages import Message
from fedemu.protocol.transport.direct_router import DirectRouter
from fedemu.protocol.transport.interface import (
    BOUNDLESS,
    Bounds,
    Handle,
    Screen,
    handing_on,
    handing_on_from_peers,
    let_all_pass,
)
from fedemu.protocol.transport.line import Line, SocketLoop, incoming_for, read_buffer

_MOST_WAITING: Final = 2000
"""The most messages of a Dealer that wait until they can be sent, where nobody says how many."""
_HANDSHAKE_SECONDS: Final = 10.0
_RECONNECT_SECONDS: Final = (0.1, 1.0)
"""The first and the longest wait before the next attempt to connect."""


class Closing(Protocol):
    """A side that is closed, and may still have something to send."""

    def wants(self) -> list[tuple[int, int, Callable[[], None]]]:
        """Descriptors, the events of ``select.poll`` that are waited for, and what is to be called then."""
        ...

    def close(self) -> None:
        """Stop receiving."""
        ...

    def abandon(self) -> None:
        """End at once, whatever was not sent."""
        ...


class DirectNetwork:
    """Sides on plain sockets, on one event loop. ``close`` waits at most ``linger_seconds`` for the last messages.

    At most ``most_waiting`` messages of a Dealer wait until they can be sent. ``lost`` is called when a connection of a
    Dealer breaks that had come about; what was under way on it may not have arrived. It is called, too, whenever a
    Dealer has tried for ``patience`` seconds in vain to get a connection.
    """

    def __init__(
        self,
        loop: SocketLoop,
        linger_seconds: float = 1.0,
        most_waiting: int = _MOST_WAITING,
        lost: Callable[[], None] = lambda: None,
        patience: float = math.inf,
    ) -> None:
        self.loop = loop
        self.lost = lost
        self.patience = patience
        self.linger_seconds = linger_seconds
        self.most_waiting = most_waiting
        self.open: set[Closing] = set()
        """The sides that have something to receive or to send."""
        self.buffer = read_buffer()
        self.lookups = Lookups(loop)

    def connect(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[Envelope], None],
        rejected: Callable[[ProtocolError], None],
    ) -> DirectDealer:
        check_address(address, listening=False)
        dealer = DirectDealer(self, address, decoder.limits, handing_on(decoder, received, rejected))
        self.open.add(dealer)
        return dealer

    def bind(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[bytes, Envelope], None],
        rejected: Callable[[bytes, ProtocolError], None],
        screen: Screen = let_all_pass,
        bounds: Bounds = BOUNDLESS,
    ) -> DirectRouter:
        hand_on, over = handing_on_from_peers(decoder, received, rejected, screen), self.open.discard
        made = DirectRouter(self.loop, address, decoder.limits, hand_on, bounds, self.linger_seconds, self.buffer, over)
        self.open.add(made)
        return made

    def push(self, seconds: float) -> float:
        """Wait at most so long until the kernel has taken what Dealers have sent. Returns the seconds that it took.

        For a process that computes while its loop does not run. Connections that have not come about are not waited
        for.
        """
        began = time.monotonic()
        for each in self.open:
            if isinstance(each, DirectDealer):
                each.push(began + seconds)
        return time.monotonic() - began

    def close(self) -> None:
        for each in list(self.open):
            each.close()
        deadline = time.monotonic() + self.linger_seconds
        while self.open and (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            ready: dict[int, Callable[[], None]] = {}
            for each in self.open:
                for descriptor, events, progress in each.wants():
                    ready[descriptor] = progress
                    poll.register(descriptor, events)
            for descriptor, _ in poll.poll(min(left, 0.05) * 1000):
                ready[descriptor]()
        for each in list(self.open):
            each.abandon()
        self.lookups.close()


class DirectDealer:
    """One connection, which is made anew whenever it is lost. Messages that could not be sent yet wait, in order."""

    def __init__(
        self, network: DirectNetwork, address: str, limits: Limits, hand_on: Callable[[Sequence[Buffer]], None]
    ) -> None:
        self.bytes_received = 0
        self.bytes_sent = 0
        self._network = network
        self._loop = network.loop
        self._address = address
        self._limits = limits
        self._hand_on = hand_on
        self._alone_since = time.monotonic()
        """When this Dealer began to look for a connection."""
        self._waiting: deque[list[Buffer]] = deque()
        self._leaving = False
        """Whether the Dealer is closed. It may still have something to send."""
        self._over = False
        self._pause = _RECONNECT_SECONDS[0]
        self._timer: Handle | None = None
        self._line: Line | None = None
        self._looking: Lookup | None = None
        """The question where the host is, while nobody has answered it."""
        self._loop.call_soon(self._connect)

    def send(self, message: Message | Packed, frames: Sequence[Buffer] = ()) -> bool:
        if self._leaving or len(self._waiting) >= self._network.most_waiting:
            return False
        parts = encode(message, frames)
        self.bytes_sent += sum(map(len, parts))
        self._waiting.append(parts)
        if self._line is not None:
            self._line.flush()
        return True

    def push(self, until: float) -> None:
        """Wait until the kernel has taken what was sent, at most to this time of the monotonic clock."""
        if self._line is not None:
            self._line.push(until)

    def close(self) -> None:
        if self._leaving:
            return
        self._leaving = True
        if not self._waiting and (self._line is None or not self._line.ready):
            self.abandon()
            return
        # In place of the timer of the next attempt to connect.
        self._set_timer(self._network.linger_seconds, self.abandon)
        if self._line is not None:
            self._line.finish(self._line.shut)
        else:
            self._loop.call_soon(self._connect)

    def wants(self) -> list[tuple[int, int, Callable[[], None]]]:
        if self._line is None:
            self._connect()
        if self._looking is not None:
            return [(*self._looking.wants, self._looking.ready)]
        return [] if self._line is None else [(*self._line.wants, self._line.progress)]

    def abandon(self) -> None:
        """End the connection at once, whatever was not sent."""
        self._leaving = self._over = True
        self._drop()
        self._set_timer(None)
        self._network.open.discard(self)

    def _connect(self) -> None:
        """Begin to connect, once it is known where the host is."""
        if self._line is not None or self._looking is not None or self._over:
            return
        place = _place_of(self._address)
        if isinstance(place, Target):
            self._dial(place)
            return
        try:
            self._looking = self._network.lookups.find(*place, self._dial)
        except OSError:
            self._later()

    def _dial(self, target: Target | None) -> None:
        """Connect to the target. It goes on when the socket can be written."""
        self._looking = None
        if self._over:
            return
        try:
            sock = None if target is None else _begin(target)
        except OSError:
            sock = None
        if sock is None:
            self._later()
            return
        try:
            self._line = Line(
                self._loop,
                self._loop.call_soon,
                sock,
                incoming_for(self._limits, b"DEALER", sock),
                self._network.buffer,
                self._waiting,
                received=self._take,
                shaken=self._shaken,
                lost=self._lose,
            )
        except OSError:  # the system watches no further descriptor
            sock.close()
            self._later()
            return
        if self._leaving:
            self._line.finish(self._line.shut)
        else:
            self._set_timer(_HANDSHAKE_SECONDS, self._lose)

    def _shaken(self) -> None:
        self._pause = _RECONNECT_SECONDS[0]
        if not self._leaving:
            self._set_timer(None)

    def _take(self, frames: list[Buffer]) -> None:
        if self._leaving:
            return
        self.bytes_received += sum(map(len, frames))
        self._hand_on(frames)

    def _lose(self) -> None:
        """The connection is gone. Connect anew later, or end if the Dealer is closed and has nothing left to say."""
        if not self._leaving and self._line is not None and self._line.ready:
            self._alone_since = time.monotonic()
            self._network.lost()
        self._drop()
        if self._leaving and not self._waiting:
            self.abandon()
        else:
            self._later()

    def _drop(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _later(self) -> None:
        if self._leaving:  # its timer is that of the end
            self._loop.call_later(self._pause, self._connect)
        else:
            self._set_timer(self._pause, self._connect)
            if (now := time.monotonic()) >= self._alone_since + self._network.patience:
                self._alone_since = now
                self._network.lost()
        self._pause = min(2 * self._pause, _RECONNECT_SECONDS[1])

    def _set_timer(self, seconds: float | None, callback: Callable[[], None] = lambda: None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, callback)


def _place_of(address: str) -> tuple[str, int] | Target:
    """The host and the port of a ``tcp://`` address, the target of an ``ipc://`` one."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return Target(socket.AF_UNIX, f"\0{rest[1:]}" if rest.startswith("@") else rest)
    host, _, port = rest.rpartition(":")
    return host, int(port)


def _begin(target: Target) -> socket.socket:
    """A socket that is connecting. Raises OSError."""
    sock = socket.socket(target.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    if target.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # The kernel notices within two minutes that the machine at the other end is gone.
        for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    try:
        sock.connect(target.place)
    except OSError as error:
        # A TCP connection is under way. On ipc the error means that too many others are waiting.
        if error.errno != errno.EINPROGRESS:
            sock.close()
            raise
    return sock
