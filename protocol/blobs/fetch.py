"""Blobs on their way from further up to this machine: which chunks to ask for next, without I/O.

``now`` is always the monotonic clock in seconds.
"""

from __future__ import annotations

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
PATIENCE = 5.0
"""The seconds after which a chunk that has not come is asked for again."""
TRIES = 5
"""The number of tries after which a blob that arrives broken each time is given up."""
MOST_WAITS = 12
"""A blob is given up if its chunks failed to come more often than this in a row."""


class Step(NamedTuple):
    """The requests to send to the coordinator now, the blobs that have arrived, and those given up with the reason."""

    needs: list[Need]
    arrived: list[Digest]
    lost: list[tuple[Digest, BlobError]]


@dataclass
class _Fetch:
    """A blob of ``size`` bytes. Offsets in ``again`` have to be asked for once more, those from ``next`` on at last."""

    size: int
    next: int = 0
    again: deque[int] = field(default_factory=deque)
    asked: dict[int, float] = field(default_factory=dict)
    broken: int = 0
    waits: int = 0

    def take(self) -> int | None:
        """The next offset to ask for; None if all have been asked for. An empty blob has one, too."""
        if self.again:
            return self.again.popleft()
        if self.next >= max(self.size, 1):
            return None
        self.next += CHUNK
        return self.next - CHUNK


class Fetches:
    """The blobs that are wanted and not here. All are fetched at the same time."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._fetches: dict[Digest, _Fetch] = {}

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._fetches

    @property
    def due(self) -> float | None:
        """The time at which a chunk has to be asked for again; None if no chunk is under way."""
        asked = [min(fetch.asked.values()) for fetch in self._fetches.values() if fetch.asked]
        return min(asked) + PATIENCE if asked else None

    def want(self, ref: BlobRef, now: float) -> Step:
        """A blob is needed. If it is here, it counts as arrived now. If it is under way, it is not asked for again."""
        digest = Digest(ref.digest)
        if self._store.has(digest):
            return Step([], [digest], [])
        if digest not in self._fetches:
            self._fetches[digest] = _Fetch(ref.size)
        return Step(self._ask(digest, now), [], [])

    def receive(self, blob: Blob, data: Buffer, now: float) -> Step:
        """A chunk has come; it is ignored if it was not asked for.

        Raises UnwritableError if the disk does not take it. No job of this machine could go on then.
        """
        digest = Digest(blob.digest)
        fetch = self._fetches.get(digest)
        if fetch is None or fetch.asked.pop(blob.offset, None) is None:
            return Step([], [], [])
        fetch.waits = 0
        try:
            if blob.size != fetch.size:
                raise BlobError(f"the blob {digest} was announced with {fetch.size} bytes but has {blob.size}")
            if len(data) < min(CHUNK, fetch.size - blob.offset):
                raise BlobError(f"a chunk of the blob {digest} has {len(data)} bytes, which is not all of it")
            whole = self._store.receive(digest, blob.offset, blob.size, data)
        except UnwritableError:
            raise
        except BlobError as error:
            fetch.broken += 1
            if fetch.broken >= TRIES:
                del self._fetches[digest]
                self._store.abandon(digest)
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
        return self._again(float("inf"), now)

    def tick(self, now: float) -> Step:
        """Ask again for chunks that have not come in time, and give up blobs that failed to come too often."""
        lost: list[tuple[Digest, BlobError]] = []
        for digest, fetch in list(self._fetches.items()):
            if any(asked <= now - PATIENCE for asked in fetch.asked.values()):
                fetch.waits += 1
                if fetch.waits > MOST_WAITS:
                    del self._fetches[digest]
                    self._store.abandon(digest)
                    lost.append((digest, BlobError(f"The coordinator does not send the blob {digest}.")))
        return Step(self._again(now - PATIENCE, now).needs, [], lost)

    def _again(self, asked_until: float, now: float) -> Step:
        needs = []
        for digest, fetch in self._fetches.items():
            for offset in [offset for offset, asked in fetch.asked.items() if asked <= asked_until]:
                del fetch.asked[offset]
                fetch.again.appendleft(offset)
            needs += self._ask(digest, now)
        return Step(needs, [], [])

    def _ask(self, digest: Digest, now: float) -> list[Need]:
        fetch = self._fetches[digest]
        needs = []
        while len(fetch.asked) < WINDOW and (offset := fetch.take()) is not None:
            fetch.asked[offset] = now
            needs.append(Need(digest=digest, offset=offset, length=max(1, min(CHUNK, fetch.size - offset))))
        return needs
