"""The end with the address of shared connections: a Router to which every channel is a peer of its own.

Whoever is told of peers here need not know which of them share a connection. ``connection_of`` tells it.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from fedemu.protocol.codec import Buffer, Decoder, Envelope, Packed, encode
from fedemu.protocol.errors import ProtocolError, TooMuch, UnknownPeer
from fedemu.protocol.messages import Message
from fedemu.protocol.sharing.bundle import Bundle, BundleDecoder, Outbox, Part, is_bundle, parts_of
from fedemu.protocol.transport.interface import Bounds, Network, ReaderLoop, Screen, handing_on_from_peers

logger = logging.getLogger(__name__)

SPARE_BUNDLES = 64
"""So many messages beside one for each channel may wait for a connection whose own queue is full."""
FRAMES_OF_A_MESSAGE = 64
"""So many frames, or closed channels that do not exist, count as one message more: they cost time, also if empty."""
_SECRET_BYTES = 12
"""The names of channels begin with so many random bytes. So no connection can be called like a channel."""


Charge = Callable[[bytes, int, float], ProtocolError | None]
"""Counts bytes and messages of a connection. An error says that it has sent too many."""


def charge_nothing(connection: bytes, size: int, messages: float) -> None:
    """The charge of an end that counts nothing."""


@dataclass(slots=True)
class _Shared:
    """A connection with channels: the name of each as a peer, and what waits to be sent.

    What left the ``outbox`` while the queue of the connection was full is ``waiting``: an ask may have a long message
    for each channel, and a queue is as long as for one peer. ``full`` says that some of it was dropped.
    """

    names: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    outbox: Outbox = field(default_factory=Outbox)
    waiting: deque[tuple[Message | Packed, Sequence[Buffer]]] = field(default_factory=deque)
    full: bool = False


class Hub:
    """A Router at ``address`` of ``network``. The arguments are those of ``Network.bind``.

    A connection may have channels while ``shares`` says so, and ``channels`` of them at most. A further one takes the
    place of the oldest that has no session. ``over`` is called with each channel that is closed. When a connection that
    has channels is gone, it is called with each of them, and then with the connection.
    ``screen`` counts the messages of channels; ``charge`` counts what else a bundle costs.
    """

    def __init__(
        self,
        network: Network,
        address: str,
        decoder: Decoder,
        received: Callable[[bytes, Envelope], None],
        rejected: Callable[[bytes, ProtocolError], None],
        screen: Screen,
        bounds: Bounds,
        loop: ReaderLoop,
        channels: int,
        over: Callable[[bytes], None],
        shares: Callable[[bytes], bool] | None = None,
        charge: Charge = charge_nothing,
    ) -> None:
        self._received = received
        self._rejected = rejected
        self._screen = screen
        self._hand_on = handing_on_from_peers(decoder, received, rejected, screen)
        self._bounds = bounds
        self._loop = loop
        self.most_channels = channels
        self._over = over
        self._shares = shares or bounds.knows
        self._charge = charge
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._numbers = itertools.count()
        self._closing: set[bytes] = set()
        self._shared: dict[bytes, _Shared] = {}
        self._laden: dict[bytes, None] = {}
        """The connections with channels for which something waits. A turn of the loop looks at no others."""
        self._places: dict[bytes, tuple[bytes, int]] = {}
        self._due = False
        self._router = network.bind(
            address,
            BundleDecoder(decoder),
            self._take,
            rejected,
            self._look_over,
            replace(bounds, closed=self._ended),
        )

    @property
    def address(self) -> str:
        return self._router.address

    @property
    def bytes_received(self) -> int:
        return self._router.bytes_received

    @property
    def bytes_sent(self) -> int:
        return self._router.bytes_sent

    def connection_of(self, peer: bytes) -> bytes:
        """The connection of a peer: the peer itself, unless it is a channel."""
        place = self._places.get(peer)
        return peer if place is None else place[0]

    def send(self, peer: bytes, message: Message | Packed, frames: Sequence[Buffer] = ()) -> bool:
        place = self._places.get(peer)
        if place is None:
            shared = self._shared.get(peer)
            if shared is None or not shared.waiting:
                return self._router.send(peer, message, frames)
            return self._dispatch(peer, shared, [(message, frames)])
        connection, channel = place
        shared = self._shared[connection]
        self._dispatch(connection, shared, shared.outbox.put(channel, encode(message, frames)))
        self._leave_soon(connection)
        return True

    def is_sending(self, peer: bytes) -> bool:
        """Whether a long message is on its way on the connection of a peer, as ``Router`` explains it."""
        return self._router.is_sending(self.connection_of(peer))

    def cut(self, peer: bytes) -> None:
        """Close a connection, or a channel: its side then closes what is behind it."""
        place = self._places.get(peer)
        if place is None:
            self._closing.add(peer)
            self._router.cut(peer)
            return
        connection, channel = place
        shared = self._shared[connection]
        del shared.names[channel]
        shared.outbox.close(channel)
        self._leave_soon(connection)
        self._forget(peer)

    def look(self) -> None:
        self._router.look()
        for connection in self._laden:
            self._dispatch(connection, self._shared[connection])

    def key_of(self, peer: bytes) -> str:
        return self._router.key_of(self.connection_of(peer))

    def may_be_edge(self, peer: bytes) -> bool:
        """Whether a peer may be an edge. A channel may not."""
        return peer not in self._places and self._router.may_be_edge(peer)

    def close(self) -> None:
        self._leave()
        self._router.close()

    def _look_over(self, connection: bytes, frames: Sequence[Buffer]) -> ProtocolError | None:
        if connection in self._closing:
            return TooMuch("This connection is being closed.")
        if not is_bundle(frames):
            return self._screen(connection, frames)
        # The messages of a bundle are counted one by one. One without messages is itself a message.
        known = self._shares(connection)
        messages = len(frames) / FRAMES_OF_A_MESSAGE + (not known or len(frames) == 1)
        if (stopped := self._charge(connection, len(frames[0]), messages)) is not None:
            return stopped
        return None if known else UnknownPeer("This connection has no session; enrol first.")

    def _take(self, connection: bytes, envelope: Envelope) -> None:
        if not isinstance(envelope.message, Bundle):
            self._received(connection, envelope)
            return
        if envelope.message.channels:
            self._shared.setdefault(connection, _Shared())
        shared, strange = self._shared.get(connection), 0
        for part in parts_of(envelope.message, envelope.frames):
            if connection in self._closing or self._shared.get(connection) is not shared:
                return  # it was closed by what a part before has said
            self._take_part(connection, part)
        for channel in envelope.message.closed:
            if self._shared.get(connection) is not shared:
                return
            if shared is not None and (peer := shared.names.pop(channel, None)) is not None:
                self._forget(peer)
            else:
                strange += 1
        if strange and (stopped := self._charge(connection, 0, strange / FRAMES_OF_A_MESSAGE)) is not None:
            self._rejected(connection, stopped)

    def _take_part(self, connection: bytes, part: Part) -> None:
        shared = self._shared[connection]
        peer = shared.names.get(part.channel)
        if peer is None:
            if len(shared.names) >= self.most_channels and not self._make_room(shared):
                self._rejected(connection, TooMuch("This connection has more channels than a run needs."))
                return
            peer = shared.names[part.channel] = self._secret + next(self._numbers).to_bytes(8, "big")
            self._places[peer] = (connection, part.channel)
        self._hand_on(peer, part.frames)

    def _make_room(self, shared: _Shared) -> bool:
        """Close the oldest channel without a session. False if all channels have one.

        Those with a session move to the end, so that the next search does not meet them again soon.
        """
        for _ in range(len(shared.names)):
            channel, peer = next(iter(shared.names.items()))
            if not self._bounds.knows(peer):
                self.cut(peer)
                return True
            shared.names.move_to_end(channel)
        return False

    def _ended(self, connection: bytes) -> None:
        self._closing.discard(connection)
        shared = self._shared.pop(connection, None)
        self._laden.pop(connection, None)
        if shared is not None:
            self._forget(*shared.names.values())
            self._over(connection)
        self._bounds.closed(connection)

    def _forget(self, *peers: bytes) -> None:
        """Channels are over. Whoever hears of the end of one may want to tell the others something."""
        for peer in peers:
            del self._places[peer]
        for peer in peers:
            self._over(peer)
            self._bounds.closed(peer)

    def _leave_soon(self, connection: bytes) -> None:
        self._laden[connection] = None
        if not self._due:
            self._due = True
            self._loop.call_soon(self._leave)

    def _leave(self) -> None:
        """Send what waits. So the messages of one turn of the loop go in one bundle for each connection."""
        self._due = False
        laden, self._laden = self._laden, {}
        for connection in laden:
            if (shared := self._shared.get(connection)) is not None:
                self._dispatch(connection, shared, shared.outbox.take())
                if shared.waiting:
                    self._laden[connection] = None

    def _dispatch(
        self, connection: bytes, shared: _Shared, more: Iterable[tuple[Message | Packed, Sequence[Buffer]]] = ()
    ) -> bool:
        """Send what waits for the queue of a connection, and then ``more``. Returns whether nothing was dropped."""
        while shared.waiting and self._router.send(connection, *shared.waiting[0], again=True):
            shared.waiting.popleft()
            shared.full = False
        for message, frames in more:
            if shared.waiting or not self._router.send(connection, message, frames, again=True):
                shared.waiting.append((message, frames))
        dropped = len(shared.waiting) - SPARE_BUNDLES - len(shared.names)
        if dropped <= 0:
            return True
        for _ in range(dropped):
            shared.waiting.pop()
        if not shared.full:
            shared.full = True
            logger.warning("too much waits for the shared connection %s; its messages are dropped", connection.hex())
        return False
