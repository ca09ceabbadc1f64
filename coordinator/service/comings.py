"""Which comings and goings become events. A peer that comes and goes without end must not fill the disk.

This is a machine without I/O. ``now`` is a monotonic clock in real seconds.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

AT_ONCE: Final = 1000
"""So many comings of one device, of one supervisor, or of all edges together may become events at once.

Edges count together, because without keys anybody may call himself an edge.
"""
PER_SECOND: Final = 1.0
"""So many more may become events in each second."""
LEAST_TALES: Final = 1000
"""The comings of so many peers are counted in any case."""


@dataclass(slots=True)
class _Tale:
    """The comings of one peer.

    ``left`` is how many of them could still become events at the moment ``at``. ``untold`` is how many have become none
    since the last one that did.
    """

    left: float
    at: float
    untold: int = 0

    def at_most(self, now: float) -> float:
        """How many comings may become events now."""
        return min(AT_ONCE, self.left + PER_SECOND * (now - self.at))


class Comings:
    """Counts the comings of each peer. The end of a session becomes an event only if its beginning became one.

    A peer is forgotten when it has not come for so long that all its comings may become events again.
    """

    def __init__(self) -> None:
        self._tales: dict[Hashable, _Tale] = {}
        self._most = LEAST_TALES
        """With more tales than these, those of peers that can be forgotten are removed."""
        self._told: set[Hashable] = set()

    def comes(self, session: Hashable, who: Hashable, now: float) -> dict[str, int] | None:
        """A session of the peer ``who`` begins. Returns None if it becomes no event.

        Otherwise it returns further fields for the event: ``untold``, the number of comings of this peer that have
        become no event since the last one that did. If that is 0, there are no further fields.
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
        """A session is over. Returns whether that becomes an event."""
        told = session in self._told
        self._told.discard(session)
        return told
