"""How much of a coordinator a machine may take: devices and connections of one key, and what one connection may send.

This is a machine without I/O. ``now`` is a monotonic clock in real seconds. A key is empty on a Router without keys:
then nobody knows which machine a connection belongs to, and there are no quotas.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from fedemu.protocol.blobs.downloads import CHUNK
from fedemu.protocol.errors import RefusedError

BURST_SECONDS: Final = 10
"""A connection may use up at once what it may send in so many seconds."""
STRANGERS_BURST: Final = 200
"""The most messages that a connection without a session may send at once."""
STRANGERS_RATE: Final = 20.0
"""The most messages that it may send per second in the long run."""
STRANGERS_BYTES: Final = 4096
"""The longest message of a connection without a session that is decoded. ``Enroll`` and ``Hello`` are shorter."""
STRANGERS_UNIT: Final = 4096
"""So many bytes of such a connection count as one message; a single message counts as half the burst at most."""
SPARE_BYTES: Final = 64 * 2**20
"""The bytes that a connection may send, or get of blobs, beside what the run needs."""
SPARE_RATE: Final = 2.0**20
"""The bytes per second by which these grow again."""
REPEATS: Final = 8
"""How often a connection may send its reply to an ask, or get a blob. Messages may get lost, so once is too few."""
SPARE_STRANGERS: Final = 256
"""The connections without a session that may be open beside two for each device."""
MOST_METERS: Final = 65_536
"""The most connections whose messages are counted. Those that were counted first are forgotten."""


def most_strangers(devices: int) -> int:
    """The most connections without a session, and the most channels of one connection, in a run of so many devices."""
    return 2 * devices + SPARE_STRANGERS


@dataclass(frozen=True)
class Quotas:
    """What a machine may take at the same time, and how many messages a connection may send per second.

    0 ``devices`` are as many as the run has, and 0 ``connections`` are twice the devices of a key, and 16 more.
    """

    devices: int = 0
    connections: int = 0
    messages_per_second: float = 1000.0


@dataclass(slots=True)
class _Meter:
    """What one connection may still send at the moment ``at``."""

    at: float
    strange: float
    messages: float
    up: float
    down: float
    asked_up: float
    asked_down: float


class Admission:
    """The quotas of the keys, and the token buckets of the connections, of one run with ``devices`` devices.

    The buckets of bytes fill with time, and with each ask by what its replies and its blobs need.
    """

    def __init__(self, devices: int, quotas: Quotas = Quotas()) -> None:
        self.most_devices = quotas.devices or devices
        """The most devices of one key."""
        self.most_connections = quotas.connections or 2 * self.most_devices + 16
        self._rate = quotas.messages_per_second
        self._burst = BURST_SECONDS * self._rate + 4 * devices
        self._keys: dict[bytes, str] = {}
        self._connections: Counter[str] = Counter()
        self._meters: dict[bytes, _Meter] = {}
        self._owners: dict[str | int, _Meter] = {}
        self._owned: dict[bytes, str | int] = {}
        self.largest_reply = 0
        """The bytes of the largest reply that was asked for so far."""
        self._asked_up = self._asked_down = 0.0
        self._most_up = self._most_down = float(SPARE_BYTES)

    def seat(self, peer: bytes, key: str) -> None:
        """The peer gets a session. Raises RefusedError (quota) if its key has too many of them."""
        if not key or peer in self._keys:
            return
        if self._connections[key] >= self.most_connections:
            raise RefusedError(
                "quota",
                f"This machine's key has {self._connections[key]} connections, and may not have more; close some, or "
                "raise runtime.connections_per_key at the coordinator.",
            )
        self._keys[peer] = key
        self._connections[key] += 1

    def unseat(self, peer: bytes) -> None:
        """The session of the peer is over."""
        key = self._keys.pop(peer, None)
        if key is not None:
            self._connections[key] -= 1
            if not self._connections[key]:
                del self._connections[key]

    def asked(self, up: int, down: int) -> None:
        """An ask begins. A reply to it has ``up`` bytes, and its blobs have ``down`` bytes together."""
        self.largest_reply = max(self.largest_reply, up)
        self._asked_up += REPEATS * up
        self._asked_down += REPEATS * down
        self._most_up = max(self._most_up, SPARE_BYTES + REPEATS * up)
        self._most_down = max(self._most_down, SPARE_BYTES + REPEATS * down)

    def recognise(self, peer: bytes, owner: str | int, now: float) -> None:
        """A connection has shown whose it is: it counts on with what the owner's connections have used up.

        ``owner`` is a lease or a device. Otherwise each new connection would begin with full buckets.
        """
        if self._owned.get(peer) == owner:
            return
        kept = self._owners.get(owner)
        if kept is None:
            kept = self._owners[owner] = self._meter(peer, now)
            while len(self._owners) > MOST_METERS:
                del self._owners[next(iter(self._owners))]
        self._meters[peer], self._owned[peer] = kept, owner

    def may_send(self, peer: bytes, size: int, known: bool, now: float, messages: float = 1.0) -> bool:
        """Count a message of ``size`` bytes, or as many. False if the connection has sent too many messages or bytes.

        ``known`` says whether it has a session. Without one, only a few messages are taken, of which a long one counts
        as several. The connection of a machine whose session has ended may send a large reply before it hears of that.
        """
        meter = self._meter(peer, now)
        if known:
            if meter.messages < messages or meter.up < size:
                return False
            meter.messages -= messages
            meter.up -= size
            return True
        taken = min(max(messages, size / STRANGERS_UNIT), STRANGERS_BURST / 2)
        if meter.strange < taken:
            return False
        meter.strange -= taken
        return True

    def may_get(self, peer: bytes, size: int, now: float) -> bool:
        """Count what is sent for a request of ``size`` bytes of a blob. False if the connection has got too many."""
        meter = self._meter(peer, now)
        size = min(size, CHUNK)
        if meter.down < size:
            return False
        meter.down -= size
        return True

    def forget(self, peer: bytes) -> None:
        """The connection is closed. What its owner has used up is kept, unless it is little."""
        self.unseat(peer)
        meter, owner = self._meters.pop(peer, None), self._owned.pop(peer, None)
        if meter is not None and owner is not None and self._owners.get(owner) is meter and self._is_full(meter):
            del self._owners[owner]

    def _is_full(self, meter: _Meter) -> bool:
        """Whether a connection has used up so little that another one may as well begin anew."""
        return meter.messages > self._burst / 2 and meter.up > self._most_up / 2 and meter.down > self._most_down / 2

    def _meter(self, peer: bytes, now: float) -> _Meter:
        """The meter of a connection, with what it has earned until now."""
        meter = self._meters.get(peer)
        if meter is None:
            if len(self._meters) >= MOST_METERS:
                forgotten = next(iter(self._meters))
                del self._meters[forgotten]
                self._owned.pop(forgotten, None)
            meter = self._meters[peer] = _Meter(
                now,
                STRANGERS_BURST,
                self._burst,
                self._most_up,
                self._most_down,
                self._asked_up,
                self._asked_down,
            )
            return meter
        elapsed = now - meter.at
        meter.at = now
        meter.strange = min(STRANGERS_BURST, meter.strange + STRANGERS_RATE * elapsed)
        meter.messages = min(self._burst, meter.messages + self._rate * elapsed)
        meter.up = min(self._most_up, meter.up + SPARE_RATE * elapsed + self._asked_up - meter.asked_up)
        meter.down = min(self._most_down, meter.down + SPARE_RATE * elapsed + self._asked_down - meter.asked_down)
        meter.asked_up, meter.asked_down = self._asked_up, self._asked_down
        return meter
