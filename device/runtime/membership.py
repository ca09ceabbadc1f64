"""A device's membership in the fleet, as a state machine without I/O: Hello, heartbeats, silence, and coming back.

``now`` is always the monotonic clock in seconds. What a member does with its work is in ``runtime.py``.
"""

from __future__ import annotations

import math
from typing import Literal, assert_never

from fedemu.device.runtime.actions import Action, Connect, Retire, Send
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import Heartbeat, Hello, Refused, Welcome

MOST_PATIENCE = 4
"""An unanswered Hello is repeated after ``expiry`` seconds. The wait doubles each time, up to this many times that.

A coordinator that is only slow must not be flooded with the Hellos of thousands of devices.
"""
SOON_SECONDS = 0.25
"""A device whose Hello was refused, or may be lost, says it again so soon. The wait doubles each time."""
_MOST_DOUBLINGS = 64
"""A wait that was doubled more often would not fit into a float, once a device has called for half a day."""
GOLDEN_RATIO = 0.6180339887
"""The multiples of this number, without their whole parts, lie evenly between 0 and 1, however many there are."""

Mode = Literal["joining", "member", "silent", "away", "retired"]


class Membership:
    """The membership of ``device`` in one life. ``incarnation`` is the first one that it may use; each Hello takes one.

    A peer counts as dead after ``patience`` times ``heartbeat_seconds`` without a message. A Welcome may change both.
    """

    def __init__(self, device: DeviceId, incarnation: int, lease: str, heartbeat_seconds: float, patience: int) -> None:
        self.device = device
        self.incarnation = incarnation - 1
        self.mode: Mode = "away"
        self._lease = lease
        self._interval = heartbeat_seconds
        self._patience = patience
        self._heard = -math.inf
        self._beat_due = math.inf
        self._back = math.inf
        self._silent_until = math.inf  # on the experiment's clock
        self._hellos = 0  # since the last welcome
        self._again = math.inf  # the Hello was refused or is lost, and is to be said again
        self._anew = math.inf  # the coordinator is reached again, on a new connection

    @property
    def expiry(self) -> float:
        """Seconds without a message after which the other side counts as dead."""
        return self._interval * self._patience

    @property
    def due(self) -> float:
        """The time on the monotonic clock at which ``tick`` has something to do next."""
        match self.mode:
            case "retired":
                return math.inf
            case "away" | "silent":
                return self._back
            case "joining":
                patience = self.expiry * min(1 << (self._hellos - 1), MOST_PATIENCE)
                return min(self._again, self._anew, self._heard + patience)
            case "member":
                return min(self._heard + self.expiry, self._beat_due)
            case _:
                assert_never(self.mode)

    def tick(self, now: float) -> list[Action]:
        """Time has passed: say a heartbeat, or connect anew if the coordinator was silent or the absence is over."""
        if now < self.due:
            return []
        if self.mode == "member" and now < self._heard + self.expiry:
            self.said(now)
            return [Send(Heartbeat())]
        if self.mode == "joining" and self._again <= now < self._anew:
            return self._hello(now)
        return [Connect(), *self._hello(now)]

    def said(self, now: float) -> None:
        """A message goes out. It counts as a heartbeat."""
        self._beat_due = now + self._interval

    def heard(self, now: float) -> bool:
        """A message has come in. Returns whether this device listens to it."""
        if self.mode in ("silent", "away", "retired"):
            return False
        self._heard = now
        return True

    def welcomed(self, welcome: Welcome, now: float) -> bool:
        """Take a Welcome. Returns whether it made the device a member; a second copy does not."""
        if self.mode != "joining":
            return False
        self.mode = "member"
        self._hellos = 0
        self._interval, self._patience = welcome.heartbeat_seconds, welcome.patience
        # Spread over the interval, so that devices that came at the same moment do not beat at the same moment.
        self._beat_due = now + self._interval * (self.device * GOLDEN_RATIO % 1.0)
        return True

    def refused(self, refused: Refused, now: float) -> list[Action]:
        """React to a refusal as superseded or unknown, or of the lease.

        Behind an edge that was away, a device may be back before its supervisor, with whom its lease is not known yet.
        It says Hello again soon, and then ever later. It does the same if it is not known after its Hello, which may
        have gone to a coordinator that has started again meanwhile. After a refusal for any other reason, ``tick``
        connects anew if the coordinator stays silent.
        """
        if refused.reason == "superseded":
            return self.retire()
        if refused.reason == "unknown_peer" and self.mode == "member":
            return self._hello(now)
        if refused.reason in ("lease_unknown", "unknown_peer"):
            self._say_again(now)
        return []

    def lost(self, now: float) -> None:
        """A connection has broken, on which a Hello may have been under way. It is said again on the next one."""
        self._say_again(now)

    def reachable(self, now: float) -> None:
        """Others of this machine reach the coordinator again. A device whose Hello stays unanswered connects anew.

        Its own connection may wait long for a packet that was lost while there was no way. Devices are spread over one
        interval between heartbeats.
        """
        if self.mode == "joining" and now >= self._heard + self._interval:
            self._anew = min(self._anew, now + self._interval * (self.device * GOLDEN_RATIO % 1.0))

    def stay_away(self, seconds: float, now: float) -> None:
        """Stay without a connection for ``seconds``, then come back on a new one."""
        self.mode, self._back = "away", now + seconds

    def fall_silent(self, seconds: float, now: float, until: float) -> None:
        """Keep the connection open and say nothing for ``seconds``, but at least until the coordinator must notice.

        It notices after ``expiry`` seconds; one interval more is for its timer. The silence ends earlier if a message
        tells that the experiment's clock has reached ``until``, see ``reached``.
        """
        self.mode, self._back = "silent", now + max(seconds, self.expiry + self._interval)
        self._silent_until = until

    def reached(self, time: float, now: float) -> list[Action]:
        """The experiment's clock has come to ``time``. If the planned silence is over by then, connect anew."""
        return [Connect(), *self._hello(now)] if self.mode == "silent" and time >= self._silent_until else []

    def retire(self) -> list[Action]:
        """End this device for good."""
        self.mode = "retired"
        return [Retire()]

    def _say_again(self, now: float) -> None:
        if self.mode == "joining":
            doubled = SOON_SECONDS * (1 << min(self._hellos - 1, _MOST_DOUBLINGS))
            self._again = min(self._again, now + min(doubled, MOST_PATIENCE * self.expiry))

    def _hello(self, now: float) -> list[Action]:
        self.mode = "joining"
        self.incarnation += 1
        self._hellos += 1
        self._heard, self._again, self._anew = now, math.inf, math.inf
        return [Send(Hello(device=self.device, incarnation=self.incarnation, lease=self._lease))]
