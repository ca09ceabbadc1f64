"""One ZMTP connection on a plain socket: it cuts what comes into messages, and sends what waits."""

from __future__ import annotations

import errno
import mmap
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from fedemu.protocol.codec import Buffer, Limits
from fedemu.protocol.host.open_files import open_files
from fedemu.protocol.transport.interface import TURN_SECONDS, ReaderLoop
from fedemu.protocol.transport.outgoing import Outgoing
from fedemu.protocol.transport.passing import receive
from fedemu.protocol.transport.zmtp import MOST_DESCRIPTORS, Incoming, ZmtpViolation

_READ: Final = 256 * 1024
_MOST_MESSAGES: Final = 512
"""After this number of messages the loop's other callbacks get their turn."""


class Watch(Protocol):
    """Tells when a descriptor is ready: an event loop, or ``Descriptors``."""

    def add_reader(self, descriptor: int, callback: Callable[[], object], /) -> object: ...
    def remove_reader(self, descriptor: int, /) -> bool: ...
    def add_writer(self, descriptor: int, callback: Callable[[], object], /) -> object: ...
    def remove_writer(self, descriptor: int, /) -> bool: ...


class SocketLoop(ReaderLoop, Watch, Protocol):
    """The part of an event loop that plain sockets use. Every asyncio loop has it."""


def incoming_for(limits: Limits, kind: bytes, sock: socket.socket) -> Incoming:
    """What cuts the bytes that come on ``sock`` into messages in ``limits``. ``kind`` is the type of the ZeroMQ side.

    Unix sockets take sealed memory, unless this process has hardly any descriptors left for it. Then the kernel would
    drop those that come, and the connection with them; so frames are to come as bytes. The system gives the lowest free
    number to each descriptor, so that of the socket tells how many are in use.
    """
    most_bytes = max(limits.frame_bytes, limits.header_bytes)
    room = sock.fileno() + MOST_DESCRIPTORS < open_files()
    return Incoming(limits.frames + 2, most_bytes, kind, sealed=sock.family == socket.AF_UNIX and room)


def read_buffer() -> memoryview:
    """Memory into which the lines of one loop read, one after the other. Only what is used of it takes memory.

    A new piece of memory for each read would leave holes where it was.
    """
    return memoryview(mmap.mmap(-1, _READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class Line:
    """A connection on ``sock``, which does not block and may still be connecting.

    ``waiting`` are the messages of which nothing was sent, as frames; they outlive the connection. ``buffer`` is shared
    by the lines of a loop. Calls ``received`` with the frames of each message, ``shaken`` once the handshake is over,
    and ``lost`` when the other side is gone and all that it has sent was handed on. ``growing`` is told how many bytes
    have come of a message that has not ended. ``soon`` calls a function in the next turn of the loop.
    """

    def __init__(
        self,
        watch: Watch,
        soon: Callable[[Callable[[], None]], object],
        sock: socket.socket,
        incoming: Incoming,
        buffer: memoryview,
        waiting: deque[list[Buffer]],
        *,
        received: Callable[[list[Buffer]], None],
        shaken: Callable[[], None],
        lost: Callable[[], None],
        growing: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.incoming = incoming
        self._watch = watch
        self._soon = soon
        self._socket = sock
        self._descriptor = sock.fileno()
        self._buffer = buffer
        self._waiting = waiting
        self._received = received
        self._shaken = shaken
        self._lost = lost
        self._growing = growing
        self._outgoing = Outgoing(waiting)
        self._arrived: deque[list[Buffer]] = deque()
        self._sent_all: Callable[[], None] | None = None
        """Called when all is sent, on a line that is finishing."""
        self._delivering = self._writing = self._broken = self._closed = False
        watch.add_reader(self._descriptor, self.read)
        self._watch_writing(True)

    @property
    def ready(self) -> bool:
        """Whether the handshake is over, so that messages are sent."""
        return self.incoming.ready

    @property
    def wants(self) -> tuple[int, int]:
        """The descriptor, and the events of ``select.poll`` that this line waits for."""
        return self._descriptor, select.POLLIN | (select.POLLOUT if self._writing else 0)

    def progress(self) -> None:
        """Do what the descriptor may be ready for."""
        if self._writing:
            self.write()
        self.read()

    def flush(self) -> None:
        """Send what waits, unless the other side is not ready for it."""
        if self.incoming.ready and not self._writing:
            self.write()

    def push(self, until: float) -> None:
        """Send what waits. Wait for room in the kernel, at most to this time of the monotonic clock.

        Nothing is read meanwhile, so no callback is called.
        """
        if not self.incoming.ready or not self._outgoing.begun:
            return
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while self._outgoing.begun and (left := until - time.monotonic()) > 0 and poll.poll(left * 1000):
            self.write()

    def finish(self, sent_all: Callable[[], None]) -> None:
        """Hand on no more messages. Call ``sent_all`` as soon as everything is sent."""
        self._arrived.clear()
        self._sent_all = sent_all
        self.flush()

    def shut(self) -> None:
        """Tell the other side that nothing more comes. It reads what is under way."""
        if not self._closed:
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                self._broken = True

    def close(self) -> None:
        """Let go of the socket at once. What has arrived is still handed on."""
        if not self._closed:
            self._watch_writing(False)
            self._watch.remove_reader(self._descriptor)
            self._socket.close()
            self._closed = True
            self._sent_all = None  # it refers to this line
            self._outgoing.clear()

    def abandon(self) -> None:
        """Let go of the socket at once, and hand on no more messages."""
        self.close()
        self._arrived.clear()

    def read(self) -> None:
        """Read once, and hand on the messages that are complete."""
        if self._closed or self._arrived:  # what has arrived has its turn first
            return
        incoming = self.incoming
        shaking_hands = not incoming.ready
        try:
            if incoming.large is not None:
                size = self._read_into(incoming.large)
                if (whole := incoming.filled(size) if size else None) is not None:
                    self._arrived.append(whole)
                ended = size == 0
            else:
                size = self._read_into(self._buffer)
                self._arrived.extend(incoming.feed(bytes(self._buffer[:size])))
                ended = size == 0
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ZmtpViolation):
            ended = True
        if ended:
            self._arrived.clear()
            self._lost()
            return
        if incoming.answers or (shaking_hands and incoming.ready):
            self._answer(shaking_hands)
        if self._sent_all is not None:
            self._arrived.clear()
        elif self._arrived and not self._delivering:
            self._deliver()
        if not self._closed and (unfinished := incoming.unfinished):
            self._growing(unfinished)

    def _read_into(self, buffer: memoryview) -> int:
        incoming = self.incoming
        if not (incoming.sealed if incoming.ready else incoming.offers_sealed):
            return self._socket.recv_into(buffer)
        size, memories = receive(self._socket, buffer)
        if memories:
            incoming.passed(memories)
        return size

    def write(self) -> None:
        """Send as much of what waits as the kernel takes."""
        if self._broken or self._closed:
            return
        outgoing = self._outgoing
        try:
            outgoing.send(self._socket, self.incoming.ready, self.incoming.sealed)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                # Nobody reads any more, or the kernel lacks memory. What the other side has sent before can still be
                # read, and then its end: if it has not gone, it hears that nothing more comes, and lets go.
                self._broken = True
                outgoing.clear()
                self.shut()
        self._watch_writing(outgoing.begun)
        if self._sent_all is not None and self.incoming.ready and not outgoing.begun and not self._waiting:
            self._sent_all()

    def _answer(self, shaking_hands: bool) -> None:
        """Send what the handshake, or a question of the other side, demands, and then what waits."""
        incoming = self.incoming
        if shaking_hands or not self._outgoing.begun:  # whoever reads nothing gets no more answers to its questions
            self._outgoing.answer(incoming.answers)
        incoming.answers.clear()
        if shaking_hands and incoming.ready:
            self._shaken()
        self.write()

    def _deliver(self) -> None:
        """Hand on what has arrived. If a callback raises, or if there is much, the rest is handed on later."""
        self._delivering = True
        until = time.monotonic() + TURN_SECONDS
        try:
            for _ in range(min(len(self._arrived), _MOST_MESSAGES)):
                if self._arrived:  # a callback may have finished this line
                    self._received(self._arrived.popleft())
                if time.monotonic() > until:
                    break
        finally:
            self._delivering = False
            if self._arrived:
                self._soon(self._deliver)

    def _watch_writing(self, wanted: bool) -> None:
        if wanted == self._writing:
            return
        self._writing = wanted
        if wanted:
            self._watch.add_writer(self._descriptor, self.write)
        else:
            self._watch.remove_writer(self._descriptor)
