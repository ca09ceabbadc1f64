"""The messages of a page for its viewers: a ring of the last ones, from which each viewer reads at its own pace.

A viewer has no queue of its own. If it is so slow that the ring has overtaken it, it gets a fresh snapshot.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from typing import Any

from fedemu.coordinator.record.json_lines import plain

KEPT = 256
"""The number of last messages that a viewer can catch up on."""


class Stream:
    """The messages of all runs, numbered from 1. ``name`` distinguishes the numbers of this process from others."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(4)
        self._ring: deque[bytes] = deque(maxlen=KEPT)
        self._last = 0
        self._news: asyncio.Event = asyncio.Event()

    @property
    def last(self) -> int:
        """The number of the last message."""
        return self._last

    def add(self, event: str, message: dict[str, Any]) -> None:
        """Add a message of the kind ``event``. All viewers that wait wake up."""
        self._last += 1
        self._ring.append(frame(event, message, self.id_of(self._last)))
        self._news.set()
        self._news = asyncio.Event()

    def id_of(self, number: int) -> str:
        """The id of a message, as viewers send it back after a lost connection."""
        return f"{self.name}-{number}"

    def number_of(self, id: str) -> int | None:
        """The number of the message with this id. None if it is not of this stream."""
        name, _, number = id.partition("-")
        return int(number) if name == self.name and number.isdecimal() and len(number) < 16 else None

    def after(self, number: int) -> list[bytes] | None:
        """The messages after this one. None if some of them are gone, or if it has not been sent yet."""
        behind = self._last - number
        if behind < 0 or behind > len(self._ring):
            return None
        return list(self._ring)[len(self._ring) - behind :]

    async def news(self, seconds: float) -> None:
        """Return when there is another message, or after ``seconds``."""
        try:
            await asyncio.wait_for(self._news.wait(), seconds)
        except TimeoutError:
            return


def frame(event: str, message: dict[str, Any], id: str = "") -> bytes:
    """A message as a server-sent event. One without an ``id`` is not where a viewer goes on."""
    try:
        text = json.dumps(message, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a file of the run that was edited by hand has a number that JSON does not know
        text = json.dumps(plain(message), separators=(",", ":"), allow_nan=False)
    place = f"id: {id}\n" if id else ""
    return f"event: {event}\n{place}data: {text}\n\n".encode()
