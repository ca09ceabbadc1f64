"""Which comings and goings events tell of: whoever comes and goes without end must not fill the disk.

This is a machine without I/O. ``now`` is a monotonic clock in real seconds.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

AT_ONCE: Final = 1000
"""Events tell of so many comings of one device, of one supervisor, and of all edges together, at once.

Without keys, anybody may call himself an edge.
"""
PER_SECOND: Final = 1.0
"""So many more are told in each second."""
LEAST_TALES: Final = 1000
"""So many who come are remembered in any case."""


@dataclass(slots=True)
class _Tale:
    """How many comings may be told at the moment ``at``, and how many were not since the last one that was."""

    left: float
    at: float
    untold: int = 0

    def at_most(self, now: float) -> float:
        """How many comings may be told now."""
        return min(AT_ONCE, self.left + PER_SECOND * (now - self.at))


class Comings:
    """Counts comings by who comes, and remembers the sessions of which an event told: only their goings are told.

    Whoever has not come for so long that its count is full again is forgotten.
    """

    def __init__(self) -> None:
        self._tales: dict[Hashable, _Tale] = {}
        self._most = LEAST_TALES
        """With more tales than these, those that tell nothing are looked for."""
        self._told: set[Hashable] = set()

    def comes(self, session: Hashable, who: Hashable, now: float) -> dict[str, int] | None:
        """A session begins. None if no event tells of it, otherwise what the event adds.

        It adds ``untold``: how many comings of ``who`` no event has told of since the last one. With 0 it adds nothing.
        """
        if len(self._tales) > self._most:
            self._tales = {
                each: tale for each, tale in self._tales.items() if tale.untold or tale.at_most(now) < AT_ONCE
            }
            self._most = max(LEAST_TALES, 2 * len(self._tales))
        tale = self._tales.setdefault(who, _Tale(AT_ONCE, now))
        tale.left, tale.at = tale.at_most(now), now
        if tale.left < 1:
            tale.untold += 1
            self._told.discard(session)
            return None
        tale.left -= 1
        untold, tale.untold = tale.untold, 0
        self._told.add(session)
        return {"untold": untold} if untold else {}

    def goes(self, session: Hashable) -> bool:
        """A session is over. Returns whether an event tells of it."""
        told = session in self._told
        self._told.discard(session)
        return told
