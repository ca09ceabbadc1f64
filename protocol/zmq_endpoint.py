"""One ZeroMQ socket on the asyncio loop: its descriptor is watched, and drained until nothing is left.

The descriptor tells of changes, not of states, and any call on the socket may swallow such news; so after every send
outside of a drain the socket is looked at again, or messages would lie there unseen.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from fedemu.protocol.codec import Buffer, Decoder

_ZERO_COPY: Final = 64 * 1024
"""Frames from this size on are neither copied when sent nor when received; below it a copy is cheaper."""
_DRAIN_MESSAGES: Final = 512
_DRAIN_BYTES: Final = 32 * 2**20
"""After so much the loop's other callbacks get their turn."""


class Endpoint(ABC):
    """Drains its socket fairly and counts bytes; what a message means is left to the kinds of socket."""

    def __init__(self, socket: zmq.Socket[bytes], decoder: Decoder, closed: Callable[[Endpoint], None]) -> None:
        self.bytes_received = 0
        self.bytes_sent = 0
        self._socket = socket
        self._decoder = decoder
        self._closed = closed
        self._most_frames = decoder.limits.frames + 2
        # The checks of the Python-level methods (routing_id, group) cost as much as the call itself.
        self._send_frame: Callable[..., Any] = super(zmq.Socket, socket).send
        self._recv_frame: Callable[..., Any] = super(zmq.Socket, socket).recv
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._draining = False
        self._due = False
        self._loop.add_reader(self._descriptor, self._drain)
        self._look_again()

    @abstractmethod
    def _take(self, frames: list[Buffer]) -> None:
        """Decode the frames of one message and hand it on."""

    @abstractmethod
    def _writable(self) -> None:
        """The socket may take messages again."""

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close()
            self._closed(self)

    def _look_again(self) -> None:
        if not self._due and not self._draining:
            self._due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._due = False
        if not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._drain()

    def _drain(self) -> None:
        """Hand on what has arrived. Whatever a callback raises, the rest is drained later."""
        self._draining = True
        emptied = False
        try:
            emptied = self._drain_some()
        finally:
            self._draining = False
            if not self._socket.closed:
                self._writable()
                if not emptied:
                    self._look_again()

    def _drain_some(self) -> bool:
        start = self.bytes_received
        for _ in range(_DRAIN_MESSAGES):
            frames = self._receive()
            if frames is None:
                return True
            self._take(frames)
            if self._socket.closed or self.bytes_received - start > _DRAIN_BYTES:
                return False
        return False

    def _receive(self) -> list[Buffer] | None:
        """The frames of the next message, None without one; of too many frames the last ones are left out."""
        receive = self._recv_frame
        try:
            frame = receive(zmq.NOBLOCK, False)
        except zmq.Again:
            return None
        frames: list[Buffer] = []
        while True:
            size = len(frame)
            self.bytes_received += size
            if len(frames) < self._most_frames:
                frames.append(frame.bytes if size < _ZERO_COPY else frame.buffer)
            if not frame.more:
                return frames
            frame = receive(zmq.NOBLOCK, False)

    def _transmit(self, frames: Sequence[Buffer]) -> None:
        """Queue the frames of one message, or raise before anything of it is queued."""
        send = self._send_frame
        last = len(frames) - 1
        for position, frame in enumerate(frames):
            size = len(frame)
            more = zmq.SNDMORE if position < last else 0
            send(frame, zmq.NOBLOCK | more, size < _ZERO_COPY, False)
            self.bytes_sent += size
        if not self._draining:
            self._look_again()
