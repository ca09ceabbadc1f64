"""Blobs on their way from the coordinator to this machine: which chunks to ask for next, without I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from fedemu.protocol.blobs.store import CHUNK, BlobStore
from fedemu.protocol.codec import Buffer
from fedemu.protocol.errors import BlobError
from fedemu.protocol.ids import Digest
from fedemu.protocol.messages import Blob, BlobRef, Need

WINDOW = 4
"""Chunks of one blob that are asked for ahead."""
PATIENCE = 5.0
"""Seconds until a chunk that did not come is asked for again."""
TRIES = 5
"""How often a blob may turn out broken before it is given up."""
MOST_WAITS = 12
"""How often in a row a blob's chunks may fail to come before it is given up."""


class Step(NamedTuple):
    """What to ask for now, which blobs have arrived, and which are given up."""

    needs: list[Need]
    arrived: list[Digest]
    lost: list[tuple[Digest, BlobError]]


@dataclass
class _Fetch:
    size: int
    unasked: deque[int]
    asked: dict[int, float] = field(default_factory=dict)
    broken: int = 0
    waits: int = 0


class Fetches:
    """Every blob that is wanted and not here is fetched at the same time, ``WINDOW`` chunks ahead each."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._fetches: dict[Digest, _Fetch] = {}

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._fetches

    @property
    def due(self) -> float | None:
        """When a chunk has to be asked for again; None with nothing under way."""
        asked = [min(fetch.asked.values()) for fetch in self._fetches.values() if fetch.asked]
        return min(asked) + PATIENCE if asked else None

    def want(self, ref: BlobRef, now: float) -> Step:
        """A blob is needed; nothing is asked for if it is here or under way."""
        digest = Digest(ref.digest)
        if self._store.has(digest):
            return Step([], [digest], [])
        if digest not in self._fetches:
            self._fetches[digest] = _Fetch(ref.size, deque(range(0, max(ref.size, 1), CHUNK)))
        return Step(self._ask(digest, now), [], [])

    def receive(self, blob: Blob, data: Buffer, now: float) -> Step:
        """A chunk came; one that nobody asked for is ignored."""
        digest = Digest(blob.digest)
        fetch = self._fetches.get(digest)
        if fetch is None or fetch.asked.pop(blob.offset, None) is None:
            return Step([], [], [])
        fetch.waits = 0
        try:
            if blob.size != fetch.size:
                raise BlobError(f"the blob {digest} was announced with {fetch.size} bytes but has {blob.size}")
            whole = self._store.receive(digest, blob.offset, blob.size, data)
        except BlobError as error:
            fetch.broken += 1
            if fetch.broken >= TRIES:
                del self._fetches[digest]
                return Step([], [], [(digest, error)])
            fetch.asked.clear()
            fetch.unasked = deque(range(0, max(fetch.size, 1), CHUNK))
            return Step(self._ask(digest, now), [], [])
        if whole:
            del self._fetches[digest]
            return Step([], [digest], [])
        return Step(self._ask(digest, now), [], [])

    def restart(self, now: float) -> Step:
        """The connection is a new one: what was asked on the old one will not come."""
        return self._again(float("inf"), now)

    def tick(self, now: float) -> Step:
        """Ask again for what did not come, unless it was to no avail too often."""
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
                fetch.unasked.appendleft(offset)
            needs += self._ask(digest, now)
        return Step(needs, [], [])

    def _ask(self, digest: Digest, now: float) -> list[Need]:
        fetch = self._fetches[digest]
        needs = []
        while fetch.unasked and len(fetch.asked) < WINDOW:
            offset = fetch.unasked.popleft()
            fetch.asked[offset] = now
            needs.append(Need(digest=digest, offset=offset, length=max(1, min(CHUNK, fetch.size - offset))))
        return needs
