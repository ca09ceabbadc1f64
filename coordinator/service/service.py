"""The coordinator's shell: a hub, a timer, and the waits of a run. It decides nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fedemu.coordinator.asks.exchange import Exchange
from fedemu.coordinator.fleet.admission import most_strangers
from fedemu.coordinator.fleet.roster import Roster
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.service.bedtime import Bedtime
from fedemu.coordinator.service.reception import Reception
from fedemu.coordinator.service.shelf import Shelf
from fedemu.coordinator.service.waits import MOMENT_SECONDS, Waits
from fedemu.coordinator.settings import Settings
from fedemu.coordinator.timeline import Timeline
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import Buffer, Limits
from fedemu.protocol.host.kernel import give_memory_back
from fedemu.protocol.host.open_files import open_files
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import Message
from fedemu.protocol.sharing.edge_messages import up_decoder
from fedemu.protocol.sharing.hub import Hub
from fedemu.protocol.transport.interface import Bounds, Network

TICK_SECONDS = 0.25
TIDY_SECONDS = 30.0
"""The time between two returns of free memory to the system, each of which takes some milliseconds."""
DRAIN_SECONDS = 0.5
"""The time that peers may take to say Bye after Stop."""
START_SECONDS = 10.0
"""Processes may take so long to start: observers are told of devices that are missing for longer when a run begins."""
SPARE_FILES = 192
"""Descriptors that connections leave for the run's own files, at least."""
SPARE_UNFINISHED = 8 * 2**20
"""The most bytes of unfinished messages that a peer may have sent, beside a few replies to an ask."""


def most_unfinished(reply: int) -> int:
    """The most bytes of unfinished messages that a peer may have sent, if the largest reply has ``reply`` bytes."""
    return SPARE_UNFINISHED + 4 * reply


_OUTCOMES = wire.Accepted | wire.Late | wire.Cancel
_WITHOUT_THEM = "the run goes on without them"


class Service:
    """One address and the fleet behind it."""

    def __init__(
        self,
        settings: Settings,
        roster: Roster,
        shelf: Shelf,
        timeline: Timeline,
        observers: Observers,
        granted: Callable[..., wire.Granted],
    ) -> None:
        self.roster = roster
        self.shelf = shelf
        self.timeline = timeline
        self.reception = Reception(
            settings, roster, shelf, timeline, observers, granted, self.send,
            self._key_of, self._cut, self._may_be_edge, self.is_sending,
        )  # fmt: skip
        self.waits = Waits(settings, roster, timeline, self.reception.changed, lambda: self.reception.exchange)
        self._settings = settings
        self._observers = observers
        self._hub: Hub | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticked = 0.0
        self._stalled = -math.inf
        self._told_deserted = False
        self._bedtime = None
        if roster.planned is not None:
            self._bedtime = Bedtime(roster, self.send, settings.heartbeat_seconds)
        self._untold: dict[DeviceId, tuple[float, Message]] = {}
        """The outcomes that wait for the device's next Work, and until when they do."""

    def open(self, network: Network, address: str) -> Hub:
        """Bind the address and begin to answer. Raises ConfigurationError for an address that cannot be used."""
        limit = self._settings.payload_bytes
        decoder = up_decoder(Limits(frame_bytes=limit, message_bytes=limit))
        reception = self.reception
        self._hub = Hub(
            network,
            address,
            decoder,
            reception.received,
            reception.rejected,
            reception.screening.screen,
            self._bounds(),
            loop=asyncio.get_running_loop(),
            channels=most_strangers(self._settings.devices),
            over=reception.over,
            shares=self.roster.knows,
            charge=reception.screening.charge,
        )
        self.roster.connection_of = self._hub.connection_of
        self.roster.admission.asked(0, self.shelf.kept_bytes)
        self._ticked = self.timeline.now()
        self._tick()
        return self._hub

    def close(self) -> None:
        """Stop answering, and free the address."""
        if self._timer is not None:
            self._timer.cancel()
        if self._hub is not None:
            self._hub.close()

    async def stop(self, reason: str) -> None:
        """Tell all peers that the run is over, and wait a little until they have gone."""
        self.reception.stopping = stop = wire.Stop(reason=reason)
        for peer in [*self.roster.peers, *self.reception.refusals.idle]:
            self.send(peer, stop)
        await self.waits.until(lambda: not self.roster.peers, DRAIN_SECONDS)

    async def gather(self, *, partly: bool = False) -> bool:
        """Wait for the whole fleet, ``start_timeout`` at most. Returns whether it came.

        Of a fleet that sleeps each machine has to wake a device. ``partly`` says that observers are to be told of a run
        that goes on with those that came.
        """
        settings, roster = self._settings, self.roster
        then = _WITHOUT_THEM if partly else "the run gives up"
        came = await self._announced(roster.missing, roster.is_missing, settings.start_timeout, then, START_SECONDS)
        if came and settings.clock == "wall":
            await self._let_return()
        return came

    async def _let_return(self) -> None:
        """Give devices whose machine is back after an absence of the coordinator the time to notice its return.

        Otherwise the first ask would go to those alone that come first. Some may be off-line by plan, and come later.
        """
        absent = self.roster.absent
        seconds = max(START_SECONDS, self._settings.heartbeat_seconds * self._settings.patience)
        with self.waits.told(seconds, lambda: len(absent()), _WITHOUT_THEM):
            await self.waits.until(lambda: not absent(), seconds)

    async def extend(self, until: float) -> bool:
        """Ask every device to announce its on-line times up to ``until``, and wait ``give_up`` at most.

        If all were already asked for times up to ``until``, only those are asked again whose announced times are over:
        their intervals did not fit into one message. A device that cannot look so far ahead keeps the times that it
        announced.
        A device that does not answer is lost, and then the result is False.
        """
        if until > self.reception.horizon:
            self.reception.horizon = until
            lacking = self.roster.lacking(until)
        else:
            lacking = self.roster.used_up(self.timeline.time)
        if not lacking:
            return True
        announced = self.roster.announced
        before = {device: announced.of(device) for device in lacking}

        def silent() -> list[DeviceId]:
            return [device for device in before if is_silent(device)]

        def is_silent(device: DeviceId) -> bool:
            return announced.of(device) is before[device]

        seconds = max(self._settings.give_up, 2 * self._settings.planned_silence)
        if await self._announced(silent, is_silent, seconds, "they count as lost"):
            return True
        for device in (lost := silent()):
            self.roster.columns.lost[device] = True
            told = {"lacked": "did not announce its on-line times", "waited": seconds, "limit": "fleet.give_up"}
            self._observers.event("given_up", device=device, **told, among=len(lost))
        return False

    async def perform(self, exchange: Exchange) -> None:
        """Carry an exchange to its end. Its machine bounds the wait."""
        parts = exchange.parts
        self.roster.admission.asked(parts.template.bytes, sum(blob.size for blob in parts.shared))
        if parts.shared:
            offer = wire.Offer(blobs=parts.shared, round=parts.ask.round)
            for peer in self.roster.leases.peers_of(exchange.machine.terms.cohort):
                self.send(peer, offer)
        self.reception.exchange = exchange
        self.roster.likeness.settled = True
        try:
            exchange.start(self.timeline.now())
            if self._bedtime is not None:
                self._bedtime.opened(exchange, self.timeline.now())
            await exchange.closed
        finally:
            self.reception.exchange = None
            self.reception.verdicts.remember(parts.ask, exchange.machine.verdicts)

    def tell(self, device: DeviceId, message: Message, frames: Sequence[Buffer] = ()) -> None:
        """Send to a device if it is connected. A message that does not arrive is sent again when the device is back.

        Work tells a device that all its earlier asks are over. So an outcome waits a moment for the next Work, which
        often saves the message.
        """
        peer = self.roster.connected.get(device)
        if peer is None:
            return
        if isinstance(message, wire.Work):
            self._untold.pop(device, None)
        elif isinstance(message, _OUTCOMES) and self._settings.clock == "virtual" and self._settings.verdict_delay:
            self._untold[device] = (self.timeline.now() + self._settings.verdict_delay, message)
            return
        self.send(peer, message, frames)

    def traffic(self) -> tuple[int, int]:
        """The bytes that were sent and received over the wire so far."""
        return (0, 0) if self._hub is None else (self._hub.bytes_sent, self._hub.bytes_received)

    def counts(self) -> Mapping[str, int]:
        """The number of devices by state, as ``Observer.fleet`` explains it."""
        exchange = self.reception.exchange
        busy = 0 if exchange is None else len(exchange.machine.terms.cohort) - len(exchange.machine.verdicts)
        return {
            "enrolled": self.roster.leases.granted,
            "connected": self.roster.reachable(),
            "away": self.roster.away(),
            "online": int(self.roster.eligible(self.timeline.time).sum()),
            "busy": busy,
        }

    async def _announced(
        self,
        silent: Callable[[], list[DeviceId]],
        is_silent: Callable[[DeviceId], bool],
        seconds: float,
        then: str,
        moment: float = MOMENT_SECONDS,
    ) -> bool:
        """Ask the silent devices for their on-line times until none is silent. False if the time ran out.

        Observers are told of the wait after ``moment``, and that ``then`` follows it.
        """
        with self.waits.told(seconds, lambda: len(silent()), then, moment) as left_seconds:
            while left := silent():
                extend = wire.Extend(until=self.reception.horizon, since=self.timeline.time)
                for device in left:
                    self.tell(device, extend)
                if self._bedtime is not None:
                    self._bedtime.wake_heralds(again=True)
                pause = min(self._settings.heartbeat_seconds, left_seconds())
                if pause <= 0:
                    return False
                await self.waits.until(partial(_none_left, left, is_silent), pause)
            return True

    def send(self, peer: bytes, message: Message, frames: Sequence[Buffer] = ()) -> None:
        """Send a message to a peer, if it can be reached."""
        if self._hub is not None:
            self._hub.send(peer, message, frames)

    def is_sending(self, peer: bytes) -> bool:
        """Whether a long message of a peer is on its way."""
        return self._hub is not None and self._hub.is_sending(peer)

    def _bounds(self) -> Bounds:
        """What strangers may take: some descriptors must be left for the run's own files."""
        limit = open_files()
        most = limit - max(SPARE_FILES, limit // 4)
        admission = self.roster.admission
        return Bounds(
            connections=most,
            most_strangers=lambda: min(most_strangers(self._settings.devices), most // 2),
            knows=self.roster.has_place,
            ended=self.reception.ended,
            closed=self.reception.closed,
            most_unfinished=lambda: most_unfinished(admission.largest_reply),
        )

    def _key_of(self, peer: bytes) -> str:
        return "" if self._hub is None else self._hub.key_of(peer)

    def _may_be_edge(self, peer: bytes) -> bool:
        return self._hub is None or self._hub.may_be_edge(peer)

    def _cut(self, peer: bytes) -> None:
        if self._hub is not None:
            self._hub.cut(peer)

    def _tick(self) -> None:
        now = self.timeline.now()
        try:
            self._look(now)
        except Exception as error:
            self.reception.fail(error)
        self._ticked = now
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _look(self, now: float) -> None:
        """What has to be done a few times a second."""
        # After a long stall of this process every peer seems silent. Their messages have to be read first, and the
        # time of the stall does not count for any wait.
        stall = now - self._ticked - TICK_SECONDS
        if stall > self._settings.heartbeat_seconds:
            self._stalled = now
            self.waits.stalled(stall)
            if self.reception.exchange is not None:
                self.reception.exchange.stalled(stall)
        if now - self._stalled >= self._settings.heartbeat_seconds:
            self.reception.expire(now)
        if self._hub is not None:
            self._hub.look()
        for device in [device for device, (until, _) in self._untold.items() if now >= until]:
            _, message = self._untold.pop(device)
            if (peer := self.roster.connected.get(device)) is not None:
                self.send(peer, message)
        if (exchange := self.reception.exchange) is not None:
            if int(now) != int(self._ticked):
                self.reception.underway.tell(exchange.machine, now)
            exchange.tick(now)
        if self._bedtime is not None and self.reception.stopping is None:
            if self.waits.for_devices:
                self._bedtime.wake_heralds()
            self._bedtime.look(self.reception.exchange, self._untold, now)
        if int(now / TIDY_SECONDS) != int(self._ticked / TIDY_SECONDS):
            give_memory_back()
        if int(now) != int(self._ticked):
            self._observers.fleet(self.counts())
            absence = self.waits.absence(now)
            self._observers.waiting(absence)
            deserted = absence is not None and not absence.connected
            if deserted and not self._told_deserted:
                assert absence is not None
                self._observers.event("deserted", seconds=absence.seconds, then=absence.then)
            self._told_deserted = deserted


def _none_left(devices: list[DeviceId], is_silent: Callable[[DeviceId], bool]) -> bool:
    """Whether no device is silent any more. Those at the end of ``devices`` that are not silent are removed.

    So many calls together look at each device once, and not each call at all of them.
    """
    while devices and not is_silent(devices[-1]):
        devices.pop()
    return not devices
