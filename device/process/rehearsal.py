"""The rehearsal: a zygote plays a device's life once, with a coordinator and a supervisor that are only pretended.

What happens for the first time takes long, and touches much memory. What the zygote has done once, the processes that
it forks find done, and share.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fedemu.device.bus import TO_SUPERVISOR, Attach, Done, Submit
from fedemu.device.process.birth import Birthplace
from fedemu.device.process.poll_loop import PollLoop
from fedemu.device.process.process import DeviceProcess
from fedemu.protocol.codec import UP, Decoder, encode
from fedemu.protocol.messages import (
    BlobRef,
    Declined,
    Hello,
    Message,
    Presence,
    Proceed,
    Result,
    Scheduled,
    Stop,
    TensorSpec,
    Welcome,
    Work,
)
from fedemu.protocol.transport.direct import DirectNetwork
from fedemu.protocol.transport.zmtp import GREETING, Incoming, framed

LIVES = 4
"""The number of devices that are played."""
ASKS = 12
"""The number of asks in a life. The interpreter adapts code to its use when it has run about this often."""
SECONDS = 2.0
"""A rehearsal ends after this time in any case."""

log = logging.getLogger("fedemu.device")


def rehearse(birthplace: Birthplace) -> None:
    """Play lives of the first devices. Nothing is left of them but what the interpreter has learnt."""
    try:
        for device in range(min(LIVES, len(birthplace.stream))):
            play(birthplace, device)
    except Exception:
        # A device that fails in its real life says so itself.
        log.info("the rehearsal failed; devices begin without it", exc_info=True)


def play(birthplace: Birthplace, device: int) -> list[object]:
    """Play the life of a device. Returns what the pretended coordinator heard."""
    nowhere = replace(birthplace, folder=birthplace.folder / "rehearsal")
    errors: list[Exception] = []

    def fail(error: Exception) -> None:
        errors.append(error)
        loop.stop()

    loop = PollLoop(fail)
    network = DirectNetwork(loop, linger_seconds=0.0)
    coordinator, supervisor = _Coordinator(loop, device), _Supervisor(loop)
    DeviceProcess(
        loop,
        network,
        coordinator.address,
        network,
        supervisor.address,
        Attach(token="", role="process", number=0),
        nowhere,
        [(device, 0)],
        over=lambda code: None,
        crash=lambda device, incarnation: loop.stop(),
    )
    loop.call_later(SECONDS, loop.stop)
    loop.run()
    network.close()
    for side in (coordinator, supervisor):
        side.close()
    loop.close()
    if errors:
        raise errors[0]
    return coordinator.heard


class _Side:
    """The other side of one connection: it listens, and answers each message."""

    def __init__(self, loop: PollLoop, decoder: Decoder, answer: Callable[[Any], list[Message]]) -> None:
        self._loop = loop
        self._decoder = decoder
        self._answer = answer
        self._incoming = Incoming(decoder.limits.frames, decoder.limits.frame_bytes)
        self._line: socket.socket | None = None
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(b"")  # the kernel makes a name that nobody else has
        self._door.listen()
        self.address = f"ipc://@{self._door.getsockname()[1:].decode()}"
        loop.add_reader(self._door.fileno(), self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._door.fileno())
        self._door.close()
        if self._line is not None:
            self._loop.remove_reader(self._line.fileno())
            self._line.close()

    def _accept(self) -> None:
        if self._line is None:
            self._line, _ = self._door.accept()
            self._line.sendall(GREETING)
            self._loop.add_reader(self._line.fileno(), self._read)

    def _read(self) -> None:
        assert self._line is not None
        data = self._line.recv(2**16)
        if not data:  # the device has said goodbye
            self._loop.stop()
            return
        for frames in self._incoming.feed(data):
            for message in self._answer(self._decoder.decode(frames).message):
                self._send(message)
        for answer in self._incoming.answers:
            self._line.sendall(answer)
        self._incoming.answers.clear()

    def _send(self, message: Message) -> None:
        assert self._line is not None
        frames: Sequence[bytes] = [bytes(4)] if isinstance(message, Done) else []
        self._line.sendall(b"".join(framed(encode(message, frames))))


class _Supervisor(_Side):
    def __init__(self, loop: PollLoop) -> None:
        super().__init__(loop, TO_SUPERVISOR, self._obey)

    def _obey(self, message: object) -> list[Message]:
        if not isinstance(message, Submit):
            return []
        return [
            Done(
                device=message.device,
                ask=message.ask,
                examples=1,
                steps=1,
                metrics={"loss": 1.0},
                label_counts=None,
                seconds=0.0,
                wrote_own=False,
                tensors=(TensorSpec(name="delta/weight", dtype="float32", shape=(1,)),),
            )
        ]


class _Coordinator(_Side):
    def __init__(self, loop: PollLoop, device: int) -> None:
        super().__init__(loop, UP, self._obey)
        self.heard: list[object] = []
        self._device = device
        self._round = 0
        self._start = 0.0

    def _obey(self, message: object) -> list[Message]:
        self.heard.append(message)
        match message:
            case Hello():
                return [_welcome(self._device)]
            case Presence(intervals=intervals):
                self._start = intervals[0][0] if intervals else 0.0
                return self._next()
            case Scheduled(event="finish"):
                return [Proceed(ask=message.ask)]
            case Scheduled() | Declined() | Result():
                return self._next()
            case _:
                return []

    def _next(self) -> list[Message]:
        self._round += 1
        if self._round > ASKS:
            return [Stop()]
        return [_work(self._round, self._start)]


def _welcome(device: int) -> Welcome:
    return Welcome(
        device=device, clock="virtual", horizon=1.0, heartbeat_seconds=1.0, patience=1, durable_round=0, elapsed=0.0
    )


def _work(round: int, start: float) -> Work:
    return Work(
        ask=f"{round}.0.0",
        program="train",
        task=0,
        start=start,
        shared=(BlobRef(key="model", digest="0" * 64, size=1),),
        state=None,
        download_bytes=1,
        upload_bytes=1,
        passes=1.0,
        processed=0.0,
        deadline=1.0,
        durable_round=0,
        epoch=0,
        tensors=(),
    )
