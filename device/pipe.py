"""The messages between a supervisor and its children over pipes: a length, then the message's header."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from fedemu.device.bus import FilePath
from fedemu.protocol.codec import Decoder, encode
from fedemu.protocol.messages import Index, Message, Name, Seconds, Sentence

_LENGTH = 4


class Setup(Message):
    """What all device processes of a machine share; the first message to a zygote."""

    type: Literal["setup"] = "setup"
    coordinator: Name
    bus: Name
    token: Name
    lease: Name
    heartbeat_seconds: Seconds
    patience: Annotated[int, Field(ge=1)]
    behaviours: FilePath
    experiment: FilePath
    partition: FilePath
    devices: FilePath
    """The folder of the devices' own folders."""
    logs: FilePath | None


class Fork(Message):
    """Start process ``number`` with these devices, each as (device, incarnation)."""

    type: Literal["fork"] = "fork"
    number: Index
    lives: Annotated[tuple[tuple[Index, Index], ...], Field(max_length=1_000_000)]


class ZygoteReady(Message):
    """Everything is imported."""

    type: Literal["zygote_ready"] = "zygote_ready"


class Forked(Message):
    type: Literal["forked"] = "forked"
    number: Index
    pid: Index


class Ended(Message):
    """A device process ended; ``code`` is its exit code, or the negative number of the signal that killed it."""

    type: Literal["ended"] = "ended"
    number: Index
    pid: Index
    code: int


class Broken(Message):
    """The zygote can't work: ``detail`` says why."""

    type: Literal["broken"] = "broken"
    detail: Sentence


class TrainerSetup(Message):
    """What a trainer has to know; the only message on its standard input, which stays open as long as it is wanted."""

    type: Literal["trainer_setup"] = "trainer_setup"
    number: Index
    bus: Name
    token: Name
    trainer: FilePath
    experiment: FilePath
    device_type: Name


TO_ZYGOTE: Final = Decoder(Setup | Fork)
FROM_ZYGOTE: Final = Decoder(ZygoteReady | Forked | Ended | Broken)
TO_TRAINER: Final = Decoder(TrainerSetup)


def pack_message(message: Message) -> bytes:
    header = bytes(encode(message)[0])
    return len(header).to_bytes(_LENGTH, "big") + header


class Unpacker:
    """Cuts a stream of bytes into messages."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH:
            end = _LENGTH + int.from_bytes(self._buffer[:_LENGTH], "big")
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode([bytes(self._buffer[_LENGTH:end])]).message)
            del self._buffer[:end]
        return messages
