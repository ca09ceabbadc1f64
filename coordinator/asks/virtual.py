"""One ask under the virtual clock. The schedules of the devices decide it, never the order in which messages arrive.

Every device says when it would finish or drop out. Then the first K by (finish, index) may proceed. For each of them
that fails, one more device may proceed. Real time only bounds the waits: a device that is away or silent for too long,
and not by plan, has failed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fedemu.coordinator.asks.ask import LIVES, Action, AskMachine, Give, Missed, Tell, Terms
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import DropCause, Invalid, Scheduled

MOST_RESENDS = 16
"""The longest time between two requests for an answer, in multiples of the first."""


@dataclass(slots=True)
class _Wait:
    """A wait for the next step of a device, in real seconds: since when, and when the request is sent again.

    ``first`` is the beginning of the wait; ``since`` begins anew when the device comes back or goes. ``moved`` is when
    something was last on its way to the device or from it.
    """

    first: float
    since: float
    again: float
    pause: float
    lives: int = 0
    moved: float = -math.inf


class VirtualAsk(AskMachine):
    """Accepts the first ``wanted`` devices by (finish, index) that finish before the deadline."""

    def __init__(self, terms: Terms, connected: Iterable[DeviceId]) -> None:
        super().__init__(terms, connected)
        self._limit = terms.start + terms.deadline
        self._absent: dict[DeviceId, float] = {}
        """Since when each device lacks a connection that it had."""
        self._unscheduled: dict[DeviceId, _Wait] = {}
        self._running: dict[DeviceId, _Wait] = {}
        self._kept: set[DeviceId] = set()
        """The devices whose results are at edges, or were until they had an outcome."""
        self._finish: dict[DeviceId, float] = {}
        self._drop: dict[DeviceId, Scheduled] = {}
        self._doomed: set[DeviceId] = set()
        self._order: deque[DeviceId] | None = None
        """The devices that may still proceed, by (finish, index). None before all have schedules."""
        self._dropping: deque[DeviceId] = deque()
        """The devices that may still drop out, in the order of that."""
        self._latest = -math.inf
        """The finish of the last device that may proceed. None of those before it finishes later."""
        self._short_until: float | None = None
        """The end of the ask, once no candidate is left for a reply that is still wanted."""
        self._progress = 0.0
        self._longest_gap: float | None = None

    def open(self, now: float) -> list[Action]:
        """Start the ask: the connected devices get their Work now, the others when they join."""
        self._unscheduled = {device: self._wait(now) for device in self.terms.cohort}
        actions: list[Action] = [Give(device) for device in self.terms.cohort if device in self._present]
        return actions + self._advance(now)

    def scheduled(self, device: DeviceId, message: Scheduled, now: float) -> list[Action]:
        """Keep the device's first schedule. A schedule that lies before the start of the ask counts as a failure."""
        if self._unscheduled.pop(device, None) is None:
            return []
        if message.at < self.terms.start:
            self._settle(device, "failed")
        elif message.event == "finish":
            self._finish[device] = message.at
        else:
            self._drop[device] = message
        return self._advance(now)

    def times(self) -> Mapping[DeviceId, float]:
        return {**self._finish, **{device: drop.at for device, drop in self._drop.items()}}

    def expects(self, device: DeviceId) -> bool:
        """Whether the device may proceed, and has not replied yet."""
        return device in self._running

    def result(self, device: DeviceId, now: float) -> list[Action]:
        del self._running[device]
        if device not in self._kept:
            self._came(now)
        self._settle(device, "accepted")
        return [Tell(device, self._thanks), *self._advance(now)]

    def kept(self, device: DeviceId, now: float) -> None:
        self._kept.add(device)
        self._came(now)

    def lost(self, device: DeviceId, now: float) -> list[Action]:
        self._kept.discard(device)
        if device not in self._running:
            return []
        self._running[device] = self._wait(now, since=self._absent.get(device, now))
        return self._remind(device) if device in self._present else []

    def rejected(self, device: DeviceId, reason: str, detail: str, now: float) -> list[Action]:
        del self._running[device]
        self._settle(device, "rejected")
        answer = Invalid(ask=str(self.terms.ask), reason=reason, detail=detail)
        return [Tell(device, answer), *self._advance(now)]

    def failed(self, device: DeviceId, now: float) -> list[Action]:
        """The device failed or declined.

        A device that runs, or has no schedule yet, has failed now. Any other device fails when its turn comes, so its
        outcome does not depend on when the failure was heard. If its turn never comes, it is ``late`` or ``cancelled``.
        """
        if self._unscheduled.pop(device, None) or self._running.pop(device, None):
            self._settle(device, "failed")
            return self._advance(now)
        self._doomed.add(device)
        return []

    def joined(self, device: DeviceId, now: float) -> list[Action]:
        """The device is connected: it gets its Work, and Proceed if it may proceed. Its wait begins anew."""
        if not self.pending(device):
            return []
        self._present.add(device)
        self._absent.pop(device, None)
        if device in self._kept:
            return []
        wait = self._unscheduled.get(device) or self._running.get(device)
        if wait is not None:
            wait.since, wait.pause, wait.lives = now, self.terms.resend, wait.lives + 1
            wait.again = now + wait.pause
        return self._remind(device)

    def left(self, device: DeviceId, now: float, cause: DropCause | None = None) -> list[Action]:
        """The device is gone, from whatever cause. If the ask waits for it, it has ``give_up`` seconds to come back."""
        if device in self._present:
            self._present.discard(device)
            self._absent[device] = now
        wait = self._unscheduled.get(device) or self._running.get(device)
        if wait is not None:
            wait.since = now
        return []

    def underway(self, device: DeviceId, now: float) -> None:
        wait = self._running[device]
        wait.moved = now
        # What has begun to come will come, or its connection ends. A copy would only make it slower.
        wait.again = max(wait.again, now + MOST_RESENDS * self.terms.resend)

    @property
    def running(self) -> Collection[DeviceId]:
        return self._running.keys()

    def awaited(self, now: float) -> tuple[int, float, float] | None:
        since = [wait.since for device, wait in self._waits() if device not in self._present]
        if not since:
            return None
        return len(since), now - min(since), max(0.0, max(since) + self.terms.give_up - now)

    def stalled(self, seconds: float) -> None:
        for wait in (*self._unscheduled.values(), *self._running.values()):
            wait.first += seconds
            wait.since += seconds
            wait.again += seconds
            wait.moved += seconds
        self._absent = {device: since + seconds for device, since in self._absent.items()}
        self._progress += seconds

    def tick(self, now: float) -> list[Action]:
        """Give up the devices that were absent or silent for too long, and send unanswered messages again."""
        actions: list[Action] = []
        for device, wait in self._waits():
            if (missed := self._missed(device, wait, now)) is not None:
                actions += self.give_up(device, missed, now)
            elif device in self._present and now >= wait.again:
                wait.pause = min(2 * wait.pause, MOST_RESENDS * self.terms.resend)
                wait.again = now + wait.pause
                actions += self._remind(device)
        return actions

    def _waits(self) -> list[tuple[DeviceId, _Wait]]:
        """The devices of which something is awaited."""
        running = [each for each in self._running.items() if each[0] not in self._kept]
        return [*self._unscheduled.items(), *running]

    def _came(self, now: float) -> None:
        """A result has come. So long may others take."""
        gap = now - self._progress
        self._longest_gap = gap if self._longest_gap is None else max(gap, self._longest_gap)
        self._progress = now

    def _missed(self, device: DeviceId, wait: _Wait, now: float) -> Missed | None:
        """What a device is to be given up for, None if it is not to be given up.

        That is so if it was absent or without a schedule for ``give_up``, or if its result takes too long. The first
        result of an ask may take ``answer_timeout``, and so may one of which something was ``underway`` within
        ``give_up``. Every other may take four times the longest gap between results so far.
        For a device that comes back this time begins anew, but in all it has ``give_up`` more than any other.
        """
        give_up, here = self.terms.give_up, device in self._present
        if wait.lives > LIVES:
            return Missed("came back again and again without a result", now - wait.first, f"{LIVES} lives")
        if device in self._unscheduled:
            over = now - wait.since > give_up or now - wait.first > 2 * give_up
            lacked = "did not answer its work" if here else "had no connection"
            return Missed(lacked, now - wait.since, "fleet.give_up") if over else None
        if not here and now - wait.since > give_up:
            return Missed("had no connection", now - wait.since, "fleet.give_up")
        if self._longest_gap is None:
            longest, limit = self.terms.answer_timeout, "fleet.answer_timeout"
        else:
            longest, limit = 4 * self._longest_gap, "four times the longest wait before"
        if longest <= give_up:
            longest, limit = give_up, "fleet.give_up"
        if now - wait.moved < give_up and longest < self.terms.answer_timeout:
            longest, limit = self.terms.answer_timeout, "fleet.answer_timeout"
        since = max(wait.since, self._progress)
        if now - since > longest or now - max(wait.first, self._progress) > longest + give_up:
            return Missed("sent no result", now - since, limit)
        return None

    def _remind(self, device: DeviceId) -> list[Action]:
        if device in self._running:
            return [Give(device), Tell(device, self._proceed)]
        return [Give(device)]

    def _advance(self, now: float) -> list[Action]:
        """Let the devices whose turn it is proceed, and close the ask when nothing can change it any more."""
        if self._unscheduled:
            return []
        actions: list[Action] = []
        if self._order is None:
            self._progress = now
            in_time = (device for device, finish in self._finish.items() if finish <= self._limit)
            self._order = deque(sorted(in_time, key=lambda device: (self._finish[device], device)))
            self._dropping = deque(sorted(self._drop, key=lambda device: (self._drop[device].at, device)))
        while self._order and len(self._running) + self._accepted < self.terms.wanted:
            device = self._order.popleft()
            if device in self._doomed:
                self._settle(device, "failed")
            else:
                self._running[device] = self._wait(now, since=self._absent.get(device, now))
                self._latest = self._finish[device]
                actions.append(Tell(device, self._proceed))
        if len(self._running) + self._accepted == self.terms.wanted:
            actions += self._let_drop(self._latest)
            if not self._running:
                actions += self._settle_rest("cancelled")
                self.end = self._latest
            return actions
        if self._short_until is None:
            self._short_until = self._last_word() if self.terms.optional else self._limit
            actions += self._let_drop(self._short_until)
            actions += self._settle_rest("late")
        if not self._running:
            self.end = self._short_until
        return actions

    def _last_word(self) -> float:
        """The time at which every device has replied or is known to be gone, the deadline at most.

        A device that falls silent is not known to be gone.
        """
        drops = [math.inf if drop.cause == "silence" else drop.at for drop in self._drop.values()]
        return min(max([self.terms.start, *self._finish.values(), *drops]), self._limit)

    def _let_drop(self, bound: float) -> list[Action]:
        """Settle the devices that drop out by ``bound``. The ask lasts at least until then, so they have dropped."""
        actions: list[Action] = []
        while self._dropping and self._drop[self._dropping[0]].at <= bound:
            device = self._dropping.popleft()
            drop = self._drop[device]
            self._settle(device, "dropped")
            self.away[device] = drop.at if drop.back is None else drop.back
            self.causes[device] = drop.cause or "offline"
            actions.append(Tell(device, self._proceed))
        return actions

    def _wait(self, now: float, since: float | None = None) -> _Wait:
        since = now if since is None else since
        return _Wait(first=since, since=since, again=now + self.terms.resend, pause=self.terms.resend)
