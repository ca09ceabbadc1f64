"""Who is behind an edge, and when people are told of it."""

from __future__ import annotations

from collections.abc import Callable

from fedemu.protocol.wording import counted

QUIET_SECONDS = 2.0
"""People are told how many there are when the numbers have not changed for so long."""


class Behind:
    """The machines and devices behind an edge, by their peers. ``told`` gets a sentence when their number changed."""

    def __init__(self, told: Callable[[str], None]) -> None:
        self.devices: dict[bytes, int] = {}
        self._leases: dict[bytes, str] = {}
        self._holders: dict[str, bytes] = {}
        self._told = told
        self._said = self._seen = (0, 0, 0)
        self._since = 0.0

    def forget(self, peer: bytes) -> None:
        """The peer has gone."""
        self.devices.pop(peer, None)
        lease = self._leases.pop(peer, None)
        if lease is not None and self._holders.get(lease) == peer:
            del self._holders[lease]

    def grant(self, peer: bytes, lease: str) -> None:
        """A machine has a lease."""
        self._leases[peer] = lease
        self._holders[lease] = peer

    def holder(self, lease: str) -> bytes | None:
        """The machine that has the lease, None if it is not behind this edge."""
        return self._holders.get(lease)

    def look(self, now: float, edges: int) -> None:
        """Tell of a change that has lasted for a while. There are so many ``edges`` behind this one."""
        seen = (len(self._holders), len({*self.devices.values()}), edges)
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif seen != self._said and now >= self._since + QUIET_SECONDS:
            self._said = seen
            machines, devices, edges = seen
            parts = [counted(machines, "machine"), counted(devices, "device")]
            if edges:
                parts.append(counted(edges, "edge"))
            self._told(f"behind this edge: {', '.join(parts)}")
