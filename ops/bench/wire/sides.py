"""Both ends of the wire benchmark, by our transport and by plain pyzmq. Each end runs in a process of its own.

The receiver acknowledges every quarter of a window, and the sender has at most one window of messages under way. So no
queue overflows, and no side waits for a single message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import zmq

from fedemu.ops.bench.measuring.measure import Sample
from fedemu.protocol.codec import DOWN, UP, Buffer, Envelope, encode
from fedemu.protocol.errors import ProtocolError
from fedemu.protocol.messages import Beat, Blob, Heartbeat, Message, Result, Scheduled, Work
from fedemu.protocol.tensors import pack
from fedemu.protocol.transport.interface import BOUNDLESS
from fedemu.protocol.transport.zeromq import ZmqNetwork

PATIENCE_SECONDS = 60.0
ZERO_COPY = 64 * 1024
"""pyzmq copies a frame of fewer bytes, and hands on the memory of a larger one. The plain side does the same."""


@dataclass(frozen=True)
class Case:
    """``count`` messages in one direction, of which at most ``window`` are under way.

    ``megabytes`` is the size of a message if bytes are counted, or None if messages are. A window has to stay below 500
    messages, half a queue: ZeroMQ tells a sender only after each 500 messages that they were read.
    """

    title: str
    upward: bool
    make: Callable[[], tuple[Message, Sequence[Buffer]]]
    count: int
    window: int
    megabytes: float | None = None


def _heartbeat() -> tuple[Message, Sequence[Buffer]]:
    return Heartbeat(), ()


def _scheduled() -> tuple[Message, Sequence[Buffer]]:
    return Scheduled(ask="17.0.0", event="finish", at=1234.5678), ()


def _result() -> tuple[Message, Sequence[Buffer]]:
    specs, frames = pack({"model/weight": np.ones((625, 1000), np.float32)})
    return Result(ask="17.0.0", examples=100, steps=50, metrics={"loss": 0.5}, tensors=specs), frames


def _work() -> tuple[Message, Sequence[Buffer]]:
    work = Work(
        ask="17.0.0",
        program="train",
        task=0,
        start=1234.5,
        shared=(),
        state="12.0.0",
        download_bytes=19240,
        upload_bytes=19240,
        passes=5.0,
        deadline=600.0,
        durable_round=16,
    )
    return work, ()


def _blob() -> tuple[Message, Sequence[Buffer]]:
    return Blob(digest="0" * 64, offset=0, size=2_500_000), (bytes(2_500_000),)


CASES = {
    "heartbeat": Case("heartbeats, device to coordinator", True, _heartbeat, 100_000, 256),
    "scheduled": Case("Scheduled, device to coordinator", True, _scheduled, 100_000, 256),
    "work": Case("Work, coordinator to device", False, _work, 50_000, 256),
    "result": Case("results of 2.5 MB, device to coordinator", True, _result, 200, 8, 2.5),
    "blob": Case("blobs of 2.5 MB, coordinator to device", False, _blob, 200, 8, 2.5),
}


def ours(role: str, address: str, case: str, count: int) -> Callable[[], Sample]:
    """One end over ``ZmqNetwork``. Each message is encoded, decoded and validated."""
    end = _End(role, address, CASES[case], count)
    runner = asyncio.Runner()
    runner.run(end.open())
    return lambda: runner.run(end.measure())


class _End:
    """One end: it counts and acknowledges what it receives, or sends whenever it gets an acknowledgement."""

    def __init__(self, role: str, address: str, case: Case, count: int) -> None:
        self._router = role == "router"
        self._address = address
        self._sends = case.upward != self._router
        self._message, self._frames = case.make()
        self._acknowledgement: Message = Beat() if self._router else Heartbeat()
        self._count = count
        self._quarter = case.window // 4
        self._unit = case.megabytes or 1.0
        self._send: Callable[[Message, Sequence[Buffer]], bool]
        self._peer = b""
        self._reset()

    async def open(self) -> None:
        self._network = ZmqNetwork()
        self._done = asyncio.Event()
        if self._router:
            # As on the other side, the window bounds the queue.
            bounds = replace(BOUNDLESS, queue=0)
            router = self._network.bind(self._address, UP, self._from_dealer, self._unreadable, bounds=bounds)
            self._send = lambda message, frames: router.send(self._peer, message, frames)
        else:
            dealer = self._network.connect(self._address, DOWN, self._from_router, self._unreadable)
            self._send = dealer.send

    async def measure(self) -> Sample:
        cpu = time.process_time()
        if not self._router:
            if self._sends:
                self._emit(4 * self._quarter)
            else:
                self._send(self._acknowledgement, ())
        await asyncio.wait_for(self._done.wait(), PATIENCE_SECONDS)
        self._done.clear()
        return Sample(self._count * self._unit, self._wall, time.process_time() - cpu)

    def _reset(self) -> None:
        self._received = self._sent = self._acknowledged = 0
        self._began = 0.0

    def _from_dealer(self, peer: bytes, envelope: Envelope) -> None:
        self._peer = peer
        self._from_router(envelope)

    def _from_router(self, envelope: Envelope) -> None:
        if not self._began:
            self._began = time.perf_counter()
        if self._sends:
            self._onward()
        else:
            self._received += 1
            if self._received % self._quarter == 0:
                self._send(self._acknowledgement, ())
            if self._received == self._count:
                self._finish()

    def _onward(self) -> None:
        """Go on after an acknowledgement. The first one that a router gets is only the greeting of its peer."""
        if self._sent == 0:
            self._emit(4 * self._quarter)
            return
        self._acknowledged += self._quarter
        if self._acknowledged == self._count:
            self._finish()
        else:
            self._emit(self._quarter)

    def _emit(self, most: int) -> None:
        for _ in range(min(most, self._count - self._sent)):
            if not self._send(self._message, self._frames):
                raise RuntimeError("a message was not taken although its window was open")
            self._sent += 1

    def _finish(self) -> None:
        self._wall = time.perf_counter() - self._began
        self._reset()
        self._done.set()

    def _unreadable(self, *rejected: bytes | ProtocolError) -> None:
        raise RuntimeError(f"a message was rejected: {rejected[-1]!r}")


def plain(role: str, address: str, case: str, count: int) -> Callable[[], Sample]:
    """One end over plain pyzmq, in a loop that blocks. The same frames are encoded beforehand and never decoded."""
    chosen = CASES[case]
    frames = encode(*chosen.make())
    router = role == "router"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER if router else zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_SECONDS * 1000))
    # A ROUTER whose queue is full drops messages. Here the window bounds the queue.
    socket.set_hwm(0)
    if router:
        socket.bind(address)
    else:
        socket.connect(address)
    sends = chosen.upward != router
    act = _plain_sender if sends else _plain_receiver
    greets = not router and not sends

    def measure() -> Sample:
        cpu = time.process_time()
        if greets:
            socket.send(b"hello")
        began = act(socket, router, frames, count, chosen.window // 4)
        wall = time.perf_counter() - began
        return Sample(count * (chosen.megabytes or 1.0), wall, time.process_time() - cpu)

    return measure


def _plain_receiver(socket: zmq.Socket[bytes], router: bool, frames: list[Buffer], count: int, quarter: int) -> float:
    copy = max(map(len, frames)) < ZERO_COPY
    began = 0.0
    for number in range(1, count + 1):
        parts = socket.recv_multipart(0, copy)
        if not began:
            began = time.perf_counter()
        if number % quarter == 0:
            socket.send_multipart([parts[0], b"more"] if router else [b"more"])
    return began


def _plain_sender(socket: zmq.Socket[bytes], router: bool, frames: list[Buffer], count: int, quarter: int) -> float:
    copy = max(map(len, frames)) < ZERO_COPY
    peer = socket.recv_multipart()[:1] if router else []
    began = time.perf_counter()
    parts = [*peer, *frames]
    sent = acknowledged = 0
    while acknowledged < count:
        for _ in range(min(quarter if sent else 4 * quarter, count - sent)):
            socket.send_multipart(parts, copy=copy)
            sent += 1
        socket.recv_multipart()
        acknowledged += quarter
    return began
