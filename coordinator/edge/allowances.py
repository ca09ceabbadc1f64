"""What the connections of an edge may send, and what peers without a session may send further up together."""

from __future__ import annotations

from fedemu.coordinator.fleet.admission import STRANGERS_BYTES, Admission, Quotas, most_strangers
from fedemu.protocol.errors import ProtocolError, TooMuch, UnknownPeer

PASSED_RATE = 300.0
"""The messages per second of all peers without a session that are passed on, in the long run; twice as many if half of
them name a lease. A coordinator takes about a thousand per second on the one connection of an edge."""
CHANNELS_RATE = 2 * PASSED_RATE
"""The messages per second of all channels of one connection that have no session, in the long run. An edge below passes
on no more."""
STRANGERS_WEIGHT = 10.0
"""A message on a connection without a session counts as so many. An honest one needs a few until it has one."""
LARGEST_REPLY = 2
"""A reply to an ask may have so many times the bytes of the ask's blobs, even if its Work tells of fewer."""
SPARE_UNFINISHED = 2**28
"""The most bytes of unfinished messages that a peer may have sent, where replies are small."""


class Allowances:
    """The token buckets of an edge in a run with ``devices`` devices. ``now`` is a monotonic clock in real seconds."""

    def __init__(self, devices: int = 0) -> None:
        self.channels = most_strangers(devices)
        """The most channels of one connection."""
        self._connections = Admission(devices)
        self._channels = Admission(devices, Quotas(messages_per_second=CHANNELS_RATE))
        self._passed = Admission(0, Quotas(messages_per_second=PASSED_RATE))
        self._leased = Admission(devices, Quotas(messages_per_second=PASSED_RATE))

    @property
    def unfinished(self) -> int:
        """The most bytes of a message that a peer has not ended, at this moment."""
        return max(SPARE_UNFINISHED, 4 * self._connections.largest_reply)

    def asked(self, size: int, reply: int) -> None:
        """An ask begins, whose blobs have ``size`` bytes together. By its Work a reply has ``reply`` bytes."""
        self._connections.asked(max(LARGEST_REPLY * size, reply), 0)

    def offered(self, size: int) -> None:
        """There is a blob of ``size`` bytes that every connection may get."""
        self._connections.asked(0, size)

    def may_get(self, connection: bytes, size: int, now: float) -> bool:
        """Count what is sent for a request of ``size`` bytes of a blob. False if the connection has got too many."""
        return self._connections.may_get(connection, size, now)

    def of_session(self, peer: bytes, size: int, now: float) -> ProtocolError | None:
        """Count a message of a peer that has a session. An error if it has sent too much."""
        return None if self._connections.may_send(peer, size, True, now) else TooMuch()

    def of_stranger(self, peer: bytes, connection: bytes, size: int, now: float) -> ProtocolError | None:
        """Count a message of a peer without a session. ``connection`` is the peer itself, unless that is a channel."""
        if peer == connection:
            may = self._connections.may_send(peer, size, False, now, STRANGERS_WEIGHT)
        else:
            may = self._channels.may_send(connection, size, True, now)
        return None if may else TooMuch()

    def passed(self, frames: int, size: int, leased: bool, now: float) -> ProtocolError | None:
        """Count a message of a peer without a session that is to be passed on.

        The coordinator counts all of them on the one connection of this edge. Those that are ``leased`` ask for a
        device's session, and name a lease of a machine behind this edge: others cannot keep them out.
        """
        if (stopped := too_long(frames, size)) is not None:
            return stopped
        if leased and self._leased.may_send(b"", size, True, now):
            return None
        return None if self._passed.may_send(b"", size, True, now) else TooMuch()

    def forget(self, peer: bytes) -> None:
        """The peer is gone."""
        self._connections.forget(peer)
        self._channels.forget(peer)


def too_long(frames: int, size: int) -> ProtocolError | None:
    """An error if a message of so many frames and bytes is longer than what a peer without a session says."""
    return UnknownPeer() if frames > 1 or size > STRANGERS_BYTES else None
