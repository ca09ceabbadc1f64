"""One connection for all Dealers of a process, to a relay that knows its processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from fedemu.protocol.codec import DOWN, Buffer, Decoder, Envelope, Packed, encode
from fedemu.protocol.errors import ProtocolError
from fedemu.protocol.messages import Message
from fedemu.protocol.sharing.bundle import Bundle, BundleDecoder, Outbox, parts_of
from fedemu.protocol.transport.interface import Dealer, Dialer, ReaderLoop, handing_on


class Pack:
    """A Dialer to one address. Each of its Dealers is a channel of the same connection through ``network``."""

    def __init__(self, network: Dialer, loop: ReaderLoop) -> None:
        self._network = network
        self._loop = loop
        self._dealer: Dealer | None = None
        self._outbox = Outbox()
        self._numbers = itertools.count()
        self._channels: dict[int, Channel] = {}
        self._due = False

    def connect(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[Envelope], None],
        rejected: Callable[[ProtocolError], None],
    ) -> Channel:
        if self._dealer is None:
            self._dealer = self._network.connect(address, BundleDecoder(DOWN), self._take, lambda error: None)
        number = next(self._numbers)
        channel = self._channels[number] = Channel(self, number, handing_on(decoder, received, rejected))
        return channel

    def close(self) -> None:
        self._leave()
        if self._dealer is not None:
            self._dealer.close()

    def put(self, channel: int, frames: Sequence[Buffer]) -> None:
        """Send a message on a channel, with what other channels say in this turn of the loop."""
        self._dispatch(self._outbox.put(channel, frames))
        self._leave_soon()

    def over(self, channel: int) -> None:
        """The channel is closed on this side."""
        if self._channels.pop(channel, None) is not None:
            self._outbox.close(channel)
            self._leave_soon()

    def _take(self, envelope: Envelope) -> None:
        if not isinstance(envelope.message, Bundle):
            return
        for number, frames in parts_of(envelope.message, envelope.frames):
            channel = self._channels.get(number)
            if channel is not None:
                channel.take(frames)

    def _leave_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._leave)

    def _leave(self) -> None:
        self._due = False
        self._dispatch(self._outbox.take())

    def _dispatch(self, bundles: Sequence[tuple[Bundle, list[Buffer]]]) -> None:
        for bundle, frames in bundles:
            if self._dealer is not None:
                self._dealer.send(bundle, frames)


class Channel:
    """A Dealer of a pack."""

    def __init__(
        self,
        pack: Pack,
        number: int,
        hand_on: Callable[[Sequence[Buffer]], None],
    ) -> None:
        self.bytes_received = 0
        self.bytes_sent = 0
        self._pack = pack
        self._number = number
        self._hand_on = hand_on
        self._closed = False

    def send(self, message: Message | Packed, frames: Sequence[Buffer] = ()) -> bool:
        if self._closed:
            return False
        parts = encode(message, frames)
        self.bytes_sent += sum(map(len, parts))
        self._pack.put(self._number, parts)
        return True

    def close(self) -> None:
        self._closed = True
        self._pack.over(self._number)

    def take(self, frames: Sequence[Buffer]) -> None:
        """A message has come for this channel."""
        self.bytes_received += sum(map(len, frames))
        self._hand_on(frames)
