"""A device's place in the fleet as a machine without I/O: Hello, heartbeats, silence, and coming back.

``now`` is the monotonic clock in seconds. What a member does with its Work is in ``runtime.py``.
"""

from __future__ import annotations

import math
from typing import Literal, assert_never

from fedemu.device.runtime.actions import Action, Connect, Retire, Send
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import Heartbeat, Hello, Refused, Welcome

SILENCE = 1.5
"""Half-open silence lasts this many times what it takes to be named dead."""
MOST_PATIENCE = 4
"""An unanswered Hello is repeated after what it takes to be named dead, later after up to so many times that.

A coordinator that is only slow must not be buried under the Hellos of thousands.
"""
GOLDEN_RATIO = 0.6180339887

Mode = Literal["joining", "member", "silent", "away", "retired"]


class Membership:
    """``incarnation`` is the first number that this life may use; every Hello takes the next one."""

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
        self._hellos = 0  # since the last welcome

    @property
    def expiry(self) -> float:
        """Seconds without a word after which the other side is taken for dead."""
        return self._interval * self._patience

    @property
    def due(self) -> float:
        """When ``tick`` has something to do next."""
        match self.mode:
            case "retired":
                return math.inf
            case "away" | "silent":
                return self._back
            case "joining":
                return self._heard + self.expiry * min(1 << (self._hellos - 1), MOST_PATIENCE)
            case "member":
                return min(self._heard + self.expiry, self._beat_due)
            case _:
                assert_never(self.mode)

    def tick(self, now: float) -> list[Action]:
        if now < self.due:
            return []
        if self.mode == "member" and now < self._heard + self.expiry:
            self.said(now)
            return [Send(Heartbeat())]
        return [Connect(), *self._hello(now)]

    def said(self, now: float) -> None:
        """Something goes out, which does for a heartbeat."""
        self._beat_due = now + self._interval

    def heard(self, now: float) -> bool:
        """Something came in; says whether this device listens."""
        if self.mode in ("silent", "away", "retired"):
            return False
        self._heard = now
        return True

    def welcomed(self, welcome: Welcome, now: float) -> bool:
        """Says whether this made the device a member; a second copy does not."""
        if self.mode != "joining":
            return False
        self.mode = "member"
        self._hellos = 0
        self._interval, self._patience = welcome.heartbeat_seconds, welcome.patience
        # Spread evenly over the interval, so that a fleet that came at once does not beat at once.
        self._beat_due = now + self._interval * (self.device * GOLDEN_RATIO % 1.0)
        return True

    def refused(self, refused: Refused, now: float) -> list[Action]:
        """What is not answered here is tried again on a fresh connection when patience is over."""
        if refused.reason == "superseded":
            return self.retire("superseded")
        if refused.reason == "unknown_peer" and self.mode == "member":
            return self._hello(now)
        return []

    def stay_away(self, seconds: float, now: float) -> None:
        """Without a connection for so long, then back on a fresh one."""
        self.mode, self._back = "away", now + seconds

    def fall_silent(self, seconds: float, now: float) -> None:
        """Keep the connection open and say nothing, for as long at least as it takes to be named dead."""
        self.mode, self._back = "silent", now + max(seconds, SILENCE * self.expiry)

    def retire(self, reason: str) -> list[Action]:
        self.mode = "retired"
        return [Retire(reason)]

    def _hello(self, now: float) -> list[Action]:
        self.mode = "joining"
        self.incarnation += 1
        self._hellos += 1
        self._heard = now
        return [Send(Hello(device=self.device, incarnation=self.incarnation, lease=self._lease))]
