"""An edge between a coordinator, or another edge, and the machines behind it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from fedemu.coordinator.edge.allowances import Allowances, too_long
from fedemu.coordinator.edge.behind import Behind
from fedemu.coordinator.edge.library import Library
from fedemu.coordinator.edge.plan import LARGEST, EdgePlan
from fedemu.coordinator.edge.summing import Summing
from fedemu.coordinator.edge.upward import Upward
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import DOWN, Buffer, Envelope
from fedemu.protocol.errors import FedemuError, ProtocolError, TooMuch
from fedemu.protocol.host.futures import fail
from fedemu.protocol.sharing import edge_messages as edge
from fedemu.protocol.sharing.bundle import tag_of
from fedemu.protocol.sharing.relay import Customs, Relay
from fedemu.protocol.sharing.trunk import Trunk
from fedemu.protocol.transport.interface import Bounds, Dialer, Network
from fedemu.protocol.wording import is_milestone

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
STALL_SECONDS = 2.0
"""A longer pause between two looks is a standstill of the edge itself."""
FAREWELL_SECONDS = 3.0
"""The time that the machines behind an edge have to leave after the end of a run."""
_FROM_BELOW = edge.up_decoder(LARGEST)
_NOT_ITS_LEASE = wire.Refused(
    reason="lease_unknown", detail="A shared connection speaks only for devices of its own leases."
)
_UNKNOWN_BLOB = wire.Refused(reason="unknown_blob", detail="This edge has not heard of the blob yet; ask again.")


class Edge(Customs):
    """One life of an edge. It is the customs of its own relay."""

    def __init__(self, plan: EdgePlan, above: Dialer, below: Network) -> None:
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._trunk = Trunk(above, self._loop)
        self._upward = Upward(plan, self._trunk, self._loop.time, self._placed, self._heard, self._end)
        self._allowances = Allowances()
        self._relay = Relay(
            below, plan.down, self._trunk, self._loop, LARGEST, self._loop.time, self, self._screen, self._bounds(),
            self._allowances.channels,
        )  # fmt: skip
        self._library = Library(
            plan.folder / "blobs",
            self._upward.say,
            self._relay.send,
            self._loop.time,
            lambda size: self._allowances.offered(size),
            lambda size, reply: self._allowances.asked(size, reply),
        )
        self._summing = Summing(
            plan.folder / "results", self._upward.say, self._relay.send, self._end, self._relay.hub.is_sending
        )
        self._vouched: dict[bytes, str] = {}
        """What edges below say of the keys of their peers."""
        self._behind = Behind(plan.told)
        self._proceeding: dict[bytes, str] = {}
        """The ask for which each peer was last told to proceed in its session."""
        self._ticked = self._loop.time()
        self._told: Counter[str] = Counter()
        """How often peers below were refused or their connections closed, by reason."""
        self._over: asyncio.Future[str] = self._loop.create_future()
        self._stop: wire.Stop | None = None
        """What the coordinator said at the end of the run. An edge below that comes later hears it, too."""

    @property
    def address(self) -> str:
        """The address at which machines reach this edge."""
        return self._relay.hub.address

    @property
    def traffic(self) -> dict[str, int]:
        """The bytes that were sent and received, up and down."""
        (sent, received), down = self._upward.traffic, self._relay.hub
        return {
            "up_sent": sent,
            "up_received": received,
            "down_sent": down.bytes_sent,
            "down_received": down.bytes_received,
        }

    async def run(self) -> str:
        """Serve until the coordinator says Stop, and return its reason. Raises RefusedError or UnreachableError."""
        try:
            self._upward.connect()
            self._plan.opened(self.address)
            while not self._over.done():
                await asyncio.wait({self._over}, timeout=TICK_SECONDS)
                if not self._over.done():
                    self._tick(self._loop.time())
            reason = self._over.result()
            for _ in range(int(FAREWELL_SECONDS / TICK_SECONDS)):
                if not self._relay.peers:
                    break
                await asyncio.sleep(TICK_SECONDS)
            return reason
        finally:
            if not self._over.done():
                self._over.cancel()
            self._upward.say(wire.Bye(reason="stopped"))
            self._relay.close()
            self._trunk.close()
            self._library.close()
            self._summing.close()

    # What passes the relay.

    def up(self, peer: bytes, tag: str, frames: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """Keep what ends here: results, requests for blobs, and what edges below say for themselves."""
        try:
            match tag:
                case "hello":
                    hello = _FROM_BELOW.decode(frames).message
                    if self._is_of_another(peer, hello.lease):
                        self._refuse(peer, _NOT_ITS_LEASE)
                        return None
                    self._proceeding.pop(peer, None)
                    self._vouch(peer)
                case "enroll":
                    self._vouch(peer)
                case "vouch":
                    self._hear_voucher(peer, _FROM_BELOW.decode(frames).message)
                    return None
                case "need" if self._relay.knows(peer):
                    need, connection = _FROM_BELOW.decode(frames).message, self._relay.hub.connection_of(peer)
                    if not self._allowances.may_get(connection, need.length, self._loop.time()):
                        self._ended(TooMuch.reason)
                        self._relay.hub.cut(connection)
                        return None
                    if self._library.answer(peer, need):
                        return None
                    if peer in self._summing.stations:  # nobody above knows an edge that is behind this one
                        self._relay.send(peer, _UNKNOWN_BLOB)
                        return None
                    return frames
                case "result" if self._summing.gathers:
                    return None if self._keep(peer, _FROM_BELOW.decode(frames)) else frames
                case "held":
                    # Of a device right behind this edge it is not true, and no sum with it would fit what it says.
                    if (station := self._relay.hub.connection_of(peer)) not in self._summing.stations:
                        return None
                    if peer in self._behind.devices:
                        self._summing.kept_by(station, self._behind.devices[peer])
                case "station":
                    self._take_in(peer)
                    return None
                case "partial":
                    self._summing.merge(peer, _FROM_BELOW.decode(frames))
                    return None
        except ProtocolError:
            return frames  # who is asked above tells the peer what is wrong
        except FedemuError as error:  # the disk is full
            self._end(error)
        return frames

    def down(self, peer: bytes, tag: str, frames: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """Learn of the leases and devices of the machines below, and of the blobs that they will want."""
        if tag not in ("granted", "welcome", "offer", "work", "proceed"):
            return frames
        try:
            match DOWN.decode(frames).message:
                case wire.Welcome(device=device):
                    # Not when it says Hello: until it is let in, it may be anybody's device that it names.
                    self._behind.devices[peer] = device
                case wire.Proceed(ask=ask):
                    if self._proceeding.get(peer) == ask and self._relay.hub.is_sending(peer):
                        return None  # its result is on its way, and it would send another
                    self._proceeding[peer] = ask
                case message:
                    self._library.read(message)
                    if isinstance(message, wire.Granted):
                        self._behind.grant(peer, message.lease)
        except ProtocolError:
            pass  # nobody below can read it, either
        except FedemuError as error:
            self._end(error)
        return frames

    def gone(self, peer: bytes) -> None:
        self._allowances.forget(peer)
        self._behind.forget(peer)
        self._vouched.pop(peer, None)
        self._proceeding.pop(peer, None)
        self._library.forget(peer)
        self._summing.leave(peer)

    def _is_of_another(self, peer: bytes, lease: str) -> bool:
        """Whether a peer is a channel, and the lease belongs to a machine on another connection."""
        connection, holder = self._relay.hub.connection_of(peer), self._behind.holder(lease)
        return connection != peer and holder is not None and self._relay.hub.connection_of(holder) != connection

    def _vouch(self, peer: bytes) -> None:
        """Say whose the peer is, for what it is about to ask."""
        key = edge.path_of(self._relay.hub.key_of(peer), self._vouched.get(peer, ""))
        if key:
            self._relay.send_up(peer, edge.Vouch(key=key))

    def _hear_voucher(self, peer: bytes, vouch: edge.Vouch) -> None:
        if self._relay.hub.connection_of(peer) in self._summing.stations:
            self._vouched[peer] = vouch.key

    def _keep(self, peer: bytes, envelope: Envelope) -> bool:
        device = self._behind.devices.get(peer)
        held = None if device is None else self._summing.keep(device, envelope.message, envelope.frames)
        if held is None:
            return False
        self._relay.send_up(peer, held)
        return True

    def _take_in(self, peer: bytes) -> None:
        """An edge below takes its place."""
        stationed = self._upward.stationed
        assert stationed is not None, "the relay keeps its message until this edge has a place itself"
        if not self._relay.hub.may_be_edge(peer):
            self._refuse(peer, wire.Refused(reason=edge.NO_EDGE, detail=edge.no_edge(self._relay.hub.key_of(peer))))
            return
        self._relay.greet(peer)
        self._relay.send(peer, stationed)
        self._summing.join(peer)
        if self._stop is not None:
            self._relay.send(peer, self._stop)

    # What comes from further up for this edge itself.

    def _placed(self, stationed: edge.Stationed, before: edge.Stationed | None) -> None:
        if before is None or stationed.devices != before.devices:
            self._allowances = Allowances(stationed.devices)
            self._relay.hub.most_channels = self._allowances.channels
        self._relay.watch(stationed.heartbeat_seconds, stationed.patience)
        self._library.restart()

    def _heard(self, envelope: Envelope) -> None:
        match envelope.message:
            case edge.Gather() as gather:
                self._summing.gather(gather)
            case edge.Sum() as wanted:
                self._summing.begin(wanted)
            case wire.Blob() as blob:
                self._library.receive(blob, envelope.frames[0])
            case wire.Refused(reason="unknown_blob"):
                self._library.refused()
            case wire.Stop() as stop:
                self._stop = stop
                for station in self._summing.stations:
                    self._relay.send(station, stop)
                if not self._over.done():
                    self._over.set_result(stop.reason)

    def _tick(self, now: float) -> None:
        if (stalled := now - self._ticked - TICK_SECONDS) > STALL_SECONDS:
            self._upward.stood_still(stalled, now)
        self._ticked = now
        self._relay.look()
        self._library.tick()
        self._behind.look(now, len(self._summing.stations))
        self._upward.tick(now)

    def _end(self, error: BaseException) -> None:
        fail(self._over, error)

    # Who may connect from below.

    def _screen(self, peer: bytes, frames: Sequence[Buffer]) -> ProtocolError | None:
        now, size = self._loop.time(), sum(map(len, frames))
        if self._relay.knows(peer):
            stopped = self._allowances.of_session(peer, size, now)
        else:
            connection = self._relay.hub.connection_of(peer)
            stopped = self._allowances.of_stranger(peer, connection, size, now)
            if stopped is not None:
                self._relay.hub.cut(connection)
            elif self._trunk.open:
                stopped = self._allowances.passed(len(frames), size, self._is_leased(peer, frames), now)
            else:  # it is kept until the coordinator is back, and counted then
                stopped = too_long(len(frames), size)
        if isinstance(stopped, TooMuch):
            self._ended(TooMuch.reason)
        return stopped

    def _is_leased(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        """Whether a peer asks for a device's session with a lease of a machine behind this edge, and may have it."""
        if len(frames) > 1 or tag_of(frames[0]) != "hello":
            return False
        try:
            lease = _FROM_BELOW.decode(frames).message.lease
        except ProtocolError:
            return False
        return self._behind.holder(lease) is not None and not self._is_of_another(peer, lease)

    def _refuse(self, peer: bytes, refused: wire.Refused) -> None:
        self._relay.send(peer, refused)
        self._tell("a peer was refused", refused.reason, f": {refused.detail}")

    def _ended(self, reason: str) -> None:
        scarce = reason == "connections" and self._plan.connections < 2 * self._allowances.channels
        advice = f"; {self._plan.connections} fit the limit of open files, raise it (ulimit -Hn)" if scarce else ""
        self._tell("a connection was closed", reason, advice)

    def _tell(self, what: str, reason: str, more: str) -> None:
        """The log tells the 1st, 10th, 100th and so on of what strangers may repeat: a flood must not fill the disk."""
        self._told[reason] += 1
        if is_milestone(count := self._told[reason]):
            log.warning("%s: %s (%d so far)%s", what, reason, count, more)

    def _bounds(self) -> Bounds:
        most = self._plan.connections
        return Bounds(
            connections=most,
            # Before it knows the run, all machines of a large one may come back to it at once.
            most_strangers=lambda: min(self._allowances.channels if self._upward.stationed else most, most // 2),
            knows=lambda peer: False,  # the relay decides
            ended=self._ended,
            closed=lambda peer: None,
            most_unfinished=lambda: self._allowances.unfinished,
        )
