"""The coordinator's shell: messages in, machines asked, answers out. It keeps time for them and decides nothing itself.

Nothing that a peer sends can end a run; a fault of this side (a full disk) is kept in ``broken`` and ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

from fedemu.coordinator.exchange import Exchange
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.presence import Presence, horizon
from fedemu.coordinator.refusals import Refusals
from fedemu.coordinator.roster import Roster
from fedemu.coordinator.settings import Settings
from fedemu.coordinator.shelf import Shelf
from fedemu.coordinator.timeline import Timeline
from fedemu.coordinator.verdicts import Verdicts
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import Buffer, Decoder, Envelope, Limits
from fedemu.protocol.errors import BlobError, ProtocolError, RefusedError
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import Message
from fedemu.protocol.transport import Network, Router

TICK_SECONDS = 0.25
DRAIN_SECONDS = 0.5
"""How long peers may take to leave after Stop."""

_BEAT = wire.Beat()


class Service:
    """One address, and behind it the roster and at most one open ask."""

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
        self.verdicts = Verdicts()
        self.horizon = horizon(timeline.time + settings.deadline)
        """Up to when devices have been asked to announce their presence."""
        self.durable_round = 0
        self.exchange: Exchange | None = None
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._settings = settings
        self._observers = observers
        self._granted = granted
        self._refusals = Refusals()
        self._router: Router | None = None
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._ticked = 0.0
        self._stopping: wire.Stop | None = None

    # ── life ──────────────────────────────────────────────────────────────────

    def open(self, network: Network, address: str) -> Router:
        limit = self._settings.payload_bytes
        decoder = Decoder(wire.Up, Limits(frame_bytes=limit, message_bytes=limit))
        self._router = network.bind(address, decoder, self._received, self._rejected)
        self._ticked = self.timeline.now()
        self._tick()
        return self._router

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._router is not None:
            self._router.close()

    async def stop(self, reason: str) -> None:
        """Tell everyone that the run is over, and wait a little until they have gone."""
        self._stopping = wire.Stop(reason=reason)
        for peer in [*self.roster.peers, *self._refusals.idle]:
            self._send(peer, self._stopping)
        await self.until(lambda: not self.roster.peers, DRAIN_SECONDS)

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for what messages bring about, ``seconds`` real ones at most; says whether it came about."""
        end = self.timeline.now() + seconds
        while not condition():
            left = end - self.timeline.now()
            if left <= 0:
                return False
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
            except TimeoutError:
                continue
        return True

    # ── asks ──────────────────────────────────────────────────────────────────

    async def perform(self, exchange: Exchange) -> None:
        """Carry an exchange to its end; its machine bounds the wait."""
        cohort = exchange.machine.terms.cohort
        if exchange.order.shared:
            offer = wire.Offer(blobs=exchange.order.shared, round=exchange.order.ask.round)
            for peer in self.roster.leases.peers_of(cohort):
                self._send(peer, offer)
        self.exchange = exchange
        try:
            exchange.start(self.timeline.now())
            await exchange.closed
        finally:
            self.exchange = None
            self.verdicts.remember(exchange.order.ask, exchange.machine.verdicts)

    def tell(self, device: DeviceId, message: Message, frames: Sequence[Buffer] = ()) -> None:
        """Send to a device if it is connected; what does not arrive is sent again when it comes back."""
        peer = self.roster.connected.get(device)
        if peer is not None:
            self._send(peer, message, frames)

    async def extend(self, until: float) -> None:
        """Have every device announce its presence up to ``until`` if it did not yet; wait for ``give_up`` at most."""
        if until <= self.horizon:
            return
        self.horizon = until
        extend = wire.Extend(until=self.horizon)
        asked = {member.device: member.presence for member in self.roster.lacking(self.horizon)}
        for device in asked:
            self.tell(device, extend)
        members = self.roster.members

        def answered() -> bool:
            return all(members[device].presence is not before for device, before in asked.items())

        await self.until(answered, self._settings.give_up)

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received over the wire so far."""
        return (0, 0) if self._router is None else (self._router.bytes_sent, self._router.bytes_received)

    # ── messages ──────────────────────────────────────────────────────────────

    def _received(self, peer: bytes, envelope: Envelope) -> None:
        now = self.timeline.now()
        try:
            self._dispatch(peer, envelope.message, envelope.frames, now)
        except (ProtocolError, RefusedError, BlobError) as error:
            reason = "unknown_blob" if isinstance(error, BlobError) else error.reason
            self._refuse(peer, reason, str(error), now)
        except Exception as error:
            if not self.broken.done():
                self.broken.set_exception(error)

    def _dispatch(self, peer: bytes, message: Any, frames: Sequence[memoryview], now: float) -> None:
        known = self.roster.heard(peer, now)
        if self._stopping is not None and not isinstance(message, wire.Bye):
            self._send(peer, self._stopping)
            return
        match message:
            case wire.Enroll():
                self._enroll(peer, message, now)
            case wire.Hello():
                self._hello(peer, message, now)
            case _ if not known:
                raise RefusedError("unknown_peer", "This connection is not known; enrol, or say Hello, first.")
            case wire.Heartbeat():
                self._send(peer, _BEAT)
            case wire.Scheduled() | wire.Result() | wire.Failed() | wire.Declined():
                self._about_ask(self._device(peer), message, frames, now)
            case wire.Need():
                blob, data = self.shelf.answer(message)
                self._send(peer, blob, (data,))
            case wire.Presence():
                self._presence(self._device(peer), message)
            case wire.Bye():
                self._gone(peer, self.roster.leave(peer, now), "leave", now, reason=message.reason)
            case wire.Died():
                device = self.roster.died(message.device, message.incarnation, peer)
                if device is not None:
                    self._gone(peer, device, "death", now, incarnation=message.incarnation)
            case _:
                assert_never(message)

    def _about_ask(
        self,
        device: DeviceId,
        message: wire.Scheduled | wire.Result | wire.Failed | wire.Declined,
        frames: Sequence[memoryview],
        now: float,
    ) -> None:
        exchange = self.exchange
        if exchange is not None and message.ask == exchange.text:
            exchange.receive(device, message, frames, now)
        elif isinstance(message, wire.Result):
            self.tell(device, self.verdicts.answer(message.ask, device))

    def _enroll(self, peer: bytes, message: wire.Enroll, now: float) -> None:
        lease = self.roster.enroll(peer, message.count, message.lease, message.host, now)
        if lease is not None:
            self._send(peer, self._granted(lease=lease.token, ranges=lease.ranges))
            self._observers.event("enrolled", host=lease.host, devices=len(lease.indices))
            self._changed.set()

    def _hello(self, peer: bytes, message: wire.Hello, now: float) -> None:
        member, replaced = self.roster.hello(peer, message, now)
        device, settings = member.device, self._settings
        if replaced is not None and replaced != peer:
            self._send(replaced, wire.Refused(reason="superseded", detail="A newer incarnation has taken your place."))
        welcome = wire.Welcome(
            device=device,
            clock=settings.clock,
            horizon=self.horizon,
            heartbeat_seconds=settings.heartbeat_seconds,
            patience=settings.patience,
            durable_round=self.durable_round,
            elapsed=self.timeline.time,
        )
        self._send(peer, welcome)
        self._observers.event("joined", device=device, incarnation=member.incarnation)
        if self.exchange is not None:
            if replaced is not None:
                self.exchange.left(device, now)
            self.exchange.joined(device, now)
        self._changed.set()

    def _presence(self, device: DeviceId, message: wire.Presence) -> None:
        member = self.roster.members[device]
        presence = Presence(message.until, message.intervals)
        if member.presence is None or presence.until >= member.presence.until:
            member.presence = presence
            self._changed.set()

    def _gone(self, peer: bytes, device: DeviceId | None, event: str, now: float, **fields: Any) -> None:
        self._refusals.forget(peer)
        self._observers.event(event, device=device, **fields)
        if device is not None and self.exchange is not None:
            self.exchange.left(device, now)
        self._changed.set()

    def _device(self, peer: bytes) -> DeviceId:
        device = self.roster.device_of(peer)
        if device is None:
            raise RefusedError("unknown_peer", "No device has said Hello on this connection.")
        return device

    def _rejected(self, peer: bytes, error: ProtocolError) -> None:
        now = self.timeline.now()
        self.roster.heard(peer, now)
        reason = "version" if error.reason == "version" else "malformed"
        self._refuse(peer, reason, str(error), now, counted_as=error.reason)

    def _refuse(self, peer: bytes, reason: str, detail: str, now: float, counted_as: str | None = None) -> None:
        self._observers.rejected(counted_as or reason)
        if self._refusals.allow(peer, reason, now):
            self._send(peer, wire.Refused(reason=reason, detail=detail[:2048]))

    def _send(self, peer: bytes, message: Message, frames: Sequence[Buffer] = ()) -> None:
        assert self._router is not None
        self._router.send(peer, message, frames)

    # ── time ──────────────────────────────────────────────────────────────────

    def _tick(self) -> None:
        now = self.timeline.now()
        late = now - self._ticked > TICK_SECONDS + self._settings.heartbeat_seconds
        # After a long stall of this process everyone seems silent; what they said meanwhile has to be read first.
        if not late:
            for peer, device in self.roster.expire(now):
                self._gone(peer, device, "silence", now)
        if self.exchange is not None:
            self.exchange.tick(now)
        if int(now) != int(self._ticked):
            self._observers.fleet(self.counts())
        self._ticked = now
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def counts(self) -> Mapping[str, int]:
        """Devices by state."""
        machine = self.exchange.machine if self.exchange is not None else None
        return {
            "enrolled": self.roster.leases.granted,
            "connected": len(self.roster.connected),
            "online": len(self.roster.online(self.timeline.time)),
            "busy": 0 if machine is None else len(machine.terms.cohort) - len(machine.verdicts),
        }
