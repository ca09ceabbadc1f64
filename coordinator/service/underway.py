"""What is on its way over slow connections: long messages of peers, and blobs that machines fetch.

A peer in the middle of a long message cannot say anything else: its heartbeats wait behind that message. A device
does not answer either while its machine fetches what the work needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fedemu.coordinator.asks.ask import AskMachine
from fedemu.coordinator.fleet.roster import Roster

FETCHING: Final = 10.0
"""A machine that asked for bytes of a blob within so many seconds is fetching it."""


class Underway:
    """Knows what is on its way. ``is_sending`` says whether a long message of a peer is. Times are monotonic."""

    def __init__(self, roster: Roster, is_sending: Callable[[bytes], bool]) -> None:
        self._roster = roster
        self._is_sending = is_sending
        self._fetched: dict[bytes, float] = {}
        """When each connection last asked for bytes of a blob."""

    def fetches(self, peer: bytes, now: float) -> None:
        """A peer has asked for bytes of a blob."""
        self._fetched[self._roster.connection_of(peer)] = now

    def forget(self, peer: bytes) -> None:
        """The connection of a peer is gone."""
        self._fetched.pop(peer, None)

    def heard(self, now: float) -> list[bytes]:
        """The quiet peers in the middle of a long message. The message counts as heard."""
        peers = [peer for peer in self._roster.quiet(now) if self._is_sending(peer)]
        for peer in peers:
            self._roster.heard(peer, now)
        return peers

    def tell(self, machine: AskMachine, now: float) -> None:
        """Tell the ask whose result is on its way, and whose machine is fetching a blob."""
        for device in machine.running:
            peer, holder = self._roster.connected.get(device), self._roster.leases.holder(device)
            fetched = None if holder is None else self._fetched.get(self._roster.connection_of(holder))
            if peer is not None and (self._is_sending(peer) or (fetched is not None and now - fetched < FETCHING)):
                machine.underway(device, now)
