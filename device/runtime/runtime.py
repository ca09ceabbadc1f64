"""One device as a state machine without I/O: events go in, actions come out, and the caller tells the time.

It does its work as its behaviour says, and keeps each result until the coordinator has given its verdict. ``now`` is
always the monotonic clock in seconds. Connection and heartbeats are in ``membership.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import assert_never

from fedemu.device.behaviour.availability import TooFarAhead
from fedemu.device.behaviour.behaviour import Behaviour
from fedemu.device.bus import Done, JobFailed, Joined, Withdraw
from fedemu.device.memory.store import OwnStore
from fedemu.device.memory.stream import DeviceStream
from fedemu.device.runtime.actions import Action, Crash, Disconnect, Leave, Send, Sleep, Tell
from fedemu.device.runtime.membership import Membership
from fedemu.device.runtime.wall import WallClock
from fedemu.device.runtime.work import WorkInHand, announcement, replies, submission, take_in_hand
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import Buffer
from fedemu.protocol.ids import AskId

MAX_INTERVALS = 65_536
"""The largest number of on-line intervals in one Presence."""
REMEMBERED = 64
"""The number of asks that are remembered because their Proceed has come before their Work."""
MOST_PAUSE = 8
"""The longest wait before an unanswered result is sent again, in multiples of the time after which a peer is dead."""


class DeviceRuntime:
    """One life of a device. Its events are ``start``, ``receive``, ``trained``, ``tick`` and ``quit``.

    Each event returns the actions that it causes, in their order.
    """

    def __init__(self, member: Membership, behaviour: Behaviour, stream: DeviceStream, store: OwnStore) -> None:
        self.member = member
        self._behaviour = behaviour
        self._stream = stream
        self._store = store
        self._wall: WallClock | None = None
        self._in_hand: dict[str, WorkInHand] = {}
        self._time = 0.0  # the time of the experiment of which the coordinator told last
        self._early: dict[str, None] = {}  # asks whose Proceed came before their Work, as transports may reorder

    @property
    def due(self) -> float:
        """The time on the monotonic clock at which ``tick`` has something to do next."""
        due = self.member.due
        if self.member.mode == "member":
            for held in self._in_hand.values():
                due = min(due, held.due)
            if self._wall is not None:
                due = min(due, self._wall.due)
        return due

    def start(self, now: float, away: float = 0.0) -> list[Action]:
        """Begin this life after ``away`` seconds."""
        self.member.stay_away(away, now)
        return self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed: do what is due, such as a heartbeat, a planned drop-out, or a result to be sent again."""
        actions = self.member.tick(now)
        if self.member.mode == "member" and self._wall is not None and now >= self._wall.end_of_presence(now):
            return self._go_offline(self._wall.seconds_to_return(now), now)
        for held in list(self._in_hand.values()):
            if self.member.mode == "member" and now >= held.due:
                actions += self._send(held, now) if held.phase == "trained" else self._drop_out(held, now)
        return actions

    def receive(self, message: wire.Down, frames: Sequence[Buffer], now: float) -> list[Action]:
        """A message has come from the coordinator, on the present connection."""
        if not self.member.heard(now):
            match message:
                case wire.Work():
                    # It reaches a silent device if it begins after the silence, and is sent again when it is back.
                    return self.member.reached(message.start, now)
                case wire.Sleep() if self.member.mode == "silent":
                    return self._sleep()
                case _:
                    return []
        match message:
            case wire.Welcome():
                return self._welcomed(message, now)
            case wire.Work():
                return self._work(message, frames, now)
            case wire.Proceed():
                return self._proceed(message.ask, now)
            case wire.Accepted() | wire.Late() | wire.Cancel() | wire.Invalid() | wire.Duplicate():
                return self._settle(message.ask)
            case wire.Extend():
                self._time = max(self._time, message.since)
                return self._presence(message.until)
            case wire.Refused(reason="malformed"):
                return self._unreadable(message.detail)
            case wire.Refused():
                return self.member.refused(message, now)
            case wire.Stop():
                return [Send(wire.Bye(reason=message.reason)), *self.member.retire()]
            case wire.Sleep():
                return self._sleep()
            case wire.Beat() | wire.Granted() | wire.Blob() | wire.Offer() | wire.Wake():
                return []
            case _:
                assert_never(message)

    def trained(self, answer: Done | JobFailed, frames: Sequence[Buffer], now: float) -> list[Action]:
        """A trainer has done the job of this device, or the job failed."""
        held = self._in_hand.get(answer.ask)
        if isinstance(answer, Done) and answer.wrote_own:
            self._store.written(AskId.parse(answer.ask))
        if held is None or held.phase != "training":
            return []
        held.phase, held.replies = "trained", replies(held, answer, frames)
        held.due = now if self._wall is None else self._wall.real(held.schedule.at)
        return self._send(held, now) if self.member.mode == "member" and self._over(held, now) else []

    def quit(self) -> list[Action]:
        """The supervisor ends: say goodbye and retire."""
        connected = self.member.mode in ("joining", "member")
        goodbye: list[Action] = [Send(wire.Bye(reason="stopped"))] if connected else []
        return goodbye + self.member.retire()

    def _welcomed(self, welcome: wire.Welcome, now: float) -> list[Action]:
        if not self.member.welcomed(welcome, now):
            return []
        self._early.clear()
        self._time = welcome.elapsed
        actions: list[Action] = [Tell(Joined(device=self.member.device, incarnation=self.member.incarnation))]
        if welcome.clock == "virtual":
            actions += self._presence(welcome.horizon)
        else:
            self._wall = WallClock(self._behaviour, welcome.elapsed, now)
            if now >= self._wall.end_of_presence(now):
                return actions + self._go_offline(self._wall.seconds_to_return(now), now)
        for held in self._in_hand.values():
            held.pause = 0.0
            if held.phase == "trained" and self._over(held, now):
                actions += self._send(held, now)
        return actions

    def _presence(self, until: float) -> list[Action]:
        try:
            intervals = self._behaviour.presence(until, self._time)
        except TooFarAhead:
            return []  # the coordinator does without a device that cannot look so far ahead
        if len(intervals) > MAX_INTERVALS:
            intervals = intervals[:MAX_INTERVALS]
            until = intervals[-1][1]
        return [Send(wire.Presence(until=until, intervals=intervals))]

    def _go_offline(self, seconds: float, now: float) -> list[Action]:
        """Say goodbye and close the connection for ``seconds``. Only work with a result is kept."""
        self._in_hand = {ask: held for ask, held in self._in_hand.items() if held.phase == "trained"}
        self.member.stay_away(seconds, now)
        return [Send(wire.Bye(reason="offline")), Disconnect()]

    def _unreadable(self, detail: str) -> list[Action]:
        """The coordinator could not read a message. It can only be a result that this device corrupted as planned."""
        return [
            Send(wire.Failed(ask=ask, reason="malformed", detail=detail, planned=True, epoch=held.work.epoch))
            for ask, held in self._in_hand.items()
            if held.phase == "trained" and held.schedule.corruption is not None
        ]

    def _work(self, work: wire.Work, frames: Sequence[Buffer], now: float) -> list[Action]:
        if self._store.versions:
            self._store.supersede(AskId.parse(work.state) if work.state else None, work.durable_round)
        self._time = max(self._time, work.start)
        if self._wall is not None:
            self._wall.set(work.start, now)
        actions: list[Action] = []
        held = self._in_hand.get(work.ask)
        if held is None or not held.renew(work, frames):
            # The work is new, or a coordinator that has lost its latest round asks for it again.
            try:
                held = take_in_hand(work, frames, self._behaviour, self._stream, self._store)
            except TooFarAhead as error:
                return [Send(wire.Failed(ask=work.ask, reason="timetable", detail=str(error), epoch=work.epoch))]
            # One ask is open at a time, so all earlier ones have their outcomes. Under the wall clock a result is kept
            # until its own comes, because it may be on the way.
            over = [ask for ask, other in self._in_hand.items() if other.ask < held.ask]
            for ask in over:
                if self._wall is None or self._in_hand[ask].phase == "scheduled" or self._in_hand[ask].failed:
                    actions += self._settle(ask)
            self._in_hand[work.ask] = held
        if held.schedule.reply == "decline":
            return [*actions, Send(wire.Declined(ask=work.ask, reason="declined", epoch=work.epoch))]
        if self._wall is not None:
            return actions + self._begin(held, now)
        self.member.said(now)
        if work.ask not in self._early:
            return [*actions, announcement(held)]
        del self._early[work.ask]
        return [*actions, announcement(held), *self._proceed(work.ask, now)]

    def _proceed(self, ask: str, now: float) -> list[Action]:
        held = self._in_hand.get(ask)
        if held is None:
            self._early[ask] = None
            if len(self._early) > REMEMBERED:
                del self._early[next(iter(self._early))]
            return []
        return self._begin(held, now) if held.schedule.event == "finish" else self._drop_out(held, now)

    def _begin(self, held: WorkInHand, now: float) -> list[Action]:
        """Have a trainer do the work. If the work is done already, send its result again."""
        match held.phase:
            case "training":
                return []
            case "trained":
                return self._send(held, now) if self._over(held, now) else []
            case "scheduled" if held.schedule.event == "drop":
                assert self._wall is not None, "under the virtual clock a drop-out waits for Proceed"
                held.due = self._wall.real(held.schedule.at)
                return []
            case "scheduled":
                held.phase = "training"
                return [submission(held, self.member.device, self._stream, self._store)]
            case _:
                assert_never(held.phase)

    def _over(self, held: WorkInHand, now: float) -> bool:
        """Whether the emulated time of the work is over. This is always so under the virtual clock."""
        return self._wall is None or now >= self._wall.real(held.schedule.at)

    def _send(self, held: WorkInHand, now: float) -> list[Action]:
        """Send the result. Under the virtual clock the coordinator asks again for one that it lacks.

        Under the wall clock it is sent again if it is not answered. The wait doubles each time.
        """
        expiry = self.member.expiry
        held.pause = min(2 * held.pause, MOST_PAUSE * expiry) if held.pause else expiry
        held.due = math.inf if self._wall is None else now + held.pause
        self.member.said(now)
        return list(held.replies)

    def _drop_out(self, held: WorkInHand, now: float) -> list[Action]:
        """Drop out as the schedule says: go off-line, crash, leave or fall silent."""
        schedule = held.schedule
        del self._in_hand[held.work.ask]
        away = 0.0
        if self._wall is not None and schedule.back is not None:
            away = max(0.0, self._wall.real(schedule.back) - now)
        match schedule.cause:
            case "crash":
                return [Crash(away)]
            case "leave":
                return [Send(wire.Bye(reason="leave")), Leave(away)]
            case "silence":
                over = math.inf if self._wall is not None or schedule.back is None else schedule.back
                self.member.fall_silent(away, now, over)
                return []
            case "offline" | None:
                return self._go_offline(away, now)
            case _:
                assert_never(schedule.cause)

    def _sleep(self) -> list[Action]:
        """End this life. Whatever is still in hand has its outcome.

        A device that is silent by plan says no goodbye. Its next life begins when it is asked, after the silence; if it
        did not sleep, nobody could wake it.
        """
        actions = [action for ask in list(self._in_hand) for action in self._settle(ask)]
        goodbye = [] if self.member.mode == "silent" else [Send(wire.Bye(reason=wire.ASLEEP))]
        self.member.mode = "retired"
        return [*actions, *goodbye, Sleep()]

    def _settle(self, ask: str) -> list[Action]:
        """The coordinator has given its verdict, so this work is over. A second verdict changes nothing.

        Only later work tells whether the new own state counts: a coordinator that has started again may say Late to a
        result that it had accepted in its earlier life.
        """
        held = self._in_hand.pop(ask, None)
        if held is None or held.phase != "training":
            return []
        return [Tell(Withdraw(device=self.member.device, ask=ask))]
