"""The transport over ZeroMQ: ``tcp://`` between machines, ``ipc://`` within one machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from fedemu.protocol.addresses import require_door
from fedemu.protocol.codec import Buffer, Decoder, Envelope, Limits, Packed, encode
from fedemu.protocol.errors import ConfigurationError, KeyRevoked, ProtocolError
from fedemu.protocol.messages import Message
from fedemu.protocol.transport.connections import Connections
from fedemu.protocol.transport.curve import KEY_CHARACTERS, ClientKeys, KeyGate, ServerKeys
from fedemu.protocol.transport.endpoint import NOBLOCK, Endpoint
from fedemu.protocol.transport.handshakes import BROKEN_OFF, HandshakeWatch
from fedemu.protocol.transport.interface import (
    BOUNDLESS,
    FULL_QUEUE,
    Bounds,
    ReaderLoop,
    Repeated,
    Screen,
    handing_on,
    handing_on_from_peers,
    let_all_pass,
)
from fedemu.protocol.transport.sockets import (
    bound,
    connect,
    enough_sockets,
    make_context,
    unbind,
    unconnected,
)

logger = logging.getLogger(__name__)

_OVERFLOW: Final = 1000
"""The most messages that a Dealer keeps in addition to ZeroMQ's own queue."""


class ZmqNetwork:
    """Routers and Dealers over ZeroMQ, made and used on one event loop. Make none before a fork.

    ``loop`` is that loop; None means the asyncio loop that runs when a Router or a Dealer is made.
    ``close`` waits at most ``linger_seconds`` until the last messages are sent. ``keys`` are those of all Routers, or
    those of the Dealers to one address. If ``watched``, a Dealer that cannot come in is told to its ``rejected``, as a
    HandshakeFailed.
    """

    def __init__(
        self,
        max_sockets: int = 4096,
        linger_seconds: float = 1.0,
        loop: ReaderLoop | None = None,
        keys: ServerKeys | ClientKeys | None = None,
        watched: bool = False,
    ) -> None:
        self._keys = keys
        self._watched = watched
        self._gate: KeyGate | None = None
        self._context = make_context(max_sockets)
        self._loop = loop
        self._linger = int(linger_seconds * 1000)
        self._open: set[Endpoint] = set()

    def bind(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[bytes, Envelope], None],
        rejected: Callable[[bytes, ProtocolError], None],
        screen: Screen = let_all_pass,
        bounds: Bounds = BOUNDLESS,
    ) -> ZmqRouter:
        keys = self._keys if isinstance(self._keys, ServerKeys) else None
        if keys is not None and self._gate is None:
            self._gate = KeyGate(self._context, self._running_loop(), keys)
        socket = bound(self._context, address, decoder.limits, self._linger, keys, bounds.queue)
        closed, loop = self._open.discard, self._running_loop()
        broken = Repeated(logger, BROKEN_OFF) if keys is not None else None
        counted = keys is not None or bounds is not BOUNDLESS
        connections = Connections(socket, loop, bounds, broken) if counted else None
        hand_on = handing_on_from_peers(decoder, received, rejected, screen)
        router = ZmqRouter(socket, loop, decoder.limits, hand_on, rejected, closed, keys, connections)
        self._open.add(router)
        return router

    def connect(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[Envelope], None],
        rejected: Callable[[ProtocolError], None],
    ) -> ZmqDealer:
        keys = self._keys if isinstance(self._keys, ClientKeys) and self._keys.address == address else None
        socket = unconnected(self._context, address, decoder.limits, self._linger, keys)
        loop, watch = self._running_loop(), None
        try:
            if self._watched:
                with enough_sockets():
                    watch = HandshakeWatch(socket, loop, address, keys, rejected)
            connect(socket, address)
        except ConfigurationError:
            if watch is not None:
                watch.close()
            socket.close(0)
            raise
        hand_on = handing_on(decoder, received, rejected)
        dealer = ZmqDealer(socket, loop, decoder.limits, hand_on, self._open.discard, watch)
        self._open.add(dealer)
        return dealer

    def close(self) -> None:
        for endpoint in list(self._open):
            endpoint.close()
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    def _running_loop(self) -> ReaderLoop:
        return self._loop if self._loop is not None else asyncio.get_running_loop()


class ZmqRouter(Endpoint):
    """A ROUTER socket, whose ``send`` returns False if a peer cannot be reached.

    ``keys`` are asked about the key of every message. A message whose key is not approved any more is not read.
    With keys, the name of a peer ends with its key. So nobody becomes another machine's peer by calling his connection
    as that machine called its own.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        loop: ReaderLoop,
        limits: Limits,
        hand_on: Callable[[bytes, Sequence[Buffer]], None],
        rejected: Callable[[bytes, ProtocolError], None],
        closed: Callable[[Endpoint], None],
        keys: ServerKeys | None,
        connections: Connections | None,
    ) -> None:
        super().__init__(socket, loop, limits, closed)
        self._approved = None if keys is None else keys.approved
        self._edges = None if keys is None else keys.edges
        self._connections = connections
        self._revoked: set[bytes] = set()
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._hand_on = hand_on
        self._rejected = rejected
        self._full: set[bytes] = set()
        self._full_queues = Repeated(logger, FULL_QUEUE)

    def send(self, peer: bytes, message: Message | Packed, frames: Sequence[Buffer] = (), again: bool = False) -> bool:
        if self._socket.closed:
            return False
        try:
            self._transmit(encode(message, frames), peer if self._approved is None else peer[:-KEY_CHARACTERS])
        except zmq.Again:
            if peer not in self._full and not again:
                self._full.add(peer)
                self._full_queues.count(peer.hex())
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._full.discard(peer)
            return False
        self._full.discard(peer)
        return True

    def is_sending(self, peer: bytes) -> bool:
        return self._connections is not None and self._connections.is_sending(peer)

    def cut(self, peer: bytes) -> None:
        if self._connections is not None:
            self._connections.cut(peer)

    def look(self) -> None:
        if self._socket.closed:
            return
        require_door(self.address)
        if self._connections is None:
            return
        self._connections.look()
        if self._full:
            self._full.intersection_update(self._connections.peers)
        if self._connections.parting:
            self._loop.call_soon(self._read_last_words)
        if self._approved is not None:
            self._part_from_revoked(self._connections, self._approved)

    def _read_last_words(self) -> None:
        if not self._socket.closed:
            self._drain()

    def _part_from_revoked(self, connections: Connections, approved: Callable[[str], bool]) -> None:
        """Tell the peers whose keys were revoked, and close their connections at the next look."""
        for peer in self._revoked:
            connections.cut(peer)
        verdicts: dict[bytes, bool] = {}
        revoked = set()
        for peer in connections.peers:
            key = peer[-KEY_CHARACTERS:]
            if key not in verdicts:
                verdicts[key] = approved(key.decode("ascii"))
            if not verdicts[key]:
                revoked.add(peer)
                if peer not in self._revoked:
                    self._rejected(peer, KeyRevoked())
        self._revoked = revoked

    def key_of(self, peer: bytes) -> str:
        return "" if self._approved is None else peer[-KEY_CHARACTERS:].decode("ascii")

    def may_be_edge(self, peer: bytes) -> bool:
        return self._edges is None or self._edges(self.key_of(peer))

    def close(self) -> None:
        if not self._socket.closed:
            unbind(self._socket, self.address)
            if self._connections is not None:
                self._connections.close()
        super().close()

    def _take(self) -> bool:
        key = ""
        try:
            if self._approved is None:
                peer = self._receive(NOBLOCK)
            else:
                frame = self._receive(NOBLOCK, False)
                key = str(frame.get("User-Id"))
                peer = frame.bytes + key.encode("ascii")
        except zmq.Again:
            if self._connections is None or not self._connections.parting:
                return False
            self._connections.drained()
            # Those who were told may have sent something, and with it consumed the report of a message that has come.
            return True
        frames, connections = self._frames(), self._connections
        is_there = connections is None or connections.heard(peer, self._first)
        if self._approved is not None and not self._approved(key):
            self._rejected(peer, KeyRevoked())
        else:
            self._hand_on(peer, frames)
        if connections is not None and not is_there:
            connections.last_heard(peer)
        return True


class ZmqDealer(Endpoint):
    """A DEALER socket. Messages for which ZeroMQ's queue has no room wait in a queue of its own, in order."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        loop: ReaderLoop,
        limits: Limits,
        hand_on: Callable[[Sequence[Buffer]], None],
        closed: Callable[[Endpoint], None],
        watch: HandshakeWatch | None,
    ) -> None:
        super().__init__(socket, loop, limits, closed)
        self._hand_on = hand_on
        self._watch = watch

    def send(self, message: Message | Packed, frames: Sequence[Buffer] = ()) -> bool:
        if self._socket.closed:
            return False
        parts = encode(message, frames)
        if not self._overflow:
            try:
                self._transmit(parts)
                return True
            except zmq.Again:
                pass
        if len(self._overflow) >= _OVERFLOW:
            return False
        self._overflow.append(parts)
        return True

    def close(self) -> None:
        if not self._socket.closed:
            self._flush()
            if self._watch is not None:
                self._watch.close()
        super().close()

    def _take(self) -> bool:
        try:
            frames = self._frames()
        except zmq.Again:
            return False
        self._hand_on(frames)
        return True
