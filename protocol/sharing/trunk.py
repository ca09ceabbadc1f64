"""The end of a shared connection that connects: one Dealer for the messages of its owner and of channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedemu.protocol.codec import Buffer, Decoder, Envelope, Packed
from fedemu.protocol.errors import ProtocolError
from fedemu.protocol.messages import Granted, Heartbeat, Message, Refused
from fedemu.protocol.sharing.bundle import Bundle, BundleDecoder, Outbox, parts_of
from fedemu.protocol.sharing.edge_messages import Stationed
from fedemu.protocol.transport.interface import Dealer, Dialer, ReaderLoop


class Trunk:
    """A Dialer for one owner, who connects to the hub through ``network``, and again when he comes back.

    Channels may speak while the owner has a session. ``began`` is called when he gets one. ``ended`` is called when he
    has none any more: then the other side has forgotten the sessions of all channels. If the connection stays, the
    other side still has the channels themselves. In the next session it is told which of them are over.
    """

    def __init__(self, network: Dialer, loop: ReaderLoop) -> None:
        self.received: Callable[[int, Sequence[Buffer]], None] = lambda channel, frames: None
        """Called with each message for a channel, in frames."""
        self.closed: Callable[[int], None] = lambda channel: None
        """Called with each channel that the other side closes."""
        self.heard: Callable[[], None] = lambda: None
        """Called when anything came for channels. So the owner knows that the other side lives."""
        self.began: Callable[[], None] = lambda: None
        self.ended: Callable[[], None] = lambda: None
        self.open = False
        """Whether the owner has a session."""
        self._network = network
        self._loop = loop
        self._dealer: Dealer | None = None
        self._outbox = Outbox()
        self._met = False
        """Whether the owner has had a session on this connection, so that the other side may have channels of it."""
        self._due = False

    def connect(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[Envelope], None],
        rejected: Callable[[ProtocolError], None],
    ) -> Owner:
        """The owner's connection. An earlier one is over."""
        self._over()
        self._outbox.clear()
        self._met = False

        def take(envelope: Envelope) -> None:
            self._take(envelope, received)

        self._dealer = dealer = self._network.connect(address, BundleDecoder(decoder), take, rejected)
        return Owner(self, dealer)

    def send(self, channel: int, frames: Sequence[Buffer]) -> None:
        """Send a message on a channel. It is dropped if the owner has no session."""
        if self.open:
            self._dispatch(self._outbox.put(channel, frames))
            self._leave_soon()

    def close_channel(self, channel: int) -> None:
        """Tell the other side that a channel is over, as soon as the owner has a session."""
        if self._met:
            self._outbox.close(channel)
            self._leave_soon()

    def beat(self) -> None:
        """Say a heartbeat for the owner, so that both sides learn soon if the other one is new."""
        if self._dealer is not None:
            self._dealer.send(Heartbeat())

    def close(self) -> None:
        """The owner's connection is over."""
        self._over()
        if self._dealer is not None:
            self._dealer.close()

    def leave(self) -> None:
        """Send what waits, so that it does not come after what the owner sends next."""
        self._due = False
        if self.open:
            self._dispatch(self._outbox.take())

    def _take(self, envelope: Envelope, received: Callable[[Envelope], None]) -> None:
        message = envelope.message
        if isinstance(message, Bundle):
            self.heard()
            for channel, frames in parts_of(message, envelope.frames):
                self.received(channel, frames)
            for channel in message.closed:
                self.closed(channel)
            return
        if isinstance(message, Refused) and message.reason == "unknown_peer":
            self._over()
        received(envelope)
        if isinstance(message, Granted | Stationed) and not self.open:
            self.open = self._met = True
            self._leave_soon()
            self.began()

    def _over(self) -> None:
        self._outbox.forget_messages()
        if self.open:
            self.open = False
            self.ended()

    def _leave_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self.leave)

    def _dispatch(self, bundles: Sequence[tuple[Bundle, list[Buffer]]]) -> None:
        for bundle, frames in bundles:
            if self._dealer is not None:
                self._dealer.send(bundle, frames)


class Owner:
    """The owner's side of a trunk: a Dealer. What channels said before leaves before what the owner says."""

    def __init__(self, trunk: Trunk, dealer: Dealer) -> None:
        self._trunk = trunk
        self._dealer = dealer

    @property
    def bytes_received(self) -> int:
        return self._dealer.bytes_received

    @property
    def bytes_sent(self) -> int:
        return self._dealer.bytes_sent

    def send(self, message: Message | Packed, frames: Sequence[Buffer] = ()) -> bool:
        self._trunk.leave()
        return self._dealer.send(message, frames)

    def close(self) -> None:
        self._trunk.leave()
        self._dealer.close()
