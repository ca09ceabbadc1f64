"""The answers of the coordinator to every message. Nothing that a peer sends can end a run.

The roster and the open ask decide. An internal fault, such as a full disk, is kept in ``broken``. There are no sockets
here: ``send`` is given.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

from fedemu.coordinator.asks.exchange import Exchange
from fedemu.coordinator.fleet.likeness import Way
from fedemu.coordinator.fleet.online_times import OnlineTimes, horizon_of_ask
from fedemu.coordinator.fleet.roster import Roster
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.service.answers import Refusals, Verdicts
from fedemu.coordinator.service.comings import Comings
from fedemu.coordinator.service.screening import Screening
from fedemu.coordinator.service.shelf import Shelf
from fedemu.coordinator.service.underway import Underway
from fedemu.coordinator.settings import Settings
from fedemu.coordinator.timeline import Timeline
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import Buffer, Envelope
from fedemu.protocol.errors import BlobError, KeyRevoked, ProtocolError, RefusedError, TooMuch
from fedemu.protocol.host.futures import fail
from fedemu.protocol.ids import DeviceId, Digest
from fedemu.protocol.messages import Message
from fedemu.protocol.sharing import edge_messages as edge
from fedemu.protocol.wording import one_line

AboutAsk = wire.Scheduled | wire.Result | edge.Held | wire.Failed | wire.Declined

SMALL_CHUNK = 2**16
"""A chunk of a blob of at most so many bytes is read at once: a thread would cost more."""
_BEAT = wire.Beat()
_CAUSES: Mapping[tuple[str, str | None], wire.DropCause] = {
    ("death", None): "crash",
    ("silence", None): "silence",
    ("leave", "leave"): "leave",
    ("leave", "offline"): "offline",
}
"""Why devices went away, by the event that tells of it and the reason that they gave."""


class Reception:
    """Answers peers by the roster and by the open ask, of which there is at most one.

    ``changed`` is set when something happened that somebody may wait for. ``stopping`` is the message that every peer
    gets once the run is over. ``broken`` gets the exception if the coordinator itself has a fault.
    """

    def __init__(
        self,
        settings: Settings,
        roster: Roster,
        shelf: Shelf,
        timeline: Timeline,
        observers: Observers,
        granted: Callable[..., wire.Granted],
        send: Callable[[bytes, Message, Sequence[Buffer]], object],
        key_of: Callable[[bytes], str] = lambda peer: "",
        cut: Callable[[bytes], None] = lambda peer: None,
        may_be_edge: Callable[[bytes], bool] = lambda peer: True,
        is_sending: Callable[[bytes], bool] = lambda peer: False,
    ) -> None:
        self.roster = roster
        self.shelf = shelf
        self.timeline = timeline
        self.underway = Underway(roster, is_sending)
        self.verdicts = Verdicts()
        self.refusals = Refusals()
        self.horizon = horizon_of_ask(timeline.time, settings.deadline)
        """The time up to which devices are asked to announce their on-line times."""
        self.epoch = secrets.randbits(53)
        """The life of this coordinator. Messages about an ask of another life have no effect."""
        self.durable_round = 0
        """The round of the oldest checkpoint. The run never goes back to before it."""
        self.perturbed = False
        """Whether devices were replaced by others, which lack their own states."""
        self.exchange: Exchange | None = None
        self.stopping: wire.Stop | None = None
        self.changed = asyncio.Event()
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.screening = Screening(roster, observers, timeline.now, key_of, cut)
        self._settings = settings
        self._observers = observers
        self._granted = granted
        self._send = send
        self._key_of = key_of
        self._may_be_edge = may_be_edge
        self._comings = Comings()
        self._ways: dict[str, Way] = {}
        """How the machines compute that came before anything was computed, by the token of their lease."""
        self._vouched: dict[bytes, str] = {}
        """The keys of channels behind edges, as these say."""

    def received(self, peer: bytes, envelope: Envelope) -> None:
        """Handle a message that could be decoded."""
        now = self.timeline.now()
        try:
            self._dispatch_or_refuse(peer, envelope, now)
        except Exception as error:
            self.fail(error)

    def rejected(self, peer: bytes, error: ProtocolError) -> None:
        """Refuse a message that could not be decoded, or was not. A peer whose key was revoked has left."""
        now = self.timeline.now()
        reason = error.reason if error.reason in ("version", "unknown_peer", "revoked") else "malformed"
        try:
            if isinstance(error, TooMuch):
                self.screening.part_from(peer)
                return
            if not isinstance(error, KeyRevoked):
                self.roster.heard(peer, now)
            elif self.roster.knows(peer):
                self._leave(peer, "revoked", now, awaited=False)
            self._refuse(peer, reason, str(error), now, counted_as=error.reason)
        except Exception as fault:
            self.fail(fault)

    def fail(self, error: Exception) -> None:
        """End the run with the first fault of the coordinator itself."""
        fail(self.broken, error)

    def closed(self, peer: bytes) -> None:
        """The connection of a peer is gone, so nothing needs to be remembered of it."""
        self.roster.leases.hung_up(peer)
        self.refusals.forget(peer)
        self.underway.forget(peer)
        self.screening.forget(peer)
        self._vouched.pop(peer, None)

    def ended(self, reason: str) -> None:
        """The Router has closed a connection (connections, unfinished, idle, too_much)."""
        try:
            self.screening.ended(reason)
        except Exception as error:
            self.fail(error)

    def expire(self, now: float) -> None:
        """End the sessions of the peers that fell silent.

        A peer in the middle of a long message is not silent, and learns that this coordinator is not.
        """
        for peer in self.underway.heard(now):
            self._send(peer, _BEAT, ())
        for peer, device in self.roster.expire(now):
            self._gone(peer, device, "silence", now)

    def over(self, peer: bytes) -> None:
        """A channel was closed, or a connection that has channels."""
        try:
            if self.roster.knows(peer):
                self._leave(peer, "closed", self.timeline.now())
        except Exception as error:
            self.fail(error)

    def _dispatch_or_refuse(self, peer: bytes, envelope: Envelope, now: float) -> None:
        try:
            self._dispatch(peer, envelope.message, envelope.frames, now)
        except BlobError as error:
            self._refuse(peer, "unknown_blob", str(error), now)
        except RefusedError as error:
            self._refuse(peer, error.reason, str(error), now)
        except ProtocolError as error:
            self._refuse(peer, "malformed", str(error), now, counted_as=error.reason)

    def _dispatch(
        self, peer: bytes, message: wire.Up | edge.FromEdge, frames: Sequence[memoryview], now: float
    ) -> None:
        known = self.roster.heard(peer, now)
        if self.stopping is not None and not isinstance(message, wire.Bye):
            self._send(peer, self.stopping, ())
            return
        match message:
            case wire.Enroll():
                self._enroll(peer, message, now)
            case wire.Hello():
                self._hello(peer, message, now)
            case edge.Station():
                self._station(peer, message, now)
            case edge.Vouch():
                if self.roster.connection_of(peer) in self.roster.stations:
                    self._vouched[peer] = message.key
            case wire.Bye() if not known:
                pass  # an edge may tell that a channel is over before it reads what was said on it last
            case _ if not known:
                raise RefusedError("unknown_peer", "This connection is not known; enrol, or say Hello, first.")
            case wire.Heartbeat():
                self._send(peer, _BEAT, ())
            case wire.Scheduled() | wire.Result() | wire.Failed() | wire.Declined():
                self._about_ask(peer, message, frames, now)
            case wire.Need():
                if self.roster.admission.may_get(peer, message.length, now):
                    self._need(peer, message)
                else:
                    self.screening.part_from(peer)
            case wire.Presence():
                self._presence(peer, message)
            case wire.Bye(reason=wire.ASLEEP) if self.roster.was_told_to_rest(peer):
                if (device := self.roster.resting.get(peer)) is not None:
                    self._obeyed(device)
                self.roster.leave(peer, now)  # so this is no event
            case wire.Bye(reason=wire.SILENT):
                self._leave(peer, "silence", now)
            case wire.Bye():
                if message.reason == wire.UNABLE:
                    self._unable(peer, message.detail)
                self.roster.leases.renounce(peer)
                if message.reason == wire.REVOKED:
                    self._leave(peer, "revoked", now, awaited=False)
                else:
                    self._leave(peer, "leave", now, reason=message.reason)
            case edge.Held():
                self._about_ask(peer, message, (), now)
            case edge.Partial():
                if self.exchange is not None and peer in self.roster.stations and message.ask == self.exchange.text:
                    self.exchange.partial(peer, message, frames, now)
            case wire.Died():
                device = self.roster.died(message.device, message.incarnation, peer)
                if device is not None:
                    self._gone(peer, device, "death", now, incarnation=message.incarnation)
            case _:
                assert_never(message)

    def _obeyed(self, device: DeviceId) -> None:
        """A device sleeps as it was told, which is an answer. Nobody would wake it if it counted as lost."""
        self.roster.answers(device)
        if self.exchange is not None:
            self.exchange.heard_of(device)

    def _need(self, peer: bytes, message: wire.Need) -> None:
        """Send the chunk of a blob. A large one is read apart from the event loop."""
        self.shelf.require(Digest(message.digest))
        self.underway.fetches(peer, self.timeline.now())
        if message.length <= SMALL_CHUNK:
            blob, data = self.shelf.answer(message)
            self._send(peer, blob, (data,))
            return
        read = asyncio.get_running_loop().run_in_executor(self.shelf.reader, self.shelf.answer, message)
        read.add_done_callback(lambda done: self._read(peer, done))

    def _read(self, peer: bytes, done: asyncio.Future[tuple[wire.Blob, memoryview]]) -> None:
        if done.cancelled():
            return
        try:
            blob, data = done.result()
            self._send(peer, blob, (data,))
        except BlobError as error:
            self._refuse(peer, "unknown_blob", str(error), self.timeline.now())
        except Exception as error:
            self.fail(error)

    def _enroll(self, peer: bytes, message: wire.Enroll, now: float) -> None:
        before = self.roster.leases.of_peer(peer)
        # Other machines and the coordinator's own people may get to read this name.
        key, host = self._owner(peer), one_line(message.host)
        likeness = self.roster.likeness
        self._forget_ways()
        if sentence := likeness.refusal(message.compute, host):
            raise RefusedError("compute", sentence)
        known = self.roster.leases.of_token(message.lease)
        former = None if known is None else known.peer
        lease = self.roster.enroll(peer, message.count, message.lease, host, now, key)
        if former is not None and not self.roster.knows(former):
            self._comings.goes(former)  # it has come back before anybody missed it
        self._send(peer, self._granted(lease=lease.token, ranges=lease.ranges), ())
        if lease is not before:
            # With a new lease come new devices, in place of others that took their own states with them.
            if lease.token != message.lease and (lost := self.roster.forget_states(lease)):
                self.perturbed = True
                self._observers.event("own_states_lost", devices=lost)
            difference = likeness.note(message.compute, host)
            if message.compute is not None and not likeness.settled:
                self._ways[lease.token] = Way(host, message.compute)
            if (told := self._comings.comes(peer, lease.token, now)) is not None:
                self._observers.event("enroll", host=lease.host, devices=len(lease), **told)
                if difference:
                    self._observers.event("mixed_compute", host=host, detail=difference)
            self.changed.set()

    def _forget_ways(self) -> None:
        """Forget how machines compute that have left before anything was computed. They bind nobody."""
        leases = self.roster.leases
        here = {lease.token for peer in leases.peers if (lease := leases.of_peer(peer)) is not None}
        self._ways = {token: way for token, way in self._ways.items() if token in here}
        self.roster.likeness.forget_others(self._ways.values())

    def _station(self, peer: bytes, message: edge.Station, now: float) -> None:
        settings = self._settings
        if self.roster.connection_of(peer) != peer:
            raise RefusedError("malformed", "An edge takes its place on a connection, and not on a channel of one.")
        if not self._may_be_edge(peer):
            raise RefusedError(edge.NO_EDGE, edge.no_edge(self._key_of(peer)))
        anew = self.roster.station(peer, now, self._key_of(peer))
        stationed = edge.Stationed(
            run=settings.run,
            devices=settings.devices,
            heartbeat_seconds=settings.heartbeat_seconds,
            patience=settings.patience,
        )
        self._send(peer, stationed, ())
        if anew:
            if (told := self._comings.comes(peer, "edges", now)) is not None:
                self._observers.event("edge", host=one_line(message.host), **told)
            if self.exchange is not None:
                self.exchange.station_joined(peer)

    def _hello(self, peer: bytes, message: wire.Hello, now: float) -> None:
        before = self.roster.device_of(peer)
        seated = self.roster.hello(peer, message, now, self._owner(peer))
        device, settings = seated.device, self._settings
        if before is not None and before != device:
            self._gone(peer, before, "leave", now, reason="another device")
        if seated.replaced is not None and seated.replaced != peer:
            detail = f"Incarnation {message.incarnation} has taken the place of device {device}."
            self._send(seated.replaced, wire.Refused(reason="superseded", detail=detail), ())
            if not self.roster.knows(seated.replaced):
                self._comings.goes(seated.replaced)  # it may have enrolled on its own connection, too
        welcome = wire.Welcome(
            device=device,
            clock=settings.clock,
            horizon=self.horizon if self.roster.planned is None else 0.0,  # what is planned need not be announced
            heartbeat_seconds=settings.heartbeat_seconds,
            patience=settings.patience,
            durable_round=self.durable_round,
            elapsed=self.timeline.time,
        )
        self._send(peer, welcome, ())
        if not seated.anew:
            return
        # A device that sleeps until it is asked comes all the time: an event tells only if it goes without being told.
        if self.roster.planned is None and (told := self._comings.comes(device, device, now)) is not None:
            self._observers.event("join", device=device, incarnation=message.incarnation, **told)
        if self.exchange is not None:
            if seated.replaced is not None:
                self.exchange.left(device, now)
            self.exchange.joined(device, now)
        self.changed.set()

    def _presence(self, peer: bytes, message: wire.Presence) -> None:
        device = self._device(peer)
        if device is None:
            return
        times = OnlineTimes(message.until, message.intervals, self.timeline.time)
        if self.roster.planned is None and self.roster.announced.announce(device, times):
            self.changed.set()

    def _about_ask(self, peer: bytes, message: AboutAsk, frames: Sequence[memoryview], now: float) -> None:
        device, exchange = self._device(peer), self.exchange
        if device is None:
            return
        if exchange is not None and message.ask == exchange.text:
            if message.epoch not in (None, self.epoch):
                # An answer would end the work of the same name that the device has or will have from this coordinator.
                self.screening.refused("epoch")
                return
            if not isinstance(message, edge.Held):
                exchange.receive(device, message, frames, now)
            elif (station := self.roster.connection_of(peer)) in self.roster.stations:
                exchange.held(device, message, station, now)
        elif isinstance(message, wire.Result | edge.Held):
            self._send(peer, self.verdicts.answer(message.ask, device), ())

    def _unable(self, peer: bytes, detail: str) -> None:
        """A machine leaves because it cannot take part, or go on, such as without code that it was not told to run."""
        lease = self.roster.leases.of_peer(peer)
        # A machine knows after it got its places. Somebody else would only like to be read by people.
        if lease is not None and (count := self.screening.refuses(wire.UNABLE)):
            self._observers.event("unable", host=lease.host, detail=one_line(detail), count=count)

    def _leave(self, peer: bytes, event: str, now: float, awaited: bool = True, **fields: Any) -> None:
        """The peer has left. If it is not ``awaited``, others may have its places at once."""
        for each, device in self.roster.leave_all(peer, now if awaited else -math.inf):
            self._gone(each, device, event, now, **fields)

    def _gone(self, peer: bytes, device: DeviceId | None, event: str, now: float, **fields: Any) -> None:
        self.refusals.forget(peer)
        if device is not None and self.roster.planned is not None:
            fields |= self._comings.comes(device, device, now) or {}
        if self._comings.goes(peer if device is None else device):
            self._observers.event(event, device=device, **fields)
        if not self.roster.knows(peer):
            self._comings.goes(peer)  # a device may have enrolled on its own connection
        cause = _CAUSES.get((event, fields.get("reason")))
        if device is not None and cause in ("leave", "offline") and self._settings.clock == "wall":
            self.roster.departed.add(device)
        if self.exchange is not None:
            self.exchange.station_left(peer, now)
            if device is not None:
                self.exchange.left(device, now, cause)
        self.changed.set()

    def _owner(self, peer: bytes) -> str:
        """The key to which leases of this peer belong, with those of the edges before it."""
        return edge.path_of(self._key_of(peer), self._vouched.get(peer, ""))

    def _device(self, peer: bytes) -> DeviceId | None:
        """The device that answers on this connection. None if it was told to sleep, and has not heard that yet."""
        device = self.roster.device_of(peer)
        answering = self.roster.resting.get(peer) if device is None else device
        if answering is None:
            raise RefusedError("unknown_peer", "No device has said Hello on this connection.")
        self.roster.answers(answering)
        return device

    def _refuse(self, peer: bytes, reason: str, detail: str, now: float, counted_as: str | None = None) -> None:
        self.screening.refused(counted_as or reason)
        if self.refusals.allow(peer, reason, now):
            self._send(peer, wire.Refused(reason=reason, detail=detail[:2048]), ())
