"""A machine's membership at the coordinator, without I/O: enrolment, heartbeats, and coming back after silence.

``now`` is always the monotonic clock in seconds. Methods return what is to be done, and raise what ends the machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedemu.device.runtime.actions import Connect
from fedemu.protocol.errors import ProtocolError, RefusedError, UnreachableError
from fedemu.protocol.messages import Compute, Enroll, Granted, Heartbeat, Refused

AGAIN = 2.0
"""Seconds between two tries to enrol on one connection."""
FULL_AGAIN = 10.0
"""Seconds between two tries while all devices of the run are taken."""
LATE = 2.0
"""A tick that comes more seconds than this after it was due shows that this machine itself stood still."""

EnrolAction = Connect | Enroll | Heartbeat


class Enrolment:
    """Enrols ``count`` devices as machine ``host`` at ``address``. Times are in seconds.

    ``compute`` says how it computes. ``leases`` are tokens that an earlier life on this machine may still hold; they
    are tried first, in their order, and the next is taken when the one before it is refused. While all devices of the
    run are taken these leases are tried again and again, since the supervisor of that life may still be about to end.
    The coordinator must grant a lease within ``connect_seconds``. If it is silent for ``lost_seconds``, this machine
    gives up. The time for which this machine itself stood still does not count.
    """

    def __init__(
        self,
        address: str,
        count: int,
        host: str,
        *,
        compute: Compute | None = None,
        leases: Iterable[str],
        connect_seconds: float,
        lost_seconds: float,
    ) -> None:
        self.granted: Granted | None = None
        self._member = False
        """Whether this machine has its place, as far as it knows. If not, it asks for it."""
        self._address = address
        self._count = count
        self._host = host
        self._compute = compute
        self._former = leases
        self._leases = iter(leases)
        self._lease = next(self._leases, None)
        self._unanswered = self._outdated = 0
        """The asks on this connection without an answer, and those among them that named an earlier lease."""
        self._connect_seconds = connect_seconds
        self._lost_seconds = lost_seconds
        self._began = self._heard = self._asked = self._connected = self._sought = -math.inf
        self._beat_due = math.inf
        self._taken = self._barred = ""
        self._anew = False
        self.idle = False
        """Whether all devices of the run are taken. This machine then waits until one is free, or the run ends."""

    @property
    def due(self) -> float:
        """The time on the monotonic clock at which ``tick`` has something to do next."""
        if self.granted is None and self.idle:
            return min(self._asked + FULL_AGAIN, self._heard + self._lost_seconds)
        if self.granted is None:
            return min(self._asked + AGAIN, self._began + self._connect_seconds)
        if not self._member:
            return min(self._asked + AGAIN, self._silent, self._lost)
        return min(self._beat_due, self._heard + self._expiry, self._lost)

    @property
    def seeking(self) -> bool:
        """Whether this machine had a place, and looks for its coordinator now."""
        return self.granted is not None and not self._member

    def seconds_left(self, now: float) -> float:
        """The real seconds for which this machine still looks for its coordinator."""
        return max(0.0, self._lost - now)

    def start(self, now: float) -> list[EnrolAction]:
        """Connect and ask for a lease."""
        self._began = self._heard = now
        return self._reconnect(now)

    def heard(self, now: float) -> None:
        """A message came from the coordinator, of whatever kind."""
        self._heard, self._barred = now, ""

    def accept(self, granted: Granted, now: float) -> bool:
        """Take a grant. Returns whether it is the first one. Raises RefusedError if another run granted it."""
        first, self._member, self.idle = self.granted is None, True, False
        if self.granted is not None and (granted.run, granted.lease) != (self.granted.run, self.granted.lease):
            raise self._other_run(granted.run)
        self.granted = granted
        self._beat_due = now + granted.heartbeat_seconds
        return first

    def bar(self, reason: str, final: bool) -> None:
        """The connection does not come about, for ``reason``. If it is ``final``, the next try needs a new one."""
        self._barred, self._anew = reason, self._anew or final

    def misread(self, error: ProtocolError) -> None:
        """A message of the coordinator could not be read. Raises RefusedError if this machine has no place with it."""
        if not self._member:
            raise RefusedError.misunderstood(self._address, str(error))

    def refuse(self, refused: Refused, now: float) -> list[EnrolAction]:
        """React to a refusal. Raises RefusedError if asking again would not help."""
        self._unanswered = max(0, self._unanswered - 1)
        match refused.reason:
            case "unknown_peer" if self.granted is not None:
                # The coordinator has started again. It may refuse several messages; one answer is enough.
                if not self._member:
                    return []
                self._member, self._sought = False, now
                return self._enroll(now)
            case "lease_unknown" if self.granted is None and (self._outdated or self._lease is None):
                self._outdated = max(0, self._outdated - 1)
                return []  # it answers an earlier try: several may have waited for the coordinator
            case "lease_unknown" if self.granted is None:
                self._lease, self._outdated = next(self._leases, None), self._unanswered
                return self._enroll(now)
            case "lease_taken":
                # An earlier life of this machine may hold it, if the coordinator does not know yet that it is dead.
                self._taken = refused.detail
                return []
            case "fleet_full":
                self.idle = True
                return []
            case "malformed" | "version" if not self._member:
                raise RefusedError.misunderstood(self._address, refused.detail)
            case "unknown_peer" | "unknown_blob" | "malformed":
                return []
            case "lease_unknown":
                raise RefusedError(
                    refused.reason,
                    f"The coordinator at {self._address} does not know this machine's devices any more: it is that of "
                    "another run, or has given their places to others meanwhile; start them again to join.",
                )
            case _:
                raise RefusedError(
                    refused.reason, f"The coordinator at {self._address} refused this machine: {refused.detail}"
                )

    def tick(self, now: float) -> list[EnrolAction]:
        """Time has passed: ask again, say a heartbeat, or connect anew.

        Raises UnreachableError when the wait for the coordinator is over, or RefusedError if the lease stays taken.
        """
        if (late := now - max(self.due, self._heard)) > LATE:
            self._began += late
            self._heard, self._sought = min(self._heard + late, now), min(self._sought + late, now)
        if self.granted is None and not self.idle:
            if now >= self._began + self._connect_seconds:
                raise self._never_enrolled()
            if now < self._asked + AGAIN:
                return []
            return self._reconnect(now) if self._anew else self._enroll(now)
        if now >= self._lost:
            if self._barred:
                raise self._shut_out(self._lost_seconds)
            raise UnreachableError(
                f"The coordinator at {self._address} has been away for {self._lost_seconds:g} s, so this machine's "
                "devices have stopped; start them again once it is back."
            )
        if self.granted is None:
            if now < self._asked + FULL_AGAIN:
                return []
            if self._lease is None:
                self._leases = iter(self._former)
                self._lease = next(self._leases, None)
            return self._reconnect(now) if self._anew else self._enroll(now)
        if self._member:
            if now >= self._heard + self._expiry:
                self._member, self._sought = False, now
                return self._reconnect(now)
            if now >= self._beat_due:
                self._beat_due = now + self.granted.heartbeat_seconds
                return [Heartbeat()]
            return []
        if now >= self._silent:
            return self._reconnect(now)
        return self._enroll(now) if now >= self._asked + AGAIN else []

    @property
    def _lost(self) -> float:
        """The time at which this machine gives up, because the coordinator was silent or did not take it back."""
        refused_since = self._sought if self.seeking else math.inf
        return min(self._heard, refused_since) + self._lost_seconds

    @property
    def _silent(self) -> float:
        """The time at which a new connection is tried, if nothing comes on this one until then."""
        return max(self._connected, self._heard) + self._expiry

    @property
    def _expiry(self) -> float:
        assert self.granted is not None
        return self.granted.heartbeat_seconds * self.granted.patience

    def _reconnect(self, now: float) -> list[EnrolAction]:
        self._connected, self._anew = now, False
        self._unanswered = self._outdated = 0
        return [Connect(), *self._enroll(now)]

    def _enroll(self, now: float) -> list[EnrolAction]:
        self._asked, self._unanswered = now, self._unanswered + 1
        lease = self.granted.lease if self.granted else self._lease
        return [Enroll(count=self._count, lease=lease, host=self._host, compute=self._compute)]

    def _never_enrolled(self) -> UnreachableError | RefusedError:
        if self._taken:
            return RefusedError(
                "lease_taken", f"The coordinator at {self._address} refused this machine: {self._taken}"
            )
        if self._barred:
            return self._shut_out(self._connect_seconds)
        return UnreachableError.unanswered(self._address, self._connect_seconds)

    def _shut_out(self, seconds: float) -> RefusedError:
        return RefusedError.shut_out("keys", seconds, self._barred)

    def _other_run(self, run: str) -> RefusedError:
        mine = self.granted.run if self.granted else ""
        return RefusedError(
            "lease_unknown",
            f"The coordinator at {self._address} has become that of {run}, but these devices belong to {mine}; "
            "start them again to join the new one.",
        )
