"""Large frames as sealed memory, whose descriptors go over a Unix socket beside the bytes of a message.

Such a frame is copied once, however many processes pass it on, and wakes nobody for each part that a socket can hold.
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from fedemu.protocol.codec import Buffer
from fedemu.protocol.host.sealed import adopt, place_of, seal
from fedemu.protocol.transport.zmtp import MOST_DESCRIPTORS, PLACE, SMALL, ZmtpViolation, framed

_ANCILLARY: Final = socket.CMSG_SPACE(MOST_DESCRIPTORS * array("i").itemsize)


class Handed(NamedTuple):
    """A message as it is sent: ``pieces`` of bytes, and beside the first of them ``descriptors`` of sealed memory.

    ``frames`` are those of the message. They are to be kept until the descriptors are sent.
    """

    pieces: list[Buffer]
    descriptors: list[int]
    frames: list[Buffer]


def has_large(message: Sequence[Buffer]) -> bool:
    """Whether a message has frames that may go as sealed memory."""
    return any(len(frame) >= SMALL for frame in message)


def with_large_ones_sealed(message: Sequence[Buffer]) -> list[Buffer]:
    """The frames of a message, of which the large ones lie in sealed memory if there is room for them."""
    frames = list(message)
    large = {position: memoryview(frame) for position, frame in enumerate(frames) if len(frame) >= SMALL}
    fresh = {position: frame for position, frame in large.items() if place_of(frame) is None}
    if fresh and (copies := seal([*fresh.values()])) is not None:
        for position, copy in zip(fresh, copies, strict=True):
            frames[position] = copy
    return frames


def handed(message: Sequence[Buffer]) -> Handed:
    """A message for a side that takes sealed memory. Large frames that cannot be sealed go as bytes."""
    frames = with_large_ones_sealed(message)
    descriptors: list[int] = []
    places: list[bytes | None] = [None] * len(frames)
    for position, frame in enumerate(frames):
        if len(frame) < SMALL or (place := place_of(memoryview(frame))) is None:
            continue
        if place.descriptor not in descriptors:
            if len(descriptors) == MOST_DESCRIPTORS:
                continue
            descriptors.append(place.descriptor)
        places[position] = PLACE.pack(descriptors.index(place.descriptor), place.offset, len(frame))
    return Handed(framed(frames, places), descriptors, frames)


def send(sock: socket.socket, pieces: list[memoryview], descriptors: Sequence[int]) -> int:
    """Send pieces, and descriptors beside the first byte. Returns how many bytes were sent. Raises OSError."""
    return sock.sendmsg(pieces, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))])


def receive(sock: socket.socket, buffer: memoryview) -> tuple[int, list[memoryview]]:
    """Read once into ``buffer``. Returns how many bytes came, and the sealed memory that came beside them.

    Raises OSError, and ZmtpViolation for descriptors that are none of sealed memory.
    """
    size, beside, flags, _ = sock.recvmsg_into([buffer], _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    if not beside and not flags & socket.MSG_CTRUNC:
        return size, []
    descriptors = array("i")
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    memories, reason = [], "too many descriptors came at once" if flags & socket.MSG_CTRUNC else ""
    for descriptor in descriptors:
        try:
            memories.append(adopt(descriptor))
        except (OSError, ValueError) as error:
            reason = str(error)
    if reason:
        raise ZmtpViolation(reason)
    return size, memories
