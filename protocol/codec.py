"""Messages to frames and back: a MessagePack header, then raw buffers that are never copied.

A ``Decoder`` can be made for any union of messages. For any bytes, decoding ends with an ``Envelope`` or with a
``ProtocolError``, and its memory is in proportion to the bytes that arrived.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgpack  # type: ignore[import-untyped]
from annotated_types import MaxLen
from pydantic import ValidationError

from fedemu.protocol.errors import MalformedMessage, VersionMismatch
from fedemu.protocol.messages import PROTOCOL_VERSION, Down, Message, TensorSpec, Up

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

_CONTAINERS = frozenset((tuple, dict))
_NOT_MESSAGEPACK = (ValueError, TypeError, OverflowError, msgpack.UnpackException)
_UNCHECKED_HEADER = 2048
"""A header of at most this many bytes can claim only a few megabytes of memory, so it is read without a check."""
_LONGEST_ARRAY: Final = 65_536
"""The most elements of an array in a header. The longest are the intervals of a Presence."""
_LARGEST_MAP: Final = 128
"""The most keys of a map in a header. The largest are the metrics of a Result."""
_MESSAGE_DEPTH = 4
"""The levels of the deepest message: the header, its tensors, one tensor, its shape."""
_DETAIL = 300
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
    depth: int = 8
    frames: int = 8192
    frame_bytes: int = 512 * 2**20
    message_bytes: int = 512 * 2**20


def _fields(part: Any) -> dict[str, Any]:
    """The fields of a spec or a reference within a message. MessagePack calls this for types that it does not know."""
    if isinstance(part, Message):
        return part.__dict__
    raise TypeError(f"a message holds a {type(part).__name__}, which MessagePack cannot carry")


def encode(message: Message | Packed, frames: Sequence[Buffer] = ()) -> list[Buffer]:
    """The frames of a message: its header, then ``frames`` as they are. The buffers must not change until sent."""
    if isinstance(message, Packed):
        return [message.header, *frames]
    fields = {"v": PROTOCOL_VERSION, "t": None, **message.__dict__}
    fields["t"] = fields.pop("type")
    return [msgpack.packb(fields, default=_fields), *frames]


class Decoder:
    """Reads the messages of one union. Each message type has a field ``type``, whose default is its tag.

    A message with a field ``tensors`` has one frame per tensor, of exactly the tensor's bytes. Any other message has
    ``raw_frames`` frames.
    """

    def __init__(self, union: Any, limits: Limits = Limits()) -> None:
        self.limits = limits
        self._harmless = min(limits.header_bytes, _UNCHECKED_HEADER)
        # A header that is nested deeper than any message is invalid, so the depth is only checked for invalid headers.
        self._shallow = limits.depth < _MESSAGE_DEPTH
        self._readers: dict[str, tuple[Callable[[Any], Any], int | None, AbstractSet[str], list[tuple[str, int]]]] = {}
        for member in typing.get_args(union) or (union,):
            tag = member.model_fields["type"].default
            declares = "tensors" in member.model_fields
            self._readers[tag] = (
                member.__pydantic_validator__.validate_python,
                None if declares else member.raw_frames,
                member.model_fields.keys() - {"type"},
                _bounded(member),
            )

    def decode(self, frames: Sequence[Buffer]) -> Envelope:
        """The message in ``frames``. Raises MalformedMessage or VersionMismatch, and nothing else."""
        if len(frames) != 1:
            self._measure(frames)
        header = self._header(frames[0])
        version = header.pop("v", None)
        if version != PROTOCOL_VERSION or type(version) is not int:
            raise VersionMismatch(
                f"the message is of protocol version {_shown(version)}, this side speaks {PROTOCOL_VERSION}"
            )
        tag = header.pop("t", None)
        try:
            validate, raw_frames, fields, bounded = self._readers[tag]
        except (KeyError, TypeError):
            raise MalformedMessage("type", f"the message type {_shown(tag)} is not one that this side takes") from None
        if not header.keys() <= fields:
            unknown = next(key for key in header if key not in fields)
            raise MalformedMessage("field", f"{tag} has no field {_shown(unknown)}")
        for name, most in bounded:
            value: Any = header.get(name)
            if type(value) in _CONTAINERS and len(value) > most:
                raise MalformedMessage("field", f"{tag}: {name} has {len(value)} elements, at most {most} are read")
        try:
            message = validate(header)
        except ValidationError as error:
            self._limit_depth(header)
            raise MalformedMessage("field", _explain(tag, error)) from None
        if len(frames) == 1 and (raw_frames == 0 or (raw_frames is None and not message.tensors)):
            return Envelope(message, ())
        buffers = tuple([memoryview(frame) for frame in frames[1:]])
        if raw_frames is None:
            _agree(tag, message.tensors, buffers)
        elif len(buffers) != raw_frames:
            raise MalformedMessage("frames", f"{tag} takes {raw_frames} raw frames, but {len(buffers)} came")
        return Envelope(message, buffers)

    def _header(self, frame: Buffer) -> dict[str, Any]:
        """The header as a dictionary. Raises MalformedMessage if it cannot be read."""
        if len(frame) > self._harmless:
            self._probe(frame)
        try:
            header = msgpack.unpackb(frame, use_list=False, max_array_len=_LONGEST_ARRAY, max_map_len=_LARGEST_MAP)
        except _NOT_MESSAGEPACK as error:
            raise self._unreadable(error) from None
        if type(header) is not dict:
            raise MalformedMessage("encoding", f"the header is a {type(header).__name__}, not a map")
        if self._shallow:
            self._limit_depth(header)
        return header

    def _probe(self, frame: Buffer) -> None:
        """Check a large header without building it: nested arrays could claim memory for elements that do not exist."""
        size = len(frame)
        if size > self.limits.header_bytes:
            raise MalformedMessage("size", f"the header has {size} bytes, at most {self.limits.header_bytes} are read")
        unpacker = msgpack.Unpacker(max_buffer_size=size)
        unpacker.feed(frame)
        try:
            unpacker.skip()
        except _NOT_MESSAGEPACK as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> MalformedMessage:
        if isinstance(error, msgpack.StackError):
            return MalformedMessage("depth", f"the header is nested deeper than {self.limits.depth}")
        if "exceeds max_" in str(error):
            return MalformedMessage("size", f"an array or a map of the header is too long: {str(error)[:_DETAIL]}")
        return MalformedMessage("encoding", f"the header is not MessagePack: {str(error)[:_DETAIL]}")

    def _limit_depth(self, header: dict[str, Any]) -> None:
        """Raise MalformedMessage if the header is nested deeper than the limit."""
        level: Iterable[Any] = (header,)
        for _ in range(self.limits.depth):
            level = [
                child
                for container in level
                for child in (container.values() if type(container) is dict else container)
                if type(child) in _CONTAINERS
            ]
            if not level:
                return
        raise MalformedMessage("depth", f"the header is nested deeper than {self.limits.depth}")

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


def _bounded(member: type[Message]) -> list[tuple[str, int]]:
    """The fields of a message that hold arrays or maps, each with the most elements that it may have.

    They are counted before any element is looked at.
    """
    return [
        (name, rule.max_length)
        for name, field in member.model_fields.items()
        for rule in field.metadata
        if isinstance(rule, MaxLen) and field.annotation is not str
    ]


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


def _explain(tag: str, error: ValidationError) -> str:
    """One sentence about the first wrong field. Many errors are only counted, because a description of each is slow."""
    if error.error_count() > 64:
        return f"{tag}: {error.error_count()} values are wrong"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{tag}: {_shown('.'.join(map(str, first['loc'])))}: {first['msg']}"[:_DETAIL]


def _shown(value: Any) -> str:
    """A value that a peer sent, as a short text for a log line: ASCII, without control characters."""
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


UP: Final = Decoder(Up)
DOWN: Final = Decoder(Down)
