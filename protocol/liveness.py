"""Which peers have been silent for too long. This is arithmetic only: every call brings the time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import takewhile
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)


class Liveness(Generic[Peer]):
    """A peer is silent when nothing was heard from it for ``interval * patience`` seconds of a monotonic clock.

    Peers are kept in the order in which they were last heard, so a message costs O(1) for a fleet of any size.
    """

    def __init__(self, interval: float, patience: int) -> None:
        if interval <= 0 or patience < 1:
            raise ValueError(f"interval {interval} must be above 0 and patience {patience} at least 1")
        self.timeout = interval * patience
        self._heard: OrderedDict[Peer, float] = OrderedDict()

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._heard

    def heard(self, peer: Peer, now: float) -> None:
        """A message of any kind came from the peer. The peer is watched from now on."""
        self._heard[peer] = now
        self._heard.move_to_end(peer)

    def forget(self, peer: Peer) -> None:
        """Stop watching the peer. An unknown peer is ignored."""
        self._heard.pop(peer, None)

    def quiet(self, now: float) -> list[Peer]:
        """The peers from which nothing was heard for half the time after which they are silent."""
        return [*takewhile(lambda peer: now >= self._heard[peer] + self.timeout / 2, self._heard)]

    def expired(self, now: float) -> list[Peer]:
        """The peers that fell silent, the longest silent first. They are forgotten, so each is returned once."""
        silent: list[Peer] = []
        while self._heard:
            peer, last = next(iter(self._heard.items()))
            if now < last + self.timeout:
                break
            del self._heard[peer]
            silent.append(peer)
        return silent
