"""The exchange of one ask with the fleet: it gives the Work out, checks what comes back, and keeps it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from fedemu.coordinator.asks.ask import Action, AskMachine, Give
from fedemu.coordinator.asks.at_edges import AtEdges
from fedemu.coordinator.asks.away import Away
from fedemu.coordinator.asks.examination import counted, examined
from fedemu.coordinator.asks.folding import Folding
from fedemu.coordinator.asks.parts import AskParts, Contribution
from fedemu.coordinator.asks.payload import FILE_THRESHOLD, PayloadError
from fedemu.coordinator.asks.turns import Apart, Turns
from fedemu.coordinator.fleet.roster import Roster
from fedemu.coordinator.observer import Observers
from fedemu.protocol.codec import Buffer
from fedemu.protocol.host.futures import fail
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import Declined, DropCause, Duplicate, Failed, Late, Message, Result, Scheduled, Work
from fedemu.protocol.sharing.edge_messages import Held, Partial
from fedemu.protocol.wording import readable

REPEATABLE = frozenset({"training", "malformed"})
"""The reasons for which a device fails in every run of the experiment. Any other failure is an accident."""

Send = Callable[[DeviceId, Message, Sequence[Buffer]], None]


class Exchange:
    """Performs the actions of an ask's machine. The future ``closed`` is done when every device has its outcome.

    Large replies are checked and kept ``apart``, so that the event loop hears the fleet meanwhile. What comes until
    then waits, and is handled in its order. Small ones are checked at once, because a thread would cost more.
    """

    def __init__(
        self,
        parts: AskParts,
        machine: AskMachine,
        roster: Roster,
        send: Send,
        refused: Callable[[str], None],
        observers: Observers,
        apart: Apart,
        folding: Folding,
        at_edges: AtEdges,
    ) -> None:
        """``folding`` gets what is accepted; ``refused`` is told the reason for which a reply cannot be used."""
        self.parts = parts
        self.machine = machine
        self.text = str(parts.ask)
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.bytes_down = 0
        """The emulated bytes that the devices have to download."""
        self.failures: Counter[str] = Counter()
        """The reasons of the devices that failed, and not by plan, and how often each was given."""
        self.rejections: Counter[str] = Counter()
        """The reasons for which replies were rejected, and how often each was."""
        self.forgotten = 0
        """The devices whose own states of the round's beginning are gone, once the exchange is committed."""
        self._contributions: dict[DeviceId, Contribution] = {}
        self._roster = roster
        self._send = send
        self._refused = refused
        self._observers = observers
        self._folding = folding
        self._at_edges = at_edges
        self._works: dict[DeviceId, Work] = {}
        self._stateless: set[DeviceId] = set()
        self._unwilling: set[DeviceId] = set()
        """The devices that have failed or declined. What they say of it again has no effect."""
        self._alive: set[DeviceId] = set()
        """The devices that are not lost if they are given up: they were heard of since, or an edge had their reply."""
        self._away = Away(roster.here())
        self._turns = Turns(apart, self._fail)
        self._heard: set[DeviceId] = set()
        """The devices whose replies are being checked, or wait for that."""

    def start(self, now: float) -> None:
        """Give the Work out."""
        for device in self.machine.terms.cohort:
            self._works[device] = self._work(device)
        self._roster.keepers.clear()
        self._at_edges.welcome(self._roster.stations)
        self._perform(self.machine.open(now))

    def receive(
        self,
        device: DeviceId,
        message: Scheduled | Result | Failed | Declined,
        frames: Sequence[memoryview],
        now: float,
    ) -> None:
        """Handle a device's message about this ask."""
        self.heard_of(device)
        if self._turns.busy:
            # At most one reply of each device waits with its tensors. A copy gets its answer, or comes again.
            kept = None if isinstance(message, Result) and device in self._heard else frames
            if isinstance(message, Result):
                self._heard.add(device)
            self._turns.take(lambda: self._receive(device, message, kept, now))
        else:
            self._receive(device, message, frames, now)

    def _receive(
        self,
        device: DeviceId,
        message: Scheduled | Result | Failed | Declined,
        frames: Sequence[memoryview] | None,
        now: float,
    ) -> None:
        match message:
            case Result():
                self._heard.discard(device)
                self._result(device, message, frames, now)
            case Scheduled():
                self._scheduled(device, message, now)
            case Failed() | Declined() if self._may_fail(device):
                self._unwilling.add(device)
                self._failed(device, message, now)
        self._perform(self._at_edges.collect(now))

    def _scheduled(self, device: DeviceId, message: Scheduled, now: float) -> None:
        waited = self.machine.pending(device)
        self._perform(self.machine.scheduled(device, message, now))
        if waited and self.machine.verdicts.get(device) == "failed":
            start = self.machine.terms.start
            self._tell_failure(device, "schedule", f"it is scheduled for {message.at:g}, before its start at {start:g}")

    def held(self, device: DeviceId, message: Held, station: bytes, now: float) -> None:
        """An edge keeps the result of a device, or says that it cannot be used."""
        self._turns.take(lambda: self._held(device, message, station, now))

    def _held(self, device: DeviceId, message: Held, station: bytes, now: float) -> None:
        verdict = self.machine.verdicts.get(device)
        if verdict is not None:
            self._send(device, Duplicate(ask=self.text, verdict=verdict), ())
        elif device not in self._works or not self._at_edges.wanted:
            self._send(device, Late(ask=self.text), ())
        elif self.machine.expects(device) and not self._at_edges.has(device):
            found = counted(self.parts, device, message)
            if isinstance(found, PayloadError):
                self._judged(found, device, now)
            else:
                self._alive.add(device)
                self._roster.keepers.add(station)
                self._perform(self._at_edges.keep(device, station, found, now))

    def station_joined(self, station: bytes) -> None:
        """An edge has come."""
        self._at_edges.welcome([station])

    def station_left(self, station: bytes, now: float) -> None:
        """A peer is gone, which may be an edge."""
        self._turns.take(lambda: self._perform(self._at_edges.lose(station, now)))

    def partial(self, station: bytes, message: Partial, frames: Sequence[memoryview], now: float) -> None:
        """An edge has sent the sum of what it was asked for."""
        if message.epoch == self.parts.epoch:
            self._turns.take(lambda: self._merge(station, message, frames, now))

    def _merge(self, station: bytes, message: Partial, frames: Sequence[memoryview], now: float) -> None:
        accepted, actions = self._at_edges.merge(station, message, frames, now)
        self._contributions.update(accepted)
        self._perform(actions)

    def _may_fail(self, device: DeviceId) -> bool:
        return self.machine.pending(device) and device not in self._unwilling and not self._at_edges.has(device)

    def joined(self, device: DeviceId, now: float) -> None:
        """The device or its next incarnation is connected."""
        self.heard_of(device)
        self._away.came(device)
        self._turns.take(lambda: self._perform(self.machine.joined(device, now)))

    def heard_of(self, device: DeviceId) -> None:
        """The device has shown that it lives. If it was given up, it is not lost all the same."""
        if device in self.machine.given_up:
            self._alive.add(device)

    def left(self, device: DeviceId, now: float, cause: DropCause | None = None) -> None:
        """The device is no longer connected."""
        self._away.left(device, now)
        self._turns.take(lambda: self._perform(self.machine.left(device, now, cause)))

    def stalled(self, seconds: float) -> None:
        """The coordinator stood still, and read no message meanwhile."""
        self._turns.take(lambda: self._stalled(seconds))

    def tick(self, now: float) -> None:
        """Time passed: unanswered messages are sent again, and devices are given up, unless events wait."""
        if not self._turns.busy:
            self._perform(self.machine.tick(now))
            self._perform(self._at_edges.collect(now))

    @property
    def bytes_up(self) -> int:
        """The emulated bytes of all results that were accepted or rejected."""
        counts = self.machine.counts()
        return self.parts.upload_bytes * (counts["accepted"] + counts["rejected"])

    @property
    def contributions(self) -> list[Contribution]:
        """The accepted contributions, in cohort order."""
        return [self._contributions[device] for device in self.machine.accepted]

    def commit(self) -> None:
        """Write into the roster what the closed ask changed: versions of own states, dropouts, downloads."""
        columns = self._roster.columns
        for device, verdict in self.machine.verdicts.items():
            if verdict == "accepted" and self.parts.keeps_state:
                columns.states[device] = self.parts.ask
            if verdict == "dropped":
                columns.away[device] = self.machine.away.get(device, 0.0)
            elif verdict != "failed":
                columns.charge(device, self.parts.charged)
        lost = self.machine.given_up.keys() - self._alive
        for device in lost:
            columns.lost[device] = True
        # A device that comes and goes may be given up sooner than one that stays away.
        long = [device for device in lost if self.machine.given_up[device].seconds >= self.machine.terms.give_up]
        columns.lost |= self._away.as_long(long, self._roster.here())
        self.forgotten = sum(map(columns.forget_state, self._stateless))

    def discard(self) -> None:
        """Free the memory and the files of the payloads, and break the references that would keep this exchange."""
        self._turns.close()
        for contribution in self._contributions.values():
            if contribution.payload is not None:
                contribution.payload.discard()

    def _stalled(self, seconds: float) -> None:
        self.machine.stalled(seconds)
        self._at_edges.stalled(seconds)

    def _fail(self, error: Exception) -> None:
        fail(self.closed, error)

    def _result(self, device: DeviceId, result: Result, frames: Sequence[memoryview] | None, now: float) -> None:
        verdict = self.machine.verdicts.get(device)
        if verdict is not None:
            self._send(device, Duplicate(ask=self.text, verdict=verdict), ())
        elif device not in self._works:
            self._send(device, Late(ask=self.text), ())
        elif frames is not None and self.machine.expects(device):
            # Otherwise the result came before its Proceed, or is a copy, and will come again.
            self._judge(device, result, frames, now)

    def _judge(self, device: DeviceId, result: Result, frames: Sequence[memoryview], now: float) -> None:
        if sum(frame.nbytes for frame in frames) <= FILE_THRESHOLD:
            self._judged(examined(self.parts, device, result, frames), device, now)
            return
        self._heard.add(device)

        def then(found: Contribution | PayloadError) -> None:
            self._heard.discard(device)
            self._judged(found, device, now)

        self._turns.work(examined, self.parts, device, result, frames, then=then)

    def _judged(self, found: Contribution | PayloadError, device: DeviceId, now: float) -> None:
        if isinstance(found, Contribution):
            actions = self.machine.result(device, now)
            if self.machine.verdicts.get(device) == "accepted":
                self._contributions[device] = found
                if found.payload is not None:
                    self._folding.take(found.payload, found.reply.examples)
            self._perform(actions)
            return
        self._refused(found.reason)
        self._reject(device, found.reason, str(found), now)

    def _reject(self, device: DeviceId, reason: str, detail: str, now: float) -> None:
        actions = self.machine.rejected(device, reason, detail, now)
        if self.machine.verdicts.get(device) == "rejected":
            self.rejections[reason] += 1
        self._perform(actions)

    def _failed(self, device: DeviceId, message: Failed | Declined, now: float) -> None:
        if isinstance(message, Failed) and message.reason == "malformed" and self.machine.expects(device):
            # Its result could not be decoded. The device was told so, and says here which result that was.
            self._reject(device, "malformed", message.detail, now)
            return
        if isinstance(message, Failed) and not message.planned:
            # The event names the device, and equal reasons of several devices are to be counted as one.
            detail = readable(message.detail.removeprefix(f"device {device}: "))
            reason = readable(message.reason) or "unknown"  # a device of one's own may say neither
            self._tell_failure(device, reason, detail)
            if message.reason not in REPEATABLE:
                self.machine.perturbed = True
            if message.reason == "own_state":
                self._stateless.add(device)  # it begins anew next time, and does not fail for ever
        self._perform(self.machine.failed(device, now))

    def _tell_failure(self, device: DeviceId, reason: str, detail: str) -> None:
        self.failures[detail or reason] += 1
        self._observers.event("failure", device=device, ask=self.text, reason=reason, detail=detail)

    def _work(self, device: DeviceId) -> Work:
        columns = self._roster.columns
        download = columns.download_bytes(device, self.parts.charged)
        work = self.parts.work(device, columns.states.get(device), download)
        self.bytes_down += work.download_bytes
        return work

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Give):
                _, frames = self.parts.part_of(action.device)
                self._send(action.device, self._works[action.device], frames)
            else:
                self._send(action.device, action.message, ())
        if self.machine.end is not None and not self.closed.done():
            self.machine.check()
            self.closed.set_result(None)
