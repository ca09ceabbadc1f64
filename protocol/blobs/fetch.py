"""Blobs on their way from further up to this machine: which chunks to ask for next, without I/O.

``now`` is always the monotonic clock in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from fedemu.protocol.blobs.downloads import CHUNK
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.codec import Buffer
from fedemu.protocol.errors import BlobError, UnwritableError
from fedemu.protocol.ids import Digest
from fedemu.protocol.messages import Blob, BlobRef, Need

WINDOW = 4
"""The number of chunks of one blob that are asked for before the first of them has come."""
LEAST, FIRST = 2**12, 2**14
"""The bytes of the smallest chunk, and of the first one. A slow connection must not be silent for a large one."""
QUICK, SLOW = 1.0, 2.5
"""The chunks to come are larger after one that came within so many seconds, and smaller after one that took longer."""
PATIENCE = 5.0
"""The seconds after which chunks are asked for again if none at all has come."""
TRIES = 5
"""The number of tries after which a blob that arrives broken each time is given up."""
MOST_WAITS = 120
"""A blob is given up if its chunks failed to come more often than this in a row: the other side may fetch it, too."""


class Step(NamedTuple):
    """The requests to send further up now, the blobs that have arrived, and those given up with the reason."""

    needs: list[Need]
    arrived: list[Digest]
    lost: list[tuple[Digest, BlobError]]


@dataclass
class _Fetch:
    """A blob of ``size`` bytes. Ranges in ``again`` have to be asked for once more, bytes from ``next`` on at last.

    ``asked`` are the ranges under way: the offset of each, its length, and when it was asked for. ``refused`` says that
    the other side lacked a blob since: it may be this one.
    """

    size: int
    next: int = 0
    again: deque[tuple[int, int]] = field(default_factory=deque)
    asked: dict[int, tuple[int, float]] = field(default_factory=dict)
    broken: int = 0
    waits: int = 0
    refused: bool = False

    def take(self, most: int) -> tuple[int, int] | None:
        """The next offset and length to ask for; None if all were asked for. An empty blob has one byte to ask for."""
        if self.again:
            offset, length = self.again.popleft()
            if length > most:
                self.again.appendleft((offset + most, length - most))
            return offset, min(most, length)
        if self.next >= max(self.size, 1):
            return None
        offset, length = self.next, max(1, min(most, self.size - self.next))
        self.next += length
        return offset, length

    def forget(self, asked_until: float) -> None:
        """What was asked for by then has to be asked for once more."""
        self.refused = False
        for offset, (length, _) in reversed([each for each in self.asked.items() if each[1][1] <= asked_until]):
            del self.asked[offset]
            self.again.appendleft((offset, length))


class Fetches:
    """The blobs that are wanted and not in ``store``. All are fetched at the same time.

    Chunks come in the order in which they were asked for, so none is lost as long as others come. They are as large as
    the connection is quick.
    """

    def __init__(self, store: BlobStore) -> None:
        self.store = store
        self._fetches: dict[Digest, _Fetch] = {}
        self._length = FIRST
        """The bytes of the chunks that are asked for now."""
        self._came = -math.inf
        """When the latest chunk has come."""

    @property
    def due(self) -> float | None:
        """The time at which a chunk has to be asked for again; None if no chunk is under way."""
        asked = [at for fetch in self._fetches.values() for _, at in fetch.asked.values()]
        return max(min(asked), self._came) + PATIENCE if asked else None

    def want(self, ref: BlobRef, now: float) -> Step:
        """A blob is needed. If it is here, it counts as arrived now.

        If it is under way, it is not asked for again, unless the other side may have refused it.
        """
        digest = Digest(ref.digest)
        if self.store.has(digest):
            return Step([], [digest], [])
        fetch = self._fetches.setdefault(digest, _Fetch(ref.size))
        if fetch.refused:
            fetch.forget(math.inf)
        return Step(self._ask(digest, now), [], [])

    def refused(self) -> None:
        """The other side lacks a blob, and does not say which one. One that is wanted anew is asked for again."""
        for fetch in self._fetches.values():
            fetch.refused = True

    def receive(self, blob: Blob, data: Buffer, now: float) -> Step:
        """A chunk has come; it is ignored if it was not asked for.

        Raises UnwritableError if the disk does not take it. No job of this machine could go on then.
        """
        digest = Digest(blob.digest)
        fetch = self._fetches.get(digest)
        if fetch is None or (asked := fetch.asked.pop(blob.offset, None)) is None:
            return Step([], [], [])
        length, at = asked
        self._came, fetch.waits, fetch.refused = now, 0, False
        self._adapt(length, now - at)
        try:
            if blob.size != fetch.size:
                raise BlobError(f"the blob {digest} was announced with {fetch.size} bytes but has {blob.size}")
            if len(data) < min(length, fetch.size - blob.offset):
                raise BlobError(f"a chunk of the blob {digest} has {len(data)} bytes, which is not all of it")
            whole = self.store.receive(digest, blob.offset, blob.size, data)
        except UnwritableError:
            raise
        except BlobError as error:
            fetch.broken += 1
            if fetch.broken >= TRIES:
                del self._fetches[digest]
                self.store.abandon(digest)
                return Step([], [], [(digest, error)])
            fetch.asked.clear()
            fetch.again.clear()
            fetch.next = 0
            return Step(self._ask(digest, now), [], [])
        if whole:
            del self._fetches[digest]
            return Step([], [digest], [])
        return Step(self._ask(digest, now), [], [])

    def restart(self, now: float) -> Step:
        """The connection is a new one, so ask again for all chunks that have not come on the old one."""
        return Step(self._again(math.inf, now), [], [])

    def tick(self, now: float) -> Step:
        """Ask again for chunks that have not come in time, and give up blobs that failed to come too often."""
        if now < self._came + PATIENCE:
            return Step([], [], [])
        lost: list[tuple[Digest, BlobError]] = []
        for digest, fetch in list(self._fetches.items()):
            if any(at <= now - PATIENCE for _, at in fetch.asked.values()):
                fetch.waits += 1
                if fetch.waits > MOST_WAITS:
                    del self._fetches[digest]
                    self.store.abandon(digest)
                    lost.append((digest, BlobError(f"The coordinator does not send the blob {digest}.")))
        return Step(self._again(now - PATIENCE, now), [], lost)

    def _adapt(self, length: int, seconds: float) -> None:
        """A chunk of so many bytes took so long. One that was asked for before the last change tells nothing new."""
        if length >= self._length and seconds < QUICK:
            self._length = min(2 * length, CHUNK)
        elif length <= self._length and seconds > SLOW:
            self._length = max(length // 2, LEAST)

    def _again(self, asked_until: float, now: float) -> list[Need]:
        """The requests for chunks that have not come, if asked for by ``asked_until``, and for those after them."""
        needs = []
        for digest, fetch in self._fetches.items():
            fetch.forget(asked_until)
            needs += self._ask(digest, now)
        return needs

    def _ask(self, digest: Digest, now: float) -> list[Need]:
        fetch = self._fetches[digest]
        needs = []
        while len(fetch.asked) < WINDOW and (part := fetch.take(self._length)) is not None:
            offset, length = part
            fetch.asked[offset] = length, now
            needs.append(Need(digest=digest, offset=offset, length=length))
        return needs
