"""One ZeroMQ socket on an event loop. The loop watches its descriptor, and drains the socket until it is empty.

The descriptor reports changes, not states, and any call on the socket may consume such a report. So the socket is
checked again after every send outside a drain; otherwise messages could stay there unseen.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from fedemu.protocol.codec import Buffer, Limits
from fedemu.protocol.transport.interface import TURN_SECONDS, ReaderLoop

_ZERO_COPY: Final = 64 * 1024
"""Frames of at least this size are not copied when they are sent or received. A copy of a smaller frame is cheaper."""
# These are plain integers, because combining zmq's flags would cost more than sending the frame.
NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)
_DRAIN_MESSAGES: Final = 512
_DRAIN_BYTES: Final = 32 * 2**20
"""After this number of messages or bytes, the loop's other callbacks get their turn."""


class Endpoint(ABC):
    """Drains its socket in fair portions, and counts bytes. Subclasses hand on the messages of their kind of socket."""

    def __init__(
        self, socket: zmq.Socket[bytes], loop: ReaderLoop, limits: Limits, closed: Callable[[Endpoint], None]
    ) -> None:
        self.bytes_received = 0
        self.bytes_sent = 0
        self._socket = socket
        self._closed = closed
        self._most_frames = limits.frames + 2
        # The checks of the methods in Python (routing_id, group) cost as much as the call itself.
        self._send: Callable[..., Any] = super(zmq.Socket, socket).send
        self._receive: Callable[..., Any] = super(zmq.Socket, socket).recv
        self._loop = loop
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._first: Any = None
        """The first frame of the message that was read last."""
        self._overflow: deque[list[Buffer]] = deque()
        self._draining = False
        self._due = False
        self._loop.add_reader(self._descriptor, self._readable)
        self._look_again()

    @abstractmethod
    def _take(self) -> bool:
        """Hand on the next message. Returns False if there is none."""

    def close(self) -> None:
        """Stop watching the socket, and close it. May be called twice."""
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close()
            self._closed(self)

    def _look_again(self) -> None:
        if not self._due and not self._draining:
            self._due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Do what the socket is ready for.

        The question to the socket consumes the report of the descriptor, so everything that is ready must be done now.
        """
        self._due = False
        if self._socket.closed:
            return
        ready = int(self._socket.getsockopt(zmq.EVENTS))
        if ready & _POLLIN:
            self._drain()
        elif ready & _POLLOUT and self._overflow:
            self._flush()

    def _readable(self) -> None:
        if not self._due:  # otherwise the look to come drains, and others have their turn once in between
            self._drain()

    def _drain(self) -> None:
        """Hand on what has arrived. If a callback raises, the rest is drained later."""
        self._draining = True
        emptied = False
        try:
            emptied = self._drain_some()
        finally:
            self._draining = False
            if not self._socket.closed and (self._overflow or not emptied):
                self._look_again()

    def _drain_some(self) -> bool:
        most, until = self.bytes_received + _DRAIN_BYTES, time.monotonic() + TURN_SECONDS
        for _ in range(_DRAIN_MESSAGES):
            if not self._take():
                return True
            if self.bytes_received > most or time.monotonic() > until or self._socket.closed:
                return False
        return False

    def _frames(self) -> list[Buffer]:
        """The frames of the next message, without the last if there are too many. Raises zmq.Again if none came."""
        frame = self._receive(NOBLOCK, False)
        self._first = frame
        frames = [self._buffer(frame)]
        while frame.more:
            frame = self._receive(NOBLOCK, False)
            buffer = self._buffer(frame)
            if len(frames) < self._most_frames:
                frames.append(buffer)
        return frames

    def _buffer(self, frame: zmq.Frame) -> Buffer:
        size = len(frame)
        self.bytes_received += size
        return frame.bytes if size < _ZERO_COPY else frame.buffer

    def _transmit(self, frames: Sequence[Buffer], peer: bytes | None = None) -> None:
        """Queue the frames of one message, or raise before any of them is queued."""
        send = self._send
        try:
            if peer is not None:
                send(peer, _MORE)
            last = len(frames) - 1
            for position, frame in enumerate(frames):
                size = len(frame)
                send(frame, _MORE if position < last else NOBLOCK, size < _ZERO_COPY, False)
                self.bytes_sent += size
        finally:
            if not self._draining:
                self._look_again()

    def _flush(self) -> None:
        """Queue messages of the overflow as long as there is room."""
        while self._overflow:
            try:
                self._transmit(self._overflow[0])
            except zmq.Again:
                return
            self._overflow.popleft()
