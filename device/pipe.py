"""The messages between a supervisor and its children over pipes.

Each is a length (4 bytes, big-endian), and then the header that the message would have on the wire.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from fedemu.device.bus import LIMITS, FilePath, Lives
from fedemu.protocol.codec import Decoder, encode
from fedemu.protocol.messages import Index, Message, Name, Seconds, Sentence

_LENGTH = 4
AllowedCode = Annotated[tuple[FilePath, ...], Meta(max_length=1024)] | None


class Setup(Message):
    """What all device processes of a machine need to know; the first message to a zygote.

    ``coordinator`` and ``bus`` are addresses. ``keys`` are the public and the secret key of this machine and the public
    key of the coordinator, None without keys. ``shared`` says that the coordinator's address is that of the
    supervisor's relay. ``behaviours`` names a function that opens the devices' behaviours.
    ``allow_code`` is as in ``TrainerSetup``.
    ``experiment`` and ``partition`` are the files of blobs, ``devices`` is the folder of the devices' own folders.
    ``logs`` is the folder for log files, None for the standard error output.
    """

    coordinator: Name
    keys: tuple[Name, Name, Name] | None = None
    shared: bool = False
    bus: Name
    token: Name
    lease: Name
    heartbeat_seconds: Seconds
    patience: Annotated[int, Meta(ge=1)]
    behaviours: FilePath
    allow_code: AllowedCode = ()
    experiment: FilePath
    partition: FilePath
    devices: FilePath
    logs: FilePath | None


class Fork(Message):
    """Start device process ``number``."""

    number: Index
    lives: Lives


class ZygoteReady(Message):
    """The zygote has imported everything, and can fork."""


class Forked(Message):
    """Device process or trainer ``number`` has started, with process id ``pid``."""

    number: Index
    pid: Index


class Ended(Message):
    """A device process or a trainer has ended.

    ``code`` is its exit code, or minus the number of the signal that killed it.
    """

    number: Index
    code: int


class NotForked(Message):
    """The system let no process start for device process or trainer ``number``; ``detail`` says why."""

    number: Index
    detail: Sentence


class Broken(Message):
    """The zygote cannot fork devices; ``detail`` says why."""

    detail: Sentence


class TrainerSetup(Message):
    """Start a trainer, which needs to know this. ``gpu`` is CUDA's name of the only GPU that it sees, None for all.

    ``gpu_share`` is the share of the GPU's memory that it may take, because other trainers have the same GPU.
    ``allow_code`` are the modules and files that the experiment may name; None means any.
    """

    number: Index
    bus: Name
    token: Name
    trainer: FilePath
    experiment: FilePath
    device_type: Name
    gpu: Name | None = None
    gpu_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    allow_code: AllowedCode = ()


TO_ZYGOTE: Final = Decoder(Setup | Fork, LIMITS)
FROM_ZYGOTE: Final = Decoder(ZygoteReady | Forked | NotForked | Ended | Broken)
TO_NURSERY: Final = Decoder(TrainerSetup)
FROM_NURSERY: Final = Decoder(Forked | NotForked | Ended)


def pack_message(message: Message) -> bytes:
    """The bytes of a message as they go into a pipe."""
    header = bytes(encode(message)[0])
    return len(header).to_bytes(_LENGTH, "big") + header


class Unpacker:
    """Cuts the bytes that come out of a pipe into messages."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete with ``data``. Raises ProtocolError for one that cannot be decoded."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH:
            end = _LENGTH + int.from_bytes(self._buffer[:_LENGTH], "big")
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode([bytes(self._buffer[_LENGTH:end])]).message)
            del self._buffer[:end]
        return messages
