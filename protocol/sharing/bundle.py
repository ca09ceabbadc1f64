"""Bundles: several messages in one, each on a channel of a shared connection. The messages themselves are unchanged.

A bundle begins with a header of its own. The frames of its messages follow, one message after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from fedemu.protocol.codec import Buffer, Decoder, Envelope, Limits, Packed
from fedemu.protocol.errors import MalformedMessage
from fedemu.protocol.messages import Index, Message

MOST_MESSAGES: Final = 4096
"""The most messages of one bundle."""
MOST_FRAMES: Final = 8193
"""The most frames of all messages of a bundle: those of one message with 8,192 buffers."""
MOST_CLOSED: Final = 65_536
"""The most channels that one bundle closes."""
MOST_BYTES: Final = 512 * 1024
"""A bundle that has so many bytes is sent, and a new one is begun."""
_BEGINNINGS: Final = (b"\xa1t\xa6bundle", b"\xa1v\x01\xa1t\xa6bundle")
"""The beginnings that the header of a bundle may have, after the byte that says how many entries it has."""
_TAG: Final = b"\xa1t"
"""The beginning of every header that fedemu makes. The type of the message follows."""


class Bundle(Message):
    """The header of a bundle: the channel of each message, and how many frames it has. ``closed`` channels are over."""

    channels: Annotated[tuple[Index, ...], Meta(max_length=MOST_MESSAGES)]
    frames: Annotated[tuple[Annotated[int, Meta(ge=1, le=MOST_FRAMES)], ...], Meta(max_length=MOST_MESSAGES)]
    closed: Annotated[tuple[Index, ...], Meta(max_length=MOST_CLOSED)] = ()


class _Tagged(msgspec.Struct):
    t: str


_HEADER: Final = Decoder(Bundle)
_TAGGED: Final = msgspec.msgpack.Decoder(_Tagged)


class Part(NamedTuple):
    """One message of a bundle, in frames, and its channel."""

    channel: int
    frames: Sequence[Buffer]


def is_bundle(frames: Sequence[Buffer]) -> bool:
    """Whether a message is a bundle. It is one if its header begins with this type, before or after the version."""
    return bytes(frames[0][1:16]).startswith(_BEGINNINGS)


def parts_of(bundle: Bundle, frames: Sequence[Buffer]) -> Iterator[Part]:
    """The messages of a bundle that ``BundleDecoder`` has decoded, in their order."""
    place = 0
    for channel, count in zip(bundle.channels, bundle.frames, strict=True):
        yield Part(channel, frames[place : place + count])
        place += count


class BundleDecoder(Decoder):
    """Decodes bundles itself, and leaves other messages to ``plain``."""

    def __init__(self, plain: Decoder) -> None:
        self.plain = plain
        self.limits = plain.limits

    def decode(self, frames: Sequence[Buffer]) -> Envelope:
        if not is_bundle(frames):
            return self.plain.decode(frames)
        bundle = _HEADER.decode(frames[:1]).message
        if len(bundle.channels) != len(bundle.frames) or sum(bundle.frames) != len(frames) - 1:
            raise MalformedMessage("frames", f"a bundle of {len(bundle.channels)} messages does not fit its frames")
        return Envelope(bundle, tuple(map(memoryview, frames[1:])))


class Undecoded(Decoder):
    """Decodes nothing: a message is passed on as it came."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def decode(self, frames: Sequence[Buffer]) -> Envelope:
        return Envelope(Packed(bytes(frames[0])), tuple(map(memoryview, frames[1:])))


def tag_of(header: Buffer) -> str:
    """The type of a message by its header, empty if it cannot be read."""
    start = 2 + len(_TAG)
    if len(header) >= start and bytes(header[1 : start - 1]) == _TAG and header[start - 1] & 0xE0 == 0xA0:
        return bytes(header[start : start + (header[start - 1] & 0x1F)]).decode("ascii", "replace")
    try:
        return _TAGGED.decode(header).t
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


class Outbox:
    """The messages that wait to leave in bundles. A bundle is handed out as its header and its frames."""

    def __init__(self) -> None:
        self._channels: list[int] = []
        self._counts: list[int] = []
        self._frames: list[Buffer] = []
        self._closed: list[int] = []
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._channels or self._closed)

    def put(self, channel: int, frames: Sequence[Buffer]) -> list[tuple[Bundle, list[Buffer]]]:
        """Add a message. Returns the bundles that have to be sent now, because they are full."""
        full = len(self._channels) >= MOST_MESSAGES or len(self._frames) + len(frames) > MOST_FRAMES
        sent = self.take() if full or self._bytes >= MOST_BYTES else []
        self._channels.append(channel)
        self._counts.append(len(frames))
        self._frames += frames
        self._bytes += sum(map(len, frames))
        return sent

    def close(self, channel: int) -> None:
        """The channel is over, after the messages that were put before."""
        self._closed.append(channel)

    def take(self) -> list[tuple[Bundle, list[Buffer]]]:
        """What waits. Nothing waits afterwards."""
        if not self:
            return []
        closed = self._closed[:MOST_CLOSED]
        bundle = Bundle(channels=tuple(self._channels), frames=tuple(self._counts), closed=tuple(closed))
        frames, rest = self._frames, self._closed[MOST_CLOSED:]
        self.clear()
        self._closed = rest
        return [(bundle, frames), *self.take()]

    def clear(self) -> None:
        """Forget what waits."""
        self.forget_messages()
        self._closed = []

    def forget_messages(self) -> None:
        """Forget the messages that wait, and not which channels are over."""
        self._channels, self._counts, self._frames, self._bytes = [], [], [], 0
