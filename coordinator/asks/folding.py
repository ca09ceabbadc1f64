"""The payloads of one ask become its reply: sums are taken as replies are accepted, and the rest is kept until the end.

``coordinator/sums`` has the arithmetic. The sums do not depend on the order in which replies are accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fedemu.algorithms.interface import Reducer
from fedemu.coordinator.asks.payload import Payload
from fedemu.coordinator.asks.tensors import Subtree, as_tensor
from fedemu.coordinator.asks.turns import Apart
from fedemu.coordinator.sums.leaf import Leaf
from fedemu.coordinator.sums.partial import PackedPartial, Partial
from fedemu.coordinator.sums.terms import PAYLOADS

MOST_WAITING = 2**28
"""Payloads of so many bytes are folded, even if they are few. Until then they wait in memory."""


def collects(reducers: Mapping[str, Reducer]) -> bool:
    """Whether a reply holds each payload by itself, so that all have to be kept."""
    return any(reducer.kind == "collect" for reducer in reducers.values())


class Folding:
    """Folds accepted payloads in a thread, ``PAYLOADS`` at a time. A folded payload is discarded, unless all are kept.

    They are kept for reducers that ``collect``, and if ``keep`` says so.
    """

    def __init__(
        self, reducers: Mapping[str, Reducer], leaves: Mapping[str, Leaf], apart: Apart, keep: bool = False
    ) -> None:
        """``leaves`` is the form of a payload. Raises ConfigurationError if it has no tensors for a reducer."""
        self.sums = Partial(reducers, leaves)
        self._reducers = reducers
        self._leaves = leaves
        self._apart = apart
        self._keep = keep or collects(reducers)
        self._waiting: list[tuple[Payload, int]] = []
        self._size = sum(leaf.bytes for leaf in leaves.values())
        self._jobs: list[asyncio.Future[None]] = []

    def take(self, payload: Payload, examples: int) -> None:
        """Fold the payload of an accepted reply, now or with the next ones. It must not be taken back."""
        self._waiting.append((payload, examples))
        if len(self._waiting) == PAYLOADS or len(self._waiting) * self._size >= MOST_WAITING:
            self._jobs.append(asyncio.ensure_future(self._apart(self._fold, self._waiting)))
            self._waiting = []

    def unpack(self, packed: PackedPartial) -> Partial:
        """A sum that was taken elsewhere. Raises ValueError if it is not one of these payloads."""
        return self.sums.unpack(packed)

    def merge(self, sums: Partial) -> None:
        """Add what ``unpack`` has found. It must not be taken back."""
        self._jobs.append(asyncio.ensure_future(self._apart(self.sums.merge, sums)))

    async def values(self, payloads: Sequence[Payload]) -> dict[str, Any]:
        """For each key of the reducers a Tree, or a list of Handles if it is ``collect``.

        ``payloads`` are those of all accepted replies in cohort order. Raises ValueError if none was taken.
        """
        await asyncio.gather(*self._jobs)
        found: dict[str, Any] = await self._apart(self._values, payloads)
        return found

    def close(self) -> None:
        """Fold nothing more."""
        self._waiting.clear()
        for job in self._jobs:
            job.cancel()

    def _values(self, payloads: Sequence[Payload]) -> dict[str, Any]:
        self._fold(self._waiting)
        sums = self.sums.finish()
        values: dict[str, Any] = {}
        for key, reducer in self._reducers.items():
            sent = reducer.key or key
            if reducer.kind == "collect":
                values[key] = [Subtree(payload, sent) for payload in payloads]
            else:
                leaves = {name: self._leaves[f"{sent}/{name}"] for name in sums[key]}
                values[key] = {name: as_tensor(array, leaves[name]) for name, array in sums[key].items()}
        return values

    def _fold(self, replies: Sequence[tuple[Payload, int]]) -> None:
        self.sums.fold([payload.load() for payload, _ in replies], [examples for _, examples in replies])
        if not self._keep:
            for payload, _ in replies:
                payload.discard()
