"""One ask under the wall clock: the results that arrive first are accepted.

Devices start their Work at once. The first K good results are accepted, a timer is the deadline, and a device that
disconnects has dropped out.
"""

from __future__ import annotations

from typing import Literal

from fedemu.coordinator.asks.ask import Action, AskMachine, Give, Tell
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import DropCause, Invalid, Scheduled, Verdict


class WallAsk(AskMachine):
    """Accepts the first ``wanted`` results that arrive before the deadline. Every absence is a dropout.

    Edges keep no results, since the order in which these arrive decides. The deadline is in real time, so neither slow
    connections nor a coordinator that stood still change anything.
    """

    _opened = 0.0

    def open(self, now: float) -> list[Action]:
        """Start the ask: the connected devices get their Work, and the others have dropped out."""
        self._opened = now
        actions: list[Action] = [Give(device) for device in self.terms.cohort if device in self._present]
        for device in self.terms.cohort:
            if device not in self._present:
                self._settle(device, "dropped")
        return actions + self._advance(now)

    def scheduled(self, device: DeviceId, message: Scheduled, now: float) -> list[Action]:
        """Schedules are ignored under the wall clock."""
        return []

    def expects(self, device: DeviceId) -> bool:
        return self.pending(device)

    def result(self, device: DeviceId, now: float) -> list[Action]:
        return self._happened(device, "accepted", now, Tell(device, self._thanks))

    def rejected(self, device: DeviceId, reason: str, detail: str, now: float) -> list[Action]:
        answer = Invalid(ask=str(self.terms.ask), reason=reason, detail=detail)
        return self._happened(device, "rejected", now, Tell(device, answer))

    def failed(self, device: DeviceId, now: float) -> list[Action]:
        return self._happened(device, "failed", now) if self.pending(device) else []

    def joined(self, device: DeviceId, now: float) -> list[Action]:
        """A device that comes back has dropped out before, so nothing changes."""
        return []

    def left(self, device: DeviceId, now: float, cause: DropCause | None = None) -> list[Action]:
        """The device is gone, and has dropped out if it has no outcome yet."""
        if not self.pending(device):
            return []
        actions = self._happened(device, "dropped", now)
        if cause is not None and self.verdicts[device] == "dropped":
            self.causes[device] = cause
        return actions

    def tick(self, now: float) -> list[Action]:
        """Close the ask once its deadline is over."""
        return self._advance(now)

    def _happened(self, device: DeviceId, verdict: Verdict, now: float, *told: Tell) -> list[Action]:
        """Settle a device that has no outcome yet, and tell it so.

        What happens after the deadline does not count, whether the timer has noticed the deadline or not: the device is
        late.
        """
        if now - self._opened >= self.terms.deadline:
            return self._advance(now)
        self._settle(device, verdict)
        return [*told, *self._advance(now)]

    def _advance(self, now: float) -> list[Action]:
        if self.end is not None:
            return []
        elapsed = now - self._opened
        if self._accepted == self.terms.wanted or len(self.verdicts) == len(self.terms.cohort):
            return self._close(elapsed, "cancelled")
        if elapsed >= self.terms.deadline:
            return self._close(self.terms.deadline, "late")
        return []

    def _close(self, elapsed: float, rest: Literal["late", "cancelled"]) -> list[Action]:
        self.end = self.terms.start + elapsed
        return self._settle_rest(rest)
