"""The connections of one Router: how many there are, which of them hold memory for nothing, and how to close one.

ZeroMQ assembles a message before it hands it on, however many parts it has, and it lets everybody connect. So a process
looks at its own sockets. The kernel tells how many bytes a TCP connection has brought. At an ipc address it tells only
what still waits in the connection; there the growth of this process's memory is divided among those that press.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq

from fedemu.protocol.host.kernel import give_memory_back
from fedemu.protocol.transport.handshakes import BROKEN, EVENTS, Ear
from fedemu.protocol.transport.interface import Bounds, Handle, ReaderLoop, Repeated

LOOK_SECONDS: Final = 1.0
"""The time between two looks at up to a thousand connections. For more connections it is longer in proportion."""
GROWTH: Final = 64 * 2**20
"""If the memory of this process has grown by more bytes than this, strangers are looked at at once."""
WATCH_SECONDS: Final = 0.03
"""The time between two looks at the memory of this process while strangers are connected. One takes a few µs."""
PRESSING: Final = 2**15
"""An ipc connection with so many bytes that wait to be read is in the middle of a large message, or of many."""
BUSY: Final = 2**16
"""A connection that brings so many bytes between two looks brings more than signs of life."""
PAST: Final = 4096
"""Of so many peers is remembered that their connections have gone, because messages of theirs may still be read."""
_RECEIVED: Final = 128
"""The place of the received bytes in the kernel's answer to TCP_INFO."""
_TCP_INFO: Final = 11
_IPPROTO_TCP: Final = 6
_BOTH_WAYS: Final = 2


@dataclass(slots=True)
class Connection:
    """One connection. Times are monotonic. ``peer`` is None before its first message.

    ``inode`` tells its socket from another one that gets the same descriptor. ``base`` is the number of bytes that it
    had brought when it was last seen to have ended a message. ``held`` is the memory that it may have taken since then,
    by what is known of an ipc connection. ``received`` are the bytes that it had brought at the last look, ``begun``
    those of a message without an end. ``sending`` says that it was in the middle of a long message, or of several.
    ``over`` says that it was beyond its bound at the last look, ``going`` that it is being closed.
    """

    descriptor: int
    inode: int
    heard: float
    peer: bytes | None = None
    seen: float = 0.0
    base: int = 0
    held: int = 0
    received: int = 0
    begun: int = 0
    sending: bool = False
    over: bool = False
    going: bool = False


class Connections:
    """Counts the connections of ``socket``, and closes those that break ``bounds``.

    ``broken`` counts those that broke off in the handshake, without those of keys that were refused: ``KeyGate`` logs
    these by name.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        loop: ReaderLoop,
        bounds: Bounds,
        broken: Repeated | None,
    ) -> None:
        self._bounds = bounds
        self._broken = broken
        self._open: dict[int, Connection] = {}
        self._by_peer: dict[bytes, Connection] = {}
        self._past: dict[bytes, None] = {}
        """The last peers with names by ZeroMQ whose connections have gone. It does not give these names again."""
        self._parting: dict[bytes, None] = {}
        """Peers whose connections have gone, and whose last words may still wait to be read."""
        self._silent: dict[int, Connection] = {}
        """Those that have sent no message yet and are not being closed, the oldest first."""
        self._going = 0
        """The number of those that are being closed."""
        self._doubtful: list[Connection] = []
        """Connections that are told to have ended, but still had their socket then."""
        self._strangers = 0
        """The number of connected strangers at the last look, and of the peers that said something first since then."""
        self._due = 0.0
        self._freed = False
        """Whether ZeroMQ frees what a connection held, so that memory can be given back at the next look."""
        self._memory = _resident()
        """The bytes that this process held at the last look. If it has given some back since then, its least."""
        self._loop = loop
        self._watch: Handle | None = None
        self._local = socket.getsockopt_string(zmq.LAST_ENDPOINT).startswith("ipc://")
        self._ear = Ear(socket, loop, EVENTS | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED, self._event)

    @property
    def peers(self) -> list[bytes]:
        """The peers that have sent a message, and have not gone."""
        return list(self._by_peer)

    def close(self) -> None:
        """Stop counting. Must be called before the Router is closed."""
        self._ear.close()
        if self._watch is not None:
            self._watch.cancel()

    def heard(self, peer: bytes, frame: zmq.Frame) -> bool:
        """A whole message of the peer has come; ``frame`` is one of its frames. False if its connection has gone."""
        connection = self._by_peer.get(peer)
        if connection is None:
            if peer in self._past:
                return False  # the descriptor may be that of another connection by now
            try:
                descriptor = int(frame.get("__fd"))
            except (zmq.ZMQError, ValueError):
                return False
            connection = self._accepted(descriptor)
            if connection is None:
                return False
            if connection.peer is not None:
                self._mistaken(connection.peer)
            connection.peer = peer
            self._by_peer[peer] = connection
            self._silent.pop(connection.descriptor, None)
            self._strangers += 1
        connection.heard = time.monotonic()
        return True

    @property
    def parting(self) -> bool:
        """Whether the end of a peer is still to be told."""
        return bool(self._parting)

    def last_heard(self, peer: bytes) -> None:
        """A message whose connection has gone was handled. There may be more of them."""
        self._part(peer)

    def drained(self) -> None:
        """All messages were read that had come. So peers whose connections had gone have said everything.

        ZeroMQ hands on what a connection has brought before it closes it. The end of a peer is told after its last
        words: a farewell would otherwise come from a peer that nobody knows any more.
        """
        parted, self._parting = self._parting, {}
        for peer in parted:
            self._bounds.closed(peer)

    def is_sending(self, peer: bytes) -> bool:
        """Whether a peer is in the middle of a long message, or of several: more came between the last two looks."""
        connection = self._by_peer.get(peer)
        return connection is not None and connection.sending and not connection.going

    def cut(self, peer: bytes) -> None:
        """Close the connection of a peer. An honest one comes back on a new connection."""
        connection = self._by_peer.get(peer)
        if connection is not None:
            self._cut(connection)

    def look(self) -> None:
        """Close the connections that break the bounds. To be called a few times a second, when messages were read."""
        if self._freed:
            self._freed = False
            give_memory_back()  # what is kept would hide the next connection's
        now = time.monotonic()
        self._doubtful = [each for each in self._doubtful if not self._is_gone(each)]
        if self._has_grown() or now >= self._due:
            suspects = self._judge(now)
            self._doubtful = []
            self._due = now if suspects else now + LOOK_SECONDS * max(1.0, len(self._open) / 1000)
        self._keep_watch()

    def _keep_watch(self) -> None:
        """Look at the memory while there are strangers. One on this machine sends a gigabyte between a few looks."""
        if self._watch is None and (self._silent or self._strangers):
            self._watch = self._loop.call_later(WATCH_SECONDS, self._look_at_memory)

    def _look_at_memory(self) -> None:
        self._watch = None
        if self._has_grown() and self._judge(time.monotonic(), strangers_only=True):
            self._due = 0.0
        self._keep_watch()

    def _has_grown(self) -> bool:
        memory = _resident()
        self._memory = min(self._memory, memory)
        return memory >= self._memory + GROWTH

    def _judge(self, now: float, strangers_only: bool = False) -> bool:
        """Close the connections that break the bounds. Returns whether one is suspected of holding too much.

        Without its messages being read, nobody knows whether a peer has ended one. For known peers that is certain only
        a few times a second.
        """
        memory = _resident()
        grown, self._memory = max(0, memory - self._memory), memory
        self._share(grown)
        strangers = []
        self._strangers = 0
        suspects = False
        for connection in list(self._open.values()):
            if self._is_gone(connection):
                continue
            peer = connection.peer
            known = peer is not None and self._bounds.knows(peer)
            if known and strangers_only:
                continue
            self._strangers += not known
            received, unfinished = connection.received, self._unfinished(connection)
            connection.sending = unfinished > connection.begun or connection.received >= received + BUSY
            connection.begun = unfinished
            if unfinished > (self._bounds.most_unfinished() if known else self._bounds.strangers_unfinished):
                suspects = True
                # A message of a known peer may have ended, and wait to be read. A stranger's is too large in any case.
                if connection.over or peer is None:
                    self._end(connection, "unfinished")
                    self._freed = True
                connection.over = True
                continue
            connection.over = False
            if not known:
                strangers.append(connection)
                if now > connection.heard + self._bounds.idle_seconds:
                    self._end(connection, "idle")
        strangers.sort(key=lambda connection: connection.heard)
        for connection in strangers[: max(0, len(strangers) - self._bounds.most_strangers())]:
            self._end(connection, "connections")
        return suspects

    def _event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            connection = self._accepted(value)
            if connection is not None and len(self._open) - self._going > self._bounds.connections:
                # Not the new one: it may be an honest one, which says something soon.
                self._end(next(iter(self._silent.values()), connection), "connections")
            self._keep_watch()
        elif event == zmq.EVENT_DISCONNECTED:
            connection = self._open.get(value)
            # If the socket is there, it is just being closed, or a new one has the descriptor of the one that was.
            if connection is not None and not self._is_gone(connection):
                self._doubtful.append(connection)
        elif self._broken is not None and event in BROKEN:
            self._broken.count()

    def _mistaken(self, peer: bytes) -> None:
        """Messages of two peers name one descriptor: one connection is gone, and the other got its descriptor.

        The peer that was known by it is forgotten. If its connection is the one that lives, its next message says so.
        """
        del self._by_peer[peer]
        if not self._bounds.knows(peer):
            self._bounds.closed(peer)

    def _accepted(self, descriptor: int) -> Connection | None:
        """The connection with this descriptor, None if it has gone already. A message may come before the event."""
        inode = _inode(descriptor)
        known = self._open.get(descriptor)
        if known is not None and known.inode == inode:
            return known
        self._gone(descriptor)
        if inode is None:
            return None
        made = self._open[descriptor] = self._silent[descriptor] = Connection(descriptor, inode, time.monotonic())
        return made

    def _is_gone(self, connection: Connection) -> bool:
        """Whether the connection has no socket any more. If so, it does not count any more."""
        if _inode(connection.descriptor) == connection.inode:
            return False
        if self._open.get(connection.descriptor) is connection:
            self._gone(connection.descriptor)
        return True

    def _gone(self, descriptor: int) -> None:
        connection = self._open.pop(descriptor, None)
        self._silent.pop(descriptor, None)
        if connection is not None and connection.going:
            self._going -= 1
        if connection is not None and connection.peer is not None:
            if self._by_peer.get(connection.peer) is connection:
                del self._by_peer[connection.peer]
            if connection.peer.startswith(b"\0"):
                self._past[connection.peer] = None
                while len(self._past) > PAST:
                    del self._past[next(iter(self._past))]
            self._part(connection.peer)

    def _part(self, peer: bytes) -> None:
        self._parting[peer] = None
        if len(self._parting) > PAST:  # nothing is ever drained in a flood
            self.drained()

    def _unfinished(self, connection: Connection) -> int:
        """The bytes that have come since the connection last ended a message, by what was seen at the looks."""
        connection.received = received = _received(connection.descriptor)
        if connection.heard != connection.seen and connection.peer is not None:
            connection.seen, connection.base, connection.held = connection.heard, received, 0
        return received - connection.base + connection.held

    def _share(self, grown: int) -> None:
        """Divide what the memory of this process has grown by among the ipc connections that press."""
        if not self._local or not grown:
            return
        pressing = [connection for connection in self._open.values() if _waiting(connection.descriptor) >= PRESSING]
        for connection in pressing:
            connection.held += grown // len(pressing)

    def _end(self, connection: Connection, reason: str) -> None:
        if not connection.going:
            self._bounds.ended(reason)
            self._cut(connection)

    def _cut(self, connection: Connection) -> None:
        """Shut the socket down; ZeroMQ then closes it, and frees what it held."""
        self._silent.pop(connection.descriptor, None)
        if not connection.going:
            connection.going = True
            self._going += 1
        if _inode(connection.descriptor) == connection.inode:
            _LIBC.shutdown(connection.descriptor, _BOTH_WAYS)
        else:
            self._gone(connection.descriptor)


_LIBC: Final = ctypes.CDLL(None)
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def _resident() -> int:
    """The bytes of memory that this process holds. 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE
    except OSError:
        return 0


def _inode(descriptor: int) -> int | None:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


def _waiting(descriptor: int) -> int:
    """The bytes that have come and were not read yet. 0 for a connection that is gone."""
    try:
        return int(struct.unpack("=i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0])
    except OSError:
        return 0


def _received(descriptor: int) -> int:
    """The bytes that a TCP connection has brought so far. 0 for another socket, and where the system does not tell."""
    answer = ctypes.create_string_buffer(256)
    size = ctypes.c_uint32(256)
    failed = _LIBC.getsockopt(descriptor, _IPPROTO_TCP, _TCP_INFO, answer, ctypes.byref(size))
    if failed or size.value < _RECEIVED + 8:
        return 0
    return int(struct.unpack_from("=Q", answer, _RECEIVED)[0])
