"""What a transport is: one address, and many peers that talk to it. It uses callbacks on an event loop.

Messages from one sender to one receiver arrive in order or not at all; no message is certain to arrive. Nothing blocks.
Callbacks run on the loop, never inside ``send``. The buffers that are given to ``send`` must not change afterwards.
Received buffers stay valid as long as someone holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fedemu.protocol.codec import Buffer, Decoder, Envelope
from fedemu.protocol.errors import ProtocolError
from fedemu.protocol.messages import Message

Screen = Callable[[bytes, Sequence[Buffer]], ProtocolError | None]
"""A look at the frames of a peer's message before they are decoded. An error means that they are not."""


def let_all_pass(peer: bytes, frames: Sequence[Buffer]) -> None:
    """The screen that stops nothing."""


class ReaderLoop(Protocol):
    """The part of an event loop that a transport uses. Every asyncio loop has it."""

    def add_reader(self, descriptor: int, callback: Callable[[], object], /) -> object:
        """Call ``callback`` whenever the descriptor can be read."""
        ...

    def remove_reader(self, descriptor: int, /) -> bool:
        """Stop watching the descriptor. Returns whether it was watched."""
        ...

    def call_soon(self, callback: Callable[..., object], /, *arguments: Any) -> object:
        """Call ``callback`` with the arguments in the next turn of the loop."""
        ...


class Router(Protocol):
    """The side with the address. A peer is named by some bytes, which are new for every connection."""

    @property
    def address(self) -> str:
        """The address at which peers reach it. For port 0 or ``*`` it has the actual port."""
        ...

    @property
    def bytes_received(self) -> int:
        """The bytes of all frames that have come so far."""
        ...

    @property
    def bytes_sent(self) -> int:
        """The bytes of all frames that were sent so far."""
        ...

    def send(self, peer: bytes, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """Send a message to a peer. Returns whether it is on its way.

        The message is dropped if the peer is unknown or gone, or if the queue to it is full.
        """
        ...

    def key_of(self, peer: bytes) -> str:
        """The public key with which a peer came in, empty on a Router without keys."""
        ...

    def close(self) -> None:
        """Stop receiving. Messages sent before are still delivered within the network's linger. May be called twice.

        The address is free again soon afterwards, and at once when the network is closed.
        """
        ...


class Dealer(Protocol):
    """One connection to a Router. It waits for an absent Router. After a loss it connects again, as a new peer."""

    @property
    def bytes_received(self) -> int:
        """The bytes of all frames that have come so far."""
        ...

    @property
    def bytes_sent(self) -> int:
        """The bytes of all frames that were sent so far."""
        ...

    def send(self, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """Send a message. Returns False, and drops the message, if too many messages already wait."""
        ...

    def close(self) -> None:
        """Stop receiving. Messages sent before are still delivered within the network's linger. May be called twice."""
        ...


class Network(Protocol):
    """Makes Routers and Dealers. ``received`` gets decoded messages, ``rejected`` the errors of the others."""

    def bind(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[bytes, Envelope], None],
        rejected: Callable[[bytes, ProtocolError], None],
        screen: Screen = let_all_pass,
    ) -> Router:
        """A Router that listens at the address. Raises ConfigurationError if the address cannot be used.

        ``screen`` sees the frames of each message before they are decoded.
        """
        ...

    def connect(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[Envelope], None],
        rejected: Callable[[ProtocolError], None],
    ) -> Dealer:
        """A Dealer to the address, where nobody has to listen yet. Raises ConfigurationError if it is no address."""
        ...

    def close(self) -> None:
        """Close all Routers and Dealers of the network. Returns within the linger."""
        ...
