"""What connections may send, and the counts of what was refused and closed."""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from fedemu.coordinator.fleet.admission import STRANGERS_BYTES
from fedemu.coordinator.fleet.roster import Roster
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.service.answers import REFUSED_PEERS
from fedemu.protocol.codec import Buffer
from fedemu.protocol.errors import ProtocolError, TooMuch, UnknownPeer
from fedemu.protocol.sharing.hub import FRAMES_OF_A_MESSAGE
from fedemu.protocol.wording import is_milestone

FEW = 10
"""So many refusals for one reason are events of their own."""


class Screening:
    """Looks at every message before it is decoded, by what the roster knows of its connection.

    ``now`` is the clock. ``key_of`` tells the key of a connection, empty without keys. ``cut`` closes a connection.
    """

    def __init__(
        self,
        roster: Roster,
        observers: Observers,
        now: Callable[[], float],
        key_of: Callable[[bytes], str],
        cut: Callable[[bytes], None],
    ) -> None:
        self._roster = roster
        self._observers = observers
        self._now = now
        self._key_of = key_of
        self._cut = cut
        self._purse = secrets.token_bytes(16)
        """Without keys, edges behind which nobody has a place count together: anybody may call himself an edge."""
        self._excessive: OrderedDict[bytes, None] = OrderedDict()
        self._ended: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def screen(self, peer: bytes, frames: Sequence[Buffer]) -> ProtocolError | None:
        """An error for a message beyond what its connection may send, or for a long one of a peer without session."""
        known = self._roster.has_place(peer)
        size = len(frames[0]) if len(frames) == 1 else sum(map(len, frames))
        # What a channel says before it has a session counts for its connection, which could open others without end.
        payer = peer if known else self._roster.connection_of(peer)
        messages = 1 + (len(frames) - 1) / FRAMES_OF_A_MESSAGE
        if (stopped := self.charge(payer, size, messages, shared=payer != peer)) is not None:
            return stopped
        if known or (len(frames) == 1 and size <= STRANGERS_BYTES):
            return None
        return UnknownPeer()

    def charge(self, connection: bytes, size: int, messages: float, shared: bool = True) -> ProtocolError | None:
        """Count what came on a connection. An error if that is more than it may send.

        ``shared`` says that it came in a bundle.
        """
        known = self._roster.has_place(connection)
        if shared and not known and connection in self._roster.stations:
            connection, known = self._key_of(connection).encode() or self._purse, True
        if self._roster.admission.may_send(connection, size, known, self._now(), messages):
            return None
        return TooMuch()

    def part_from(self, peer: bytes) -> None:
        """Close a connection that sends or wants more than a run needs. An honest device would come back."""
        if peer in self._excessive:
            self._observers.rejected(TooMuch.reason)
            return
        self._excessive[peer] = None
        while len(self._excessive) > REFUSED_PEERS:
            self._excessive.popitem(last=False)
        self.ended(TooMuch.reason)
        self._cut(peer if self._roster.knows(peer) else self._roster.connection_of(peer))

    def ended(self, reason: str) -> None:
        """Count a connection that was closed. An event tells of the 1st, 10th, 100th and so on."""
        self._ended[reason] += 1
        count = self._ended[reason]
        self._observers.rejected(reason)
        if is_milestone(count):
            self._observers.event("connections_closed", reason=reason, connections=count)

    def refuses(self, counted: str) -> int:
        """Count something that a peer was refused, or that a peer itself refuses to do.

        Returns the count if it is to become an event, as the first few are, and then the 10th, 100th and so on. Returns
        0 if it is not.
        """
        self._observers.rejected(counted)
        self._refused[counted] += 1
        count = self._refused[counted]
        return count if count < FEW or is_milestone(count) else 0

    def refused(self, reason: str) -> None:
        """Count what a peer was refused. It becomes an event if ``refuses`` says so."""
        if count := self.refuses(reason):
            self._observers.event("refusal", reason=reason, count=count)

    def forget(self, peer: bytes) -> None:
        """Remember nothing of a connection that is gone."""
        self._roster.admission.forget(peer)
        self._excessive.pop(peer, None)
