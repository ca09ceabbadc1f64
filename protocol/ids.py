"""The identifiers that every layer shares: devices, asks and digests."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple, NewType

DeviceId = NewType("DeviceId", int)
"""The index of a device in the fleet, from 0."""

Digest = NewType("Digest", str)
"""A SHA-256 in lower-case hexadecimal, 64 characters."""


class AskId(NamedTuple):
    """The name of one ask: the round, its attempt, and the position among the asks of that attempt, from 0.

    On the wire and in file names it is written ``round.attempt.ordinal``.
    """

    round: int
    attempt: int
    ordinal: int

    def __str__(self) -> str:
        return f"{self.round}.{self.attempt}.{self.ordinal}"

    @classmethod
    def parse(cls, text: str) -> AskId:
        """Read ``round.attempt.ordinal``. Raises ValueError for any other text."""
        parts = text.split(".")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
            raise ValueError(f"{text!r} is not of the form round.attempt.ordinal")
        return cls(*map(int, parts))


def digest_of(*parts: bytes | bytearray | memoryview) -> Digest:
    """The SHA-256 of buffers, one after the other."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return Digest(found.hexdigest())


def digest_of_file(path: Path) -> Digest:
    """The SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return Digest(hashlib.file_digest(file, "sha256").hexdigest())
