"""How often a peer is told No: enough to learn from it, too seldom to be kept busy by it."""

from __future__ import annotations

from collections import OrderedDict

BURST = 8
"""Refusals of one peer that are answered at once; one more for every second that passes."""
REMEMBERED = 4096


class Refusals:
    """Counts refusals by peer; ``idle`` are those that wanted to enrol and were one too many."""

    def __init__(self) -> None:
        self.idle: OrderedDict[bytes, None] = OrderedDict()
        self._spent: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def allow(self, peer: bytes, reason: str, now: float) -> bool:
        """Whether to answer. Forgets the peers refused longest ago when there are too many."""
        if reason == "fleet_full":
            self.idle[peer] = None
        spent, since = self._spent.pop(peer, (0.0, now))
        spent = max(0.0, spent - (now - since))
        allowed = spent <= BURST - 1
        self._spent[peer] = (spent + 1 if allowed else spent, now)
        for known in (self._spent, self.idle):
            while len(known) > REMEMBERED:
                known.popitem(last=False)
        return allowed

    def forget(self, peer: bytes) -> None:
        self._spent.pop(peer, None)
        self.idle.pop(peer, None)
