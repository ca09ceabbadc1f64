"""Messages to frames and back: a MessagePack header, then raw buffers that are never copied.

A ``Decoder`` can be made for any union of messages. For any bytes, decoding ends with an ``Envelope`` or with a
``ProtocolError``, and its memory is in proportion to the bytes that arrived.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from fedemu.protocol.errors import MalformedMessage, ProtocolError, VersionMismatch
from fedemu.protocol.messages import PROTOCOL_VERSION, Down, Message, TensorSpec, Up
from fedemu.protocol.wording import an_object

Buffer = bytes | bytearray | memoryview

ITEM_BYTES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""The bytes of one element, by the dtype's name on the wire."""

_VERSION: Final = b"\xa1v" + bytes([PROTOCOL_VERSION])
"""The version in every header that fedemu makes."""
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec for bytes that it cannot decode."""
_DETAIL: Final = 300
"""The most characters of a description in an error."""


class Envelope(NamedTuple):
    """A message and its buffers: one per declared tensor, or the one of a Blob."""

    message: Any
    frames: tuple[memoryview, ...]


class Packed(NamedTuple):
    """A message whose header was encoded before. It is passed on as it is."""

    header: Buffer


@dataclass(frozen=True)
class Limits:
    """The largest message that a receiver accepts. Sizes are in bytes; ``message_bytes`` counts all buffers together.

    The defaults are enough for a Presence of 65,536 intervals (19 bytes each), 8,192 tensors, and a payload of 512 MiB.
    """

    header_bytes: int = 2 * 2**20
    frames: int = 8192
    frame_bytes: int = 512 * 2**20
    message_bytes: int = 512 * 2**20


def _builtin(value: Any) -> Any:
    """The Python float of a value that msgspec does not take, such as a ``numpy.float64``."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"a message holds {an_object(value)}, which MessagePack cannot carry")


_encode = msgspec.msgpack.Encoder(enc_hook=_builtin).encode


def encode(message: Message | Packed, frames: Sequence[Buffer] = ()) -> list[Buffer]:
    """The frames of a message: its header, then ``frames`` as they are. The buffers must not change until sent."""
    return [message.header if isinstance(message, Packed) else _encode(message), *frames]


class _Head(msgspec.Struct):
    """What is looked for in a header that could not be decoded."""

    v: msgspec.Raw = msgspec.Raw()
    t: msgspec.Raw = msgspec.Raw()


_decode_head = msgspec.msgpack.Decoder(_Head).decode
_decode_scalar = msgspec.msgpack.Decoder(str | int | float | bool | None).decode


class Decoder:
    """Reads the messages of one union. The name of a message's class tells its type on the wire.

    A message with a field ``tensors`` has one frame per tensor, of exactly the tensor's bytes. Any other message has
    ``raw_frames`` frames.
    """

    def __init__(self, union: Any, limits: Limits = Limits()) -> None:
        self.limits = limits
        self._decode = msgspec.msgpack.Decoder(union).decode
        members = typing.get_args(union) or (union,)
        self._raw_frames: dict[type[Message], int | None] = {
            member: None if "tensors" in member.__struct_fields__ else member.raw_frames for member in members
        }
        self._tags = {member.__struct_config__.tag for member in members}

    def decode(self, frames: Sequence[Buffer]) -> Envelope:
        """The message in ``frames``. Raises MalformedMessage or VersionMismatch, and nothing else."""
        if len(frames) != 1:
            self._measure(frames)
        header = frames[0]
        if len(header) > self.limits.header_bytes:
            size, most = len(header), self.limits.header_bytes
            raise MalformedMessage("size", f"the header has {size} bytes, at most {most} are read")
        try:
            message = self._decode(header)
        except _UNREADABLE as error:
            raise self._refusal(header, error) from None
        if message.v != PROTOCOL_VERSION or _VERSION not in bytes(header):
            _check_version(_decode_head(header))  # a header without a version would have got the default
        raw_frames = self._raw_frames[type(message)]
        if len(frames) == 1 and (raw_frames == 0 or (raw_frames is None and not message.tensors)):
            return Envelope(message, ())
        buffers = tuple([memoryview(frame) for frame in frames[1:]])
        if raw_frames is None:
            _agree(message.type, message.tensors, buffers)
        elif len(buffers) != raw_frames:
            said = f"{message.type} takes {raw_frames} raw frames, but {len(buffers)} came"
            raise MalformedMessage("frames", said)
        return Envelope(message, buffers)

    def _refusal(self, header: Buffer, error: Exception) -> ProtocolError:
        """Why a header cannot be decoded: the first of encoding, version, type and field that is wrong."""
        try:
            head = _decode_head(header)
            _check_version(head)
        except VersionMismatch as mismatch:
            return mismatch
        except _UNREADABLE as unreadable:
            return MalformedMessage("encoding", f"the header is no map in MessagePack: {_printable(str(unreadable))}")
        tag = _value(head.t)
        if not isinstance(tag, str) or tag not in self._tags:
            return MalformedMessage("type", f"the message type {_shown(tag)} is not one that this side takes")
        wrong, _, place = str(error).partition(" - at `$.")
        where = f"{_shown(place.rstrip('`'))}: " if place else ""
        return MalformedMessage("field", f"{tag}: {where}{_printable(wrong)}"[:_DETAIL])

    def _measure(self, frames: Sequence[Buffer]) -> None:
        """Raise MalformedMessage if the number or the sizes of the frames exceed the limits."""
        limits = self.limits
        if not frames:
            raise MalformedMessage("frames", "the message has no frames")
        if len(frames) - 1 > limits.frames:
            raise MalformedMessage("frames", f"{len(frames) - 1} raw frames came, at most {limits.frames} are read")
        sizes = list(map(len, frames[1:]))
        if max(sizes) > limits.frame_bytes or sum(sizes) > limits.message_bytes:
            raise MalformedMessage(
                "size",
                f"the buffers have {sum(sizes)} bytes and one of them {max(sizes)}, "
                f"at most {limits.message_bytes} and {limits.frame_bytes} are read",
            )


def _check_version(head: _Head) -> None:
    """Raise VersionMismatch if the header has another version, or none."""
    version = _value(head.v)
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the message is of protocol version {_shown(version)}, this side speaks {PROTOCOL_VERSION}"
        )


def _value(raw: msgspec.Raw) -> Any:
    """A number or a text of a header. None stands for none, and for anything else."""
    try:
        return _decode_scalar(raw) if bytes(raw) else None
    except _UNREADABLE:
        return None


def _agree(tag: str, tensors: Sequence[TensorSpec], buffers: Sequence[memoryview]) -> None:
    """Raise MalformedMessage if the declared tensors do not fit the frames."""
    if len(tensors) != len(buffers):
        raise MalformedMessage("tensors", f"{tag} declares {len(tensors)} tensors, but {len(buffers)} frames came")
    names = set()
    for spec, buffer in zip(tensors, buffers, strict=True):
        expected = math.prod(spec.shape) * ITEM_BYTES[spec.dtype]
        if len(buffer) != expected:
            raise MalformedMessage(
                "tensors", f"{tag}: {_shown(spec.name)} needs {expected} bytes, but its frame has {len(buffer)}"
            )
        names.add(spec.name)
    if len(names) != len(tensors):
        raise MalformedMessage("tensors", f"{tag} declares the same tensor name twice")


def _shown(value: Any) -> str:
    """A value that a peer sent, as a short text for a log line: ASCII, without control characters."""
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else an_object(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _printable(text: str) -> str:
    """A text that may repeat what a peer sent, in ASCII and without control characters."""
    return ascii(text)[1:-1][:_DETAIL]


UP: Final = Decoder(Up)
DOWN: Final = Decoder(Down)
