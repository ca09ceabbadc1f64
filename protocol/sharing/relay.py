"""A relay between the peers of an address and a hub further up: each peer gets a channel of one shared connection.

It passes messages on as they come. Only signs of life end here: the relay answers them, and says further up which of
its peers fell silent. So the hub hears of a machine, and not of every device behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from fedemu.protocol.codec import DOWN, Buffer, Envelope, Limits, Packed, encode
from fedemu.protocol.errors import ProtocolError
from fedemu.protocol.liveness import Liveness
from fedemu.protocol.messages import REVOKED, SILENT, Beat, Bye, Message, Refused
from fedemu.protocol.sharing.bundle import Undecoded, tag_of
from fedemu.protocol.sharing.hub import Hub
from fedemu.protocol.sharing.trunk import Trunk
from fedemu.protocol.transport.interface import BOUNDLESS, Bounds, Network, ReaderLoop, Screen, let_all_pass

_FIRST: Final = frozenset({"hello", "enroll", "station"})
"""The messages by which a peer gets a session. The last of each peer is kept while nothing can be passed on."""
_GREETINGS: Final = frozenset({"welcome", "granted", "stationed"})
"""The answers by which a peer has a session."""
DEATH_SECONDS: Final = 1.0
"""The hub hears so late that a process of this machine has let go of its connection: its supervisor may know why."""
_BEAT: Final = Packed(encode(Beat())[0])
_UNKNOWN: Final = Packed(
    encode(Refused(reason="unknown_peer", detail="The coordinator does not know this connection any more."))[0]
)


class Customs:
    """Looks at what passes a relay, and may keep it. What it returns is passed on; None means nothing.

    These customs let everything pass.
    """

    def up(self, peer: bytes, tag: str, frames: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """A message of a peer, of the type ``tag``."""
        return frames

    def down(self, peer: bytes, tag: str, frames: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """A message for a peer."""
        return frames

    def gone(self, peer: bytes) -> None:
        """The peer has gone."""


class Relay:
    """Listens at ``address`` of ``network`` and passes on to ``trunk``. ``limits`` are those of messages.

    A peer is gone when its connection is, or when it has a session and says nothing for as long as ``watch`` says.
    ``bounds`` are those of the connections below; whom they know, and what happens when they close, is decided here.
    """

    def __init__(
        self,
        network: Network,
        address: str,
        trunk: Trunk,
        loop: ReaderLoop,
        limits: Limits,
        clock: Callable[[], float],
        customs: Customs | None = None,
        screen: Screen = let_all_pass,
        bounds: Bounds = BOUNDLESS,
        channels: int = 2**31,
        own: bool = False,
    ) -> None:
        """``own`` says that only processes of this machine connect: they may share connections, and none vouches."""
        self._trunk = trunk
        self._clock = clock
        self._loop = loop
        self._customs = customs or Customs()
        self._own = own
        self._screen = screen
        self._liveness: Liveness[bytes] = Liveness(2.0, 5)
        self._channels: dict[bytes, int] = {}
        self._peers: dict[int, bytes] = {}
        self._numbers = itertools.count()
        self._greeted: set[bytes] = set()
        self._first: dict[bytes, Sequence[Buffer]] = {}
        self.hub = Hub(
            network,
            address,
            Undecoded(limits),
            self._from_below,
            self._rejected,
            screen,
            replace(
                bounds,
                knows=(lambda peer: True) if own else self.knows,
                closed=self._let_go if own else self.part_from,
            ),
            loop,
            channels,
            over=lambda peer: None,
        )
        trunk.received, trunk.closed = self._from_above, self._closed_above
        trunk.began, trunk.ended = self._began, self._greeted.clear

    @property
    def peers(self) -> int:
        """The number of peers that are there."""
        return len(self._channels)

    def watch(self, heartbeat_seconds: float, patience: int) -> None:
        """From now on a peer is gone after ``heartbeat_seconds × patience`` without a message."""
        self._liveness = Liveness(heartbeat_seconds, patience)
        for peer in self._channels:
            self._liveness.heard(self._witness(peer), self._clock())

    def knows(self, peer: bytes) -> bool:
        """Whether the peer has a session."""
        return peer in self._greeted

    def greet(self, peer: bytes) -> None:
        """The peer has a session, which this relay itself or the hub has given it."""
        self._greeted.add(peer)
        if (witness := self._witness(peer)) not in self._liveness:  # it had to wait long for its session
            self._liveness.heard(witness, self._clock())

    def look(self) -> None:
        """Part from the peers that fell silent. To be called a few times a second."""
        self.hub.look()
        for peer in self._liveness.quiet(self._clock()):
            if self.hub.is_sending(peer):  # its heartbeats wait behind a long message
                self._liveness.heard(peer, self._clock())
                self.hub.send(peer, _BEAT)
        # Who has no session says no heartbeats, such as a machine that waits for places. ``bounds`` end its silence.
        expired = self._liveness.expired(self._clock())
        if silent := frozenset(peer for peer in expired if self._own or peer in self._greeted):
            for peer in [peer for peer in self._channels if self._witness(peer) in silent]:
                self.send_up(peer, Bye(reason=SILENT))
                self.part_from(peer)

    def send(self, peer: bytes, message: Message | Packed, frames: Sequence[Buffer] = ()) -> None:
        """Send a message to a peer that does not come from further up."""
        self.hub.send(peer, message, frames)

    def send_up(self, peer: bytes, message: Message) -> None:
        """Send a message on the channel of a peer that does not come from there."""
        channel = self._channels.get(peer)
        if channel is not None:
            self._trunk.send(channel, encode(message))

    def part_from(self, peer: bytes) -> None:
        """The peer has gone. If it speaks again, it needs a new session."""
        channel = self._channels.get(peer)
        if channel is not None:
            self._forget(peer, channel)
            self._trunk.close_channel(channel)

    def close(self) -> None:
        """Free the address."""
        self.hub.close()

    def _from_below(self, peer: bytes, envelope: Envelope) -> None:
        frames = [envelope.message.header, *envelope.frames]
        channel = self._channels.get(peer)
        if channel is None:
            channel = self._channels[peer] = next(self._numbers)
            self._peers[channel] = peer
        self._liveness.heard(self._witness(peer), self._clock())
        tag = tag_of(frames[0])
        if tag == "heartbeat":
            # A hub that is silent is silent through its relays, too.
            if self._trunk.open:
                self.hub.send(peer, _BEAT if peer in self._greeted else _UNKNOWN)
            return
        if not self._trunk.open and tag in _FIRST:
            self._first[peer] = frames
        elif (passed := self._customs.up(peer, tag, frames)) is not None:
            self._trunk.send(channel, passed)

    def _from_above(self, channel: int, frames: Sequence[Buffer]) -> None:
        peer = self._peers.get(channel)
        if peer is None:
            self._trunk.close_channel(channel)
            return
        tag = tag_of(frames[0])
        if tag in _GREETINGS:
            self.greet(peer)
        elif tag == "refused" and _says_unknown(frames):
            self._greeted.discard(peer)
        passed = self._customs.down(peer, tag, frames)
        if passed is not None:
            self.hub.send(peer, Packed(bytes(passed[0])), passed[1:])

    def _began(self) -> None:
        """The hub knows the owner, and none of the peers. They get to know it, and those that have asked ask again.

        What they ask is screened once more: it counts among what is passed on now, and not when it came.
        """
        first, self._first = self._first, {}
        for peer, channel in list(self._channels.items()):
            if (frames := first.get(peer)) is None:
                self.hub.send(peer, _UNKNOWN)
            elif (stopped := self._screen(peer, frames)) is not None:
                self._rejected(peer, stopped)
            elif (passed := self._customs.up(peer, tag_of(frames[0]), frames)) is not None:
                self._trunk.send(channel, passed)

    def _closed_above(self, channel: int) -> None:
        peer = self._peers.get(channel)
        if peer is not None:
            self._forget(peer, channel)
            self.hub.cut(peer)

    def _let_go(self, peer: bytes) -> None:
        """The connection of a process of this machine is closed, or the peer's channel in it."""
        channel = self._channels.get(peer)
        if channel is not None:
            self._forget(peer, channel)
            self._loop.call_later(DEATH_SECONDS, self._trunk.close_channel, channel)

    def _forget(self, peer: bytes, channel: int) -> None:
        del self._channels[peer], self._peers[channel]
        self._greeted.discard(peer)
        self._first.pop(peer, None)
        self._liveness.forget(peer)
        self._customs.gone(peer)

    def _witness(self, peer: bytes) -> bytes:
        """Whose messages show that the peer lives. Another relay vouches for the peers behind it."""
        return peer if self._own else self.hub.connection_of(peer)

    def _rejected(self, peer: bytes, error: ProtocolError) -> None:
        """A message was not taken: it came in a bundle of a connection without a session, or was too much."""
        if error.reason == "unknown_peer":
            self.hub.send(peer, _UNKNOWN)
        elif error.reason == "revoked":
            self.hub.send(peer, Refused(reason="revoked", detail=str(error)))
            self.send_up(peer, Bye(reason=REVOKED))
            self.part_from(peer)
        else:
            self.hub.cut(peer)


def _says_unknown(frames: Sequence[Buffer]) -> bool:
    try:
        return bool(DOWN.decode(frames).message.reason == "unknown_peer")
    except ProtocolError:
        return False
