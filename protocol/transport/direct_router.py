"""A Router on plain sockets, for processes of one machine (``ipc://``), without the ZeroMQ library and its threads."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from fedemu.protocol.addresses import BACKLOG, check_address, reason, refuse_taken, require_door, socket_file
from fedemu.protocol.codec import Buffer, Limits, Packed, encode
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import refusal_of
from fedemu.protocol.messages import Message
from fedemu.protocol.transport.descriptors import Turns
from fedemu.protocol.transport.interface import FULL_QUEUE, Bounds, Handle, Repeated
from fedemu.protocol.transport.line import Line, SocketLoop, incoming_for

logger = logging.getLogger(__name__)

_HANDSHAKE_SECONDS: Final = 10.0
_ACCEPTED_AT_ONCE: Final = 64
_PAUSE_SECONDS: Final = 0.5
"""The wait until connections are accepted again after none could be, for want of descriptors."""


@dataclass(eq=False)
class _Peer:
    """One connection. ``heard`` is the time of its last message, or of its beginning; ``spoken`` tells which."""

    name: bytes
    heard: float
    waiting: deque[list[Buffer]] = field(default_factory=deque)
    spoken: bool = False
    full: bool = False
    line: Line = field(init=False)


class DirectRouter:
    """Listens at an ``ipc://`` address. Its peers are Dealers on plain sockets, or DEALER sockets of ZeroMQ.

    Calls ``over`` with itself when it is closed and has sent all that waited, after ``linger_seconds`` at most.
    """

    def __init__(
        self,
        loop: SocketLoop,
        address: str,
        limits: Limits,
        hand_on: Callable[[bytes, Sequence[Buffer]], None],
        bounds: Bounds,
        linger_seconds: float,
        buffer: memoryview,
        over: Callable[[DirectRouter], None],
    ) -> None:
        self._door, self.address = _listen(address)
        self.bytes_received = 0
        self.bytes_sent = 0
        self._loop = loop
        self._limits = limits
        self._hand_on = hand_on
        self._bounds = bounds
        self._linger = linger_seconds
        self._buffer = buffer
        self._over = over
        self._peers: dict[bytes, _Peer] = {}
        self._names = itertools.count(secrets.randbits(32))
        self._timer: Handle | None = None
        self._closed = False
        self._full_queues = Repeated(logger, FULL_QUEUE)
        self._watch = Turns(loop)
        self._open_door()

    def send(self, peer: bytes, message: Message | Packed, frames: Sequence[Buffer] = (), again: bool = False) -> bool:
        known = self._peers.get(peer)
        if known is None or self._closed:
            return False
        if self._bounds.queue and len(known.waiting) >= self._bounds.queue:
            if not (known.full or again):
                known.full = True
                self._full_queues.count(peer.hex())
            return False
        known.full = False
        parts = encode(message, frames)
        self.bytes_sent += sum(map(len, parts))
        known.waiting.append(parts)
        known.line.flush()
        return True

    def is_sending(self, peer: bytes) -> bool:
        return False

    def cut(self, peer: bytes) -> None:
        if (known := self._peers.get(peer)) is not None:
            known.line.abandon()
            self._part(known)

    def look(self) -> None:
        if not self._closed:
            require_door(self.address)
        now, bounds = time.monotonic(), self._bounds
        strangers = [peer for peer in self._peers.values() if not (peer.spoken and bounds.knows(peer.name))]
        strangers.sort(key=lambda peer: peer.heard)
        too_many = len(strangers) - bounds.most_strangers()
        for place, peer in enumerate(strangers):
            patience = bounds.idle_seconds if peer.line.ready else min(bounds.idle_seconds, _HANDSHAKE_SECONDS)
            if now > peer.heard + patience:
                self._end(peer, "idle")
            elif place < too_many:
                self._end(peer, "connections")

    def key_of(self, peer: bytes) -> str:
        return ""

    def may_be_edge(self, peer: bytes) -> bool:
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._watch.remove_reader(self._door.fileno())
        self._door.close()
        _free(self.address)
        self._timer = self._loop.call_later(self._linger, self.abandon)
        for peer in list(self._peers.values()):
            if peer.line.ready:
                peer.line.finish(partial(self._part, peer))
            else:
                self._part(peer)
        self._rest()

    def wants(self) -> list[tuple[int, int, Callable[[], None]]]:
        """What the connections of a closed Router wait for, as ``direct.Closing`` says."""
        return [(*peer.line.wants, peer.line.progress) for peer in self._peers.values()]

    def abandon(self) -> None:
        """End all connections of a closed Router at once, whatever was not sent."""
        for peer in list(self._peers.values()):
            self._part(peer)

    def _open_door(self) -> None:
        if not self._closed:
            self._watch.add_reader(self._door.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(0 if self._closed else _ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._door.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Nothing is lost: the other side waits.
                logger.warning("no connection can be accepted: %s", refusal_of(error))
                self._watch.remove_reader(self._door.fileno())
                self._loop.call_later(_PAUSE_SECONDS, self._open_door)
                return
            sock.setblocking(False)
            self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        name = b"\0" + (next(self._names) % 2**32).to_bytes(4, "big")
        peer = _Peer(name, time.monotonic())
        try:
            peer.line = Line(
                self._watch,
                self._watch.soon,
                sock,
                incoming_for(self._limits, b"ROUTER", sock),
                self._buffer,
                peer.waiting,
                received=lambda frames: self._take(peer, frames),
                shaken=lambda: None,
                lost=lambda: self._part(peer),
                growing=lambda size: self._check(peer, size),
            )
        except OSError as error:
            logger.warning("a connection cannot be watched: %s", refusal_of(error))
            sock.close()
            return
        self._peers[name] = peer
        if len(self._peers) > self._bounds.connections:
            # Not the new one: it may be an honest one, which says something soon.
            self._end(next((each for each in self._peers.values() if not each.spoken), peer), "connections")

    def _take(self, peer: _Peer, frames: list[Buffer]) -> None:
        if self._closed:
            return
        peer.heard, peer.spoken = time.monotonic(), True
        self.bytes_received += sum(map(len, frames))
        self._hand_on(peer.name, frames)
        if peer.name not in self._peers:
            self._bounds.closed(peer.name)  # what others remember of it since its connection has gone is forgotten

    def _check(self, peer: _Peer, unfinished: int) -> None:
        """A message of a peer has not ended, and has so many bytes by now."""
        known = peer.spoken and self._bounds.knows(peer.name)
        if unfinished > (self._bounds.most_unfinished() if known else self._bounds.strangers_unfinished):
            self._end(peer, "unfinished")

    def _end(self, peer: _Peer, why: str) -> None:
        self._bounds.ended(why)
        self._part(peer)

    def _part(self, peer: _Peer) -> None:
        """Close a connection. What it has sent is still handed on."""
        if self._peers.pop(peer.name, None) is None:
            return
        peer.line.close()
        del peer.line  # peer and line refer to each other; the collector of garbage is to have nothing to find here
        if peer.spoken:
            self._bounds.closed(peer.name)
        self._rest()

    def _rest(self) -> None:
        """End, if this Router is closed and nobody is left."""
        if self._closed and not self._peers and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._watch.close()
            self._over(self)


def _listen(address: str) -> tuple[socket.socket, str]:
    """A socket that listens at an ``ipc://`` address, and its actual address, which the kernel chooses for ``ipc://*``.

    Raises ConfigurationError if this cannot be.
    """
    check_address(address, listening=True)
    path = address.removeprefix("ipc://")
    if path == address:
        raise ConfigurationError(f"cannot listen at {address} without ZeroMQ: it is not of the form ipc://PATH")
    refuse_taken(address)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        _free(address)
        door.bind("" if path == "*" else f"\0{path[1:]}" if path.startswith("@") else path)
        door.listen(BACKLOG)
    except OSError as error:
        door.close()
        raise ConfigurationError(f"cannot listen at {address}: {reason(error)}") from None
    if path == "*":
        address = f"ipc://@{door.getsockname()[1:].decode()}"
    return door, address


def _free(address: str) -> None:
    """Remove the file of an ipc address."""
    if (path := socket_file(address)) is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
