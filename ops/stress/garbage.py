"""Broken messages, as a stranger may send them."""

from __future__ import annotations

import random

import msgpack  # type: ignore[import-untyped]

from fedemu.protocol.messages import PROTOCOL_VERSION


def broken_message(chance: random.Random) -> list[bytes]:
    """One to four frames of random bytes. Some begin with a header that names a type and lacks the rest."""
    frames = [chance.randbytes(chance.choice((0, 1, 7, 60, 2000))) for _ in range(chance.randint(1, 4))]
    if chance.random() < 0.3:
        frames[0] = msgpack.packb({"v": PROTOCOL_VERSION, "t": chance.choice(("result", "hello", "work"))})
    return frames
