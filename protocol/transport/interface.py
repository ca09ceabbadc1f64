"""What a transport is: one address that many peers talk to, callback style, on a running asyncio loop.

Messages of one sender to one receiver arrive in order or not at all; nothing promises that they arrive. Nothing
blocks. Callbacks run on the loop, never inside ``send``. The buffers given to ``send`` must not change afterwards;
those received stay valid as long as someone holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fedemu.protocol.codec import Buffer, Decoder, Envelope
from fedemu.protocol.errors import ProtocolError
from fedemu.protocol.messages import Message


class ReaderLoop(Protocol):
    """The part of an event loop that a transport uses. Every asyncio loop has it."""

    def add_reader(self, descriptor: int, callback: Callable[[], object], /) -> object: ...

    def remove_reader(self, descriptor: int, /) -> bool: ...

    def call_soon(self, callback: Callable[..., object], /, *arguments: Any) -> object: ...


class Router(Protocol):
    """The side with the address. A peer is an opaque name, new with every connection."""

    @property
    def address(self) -> str:
        """Where it can be reached: the actual port if port 0 or ``*`` was asked for."""
        ...

    @property
    def bytes_received(self) -> int: ...

    @property
    def bytes_sent(self) -> int: ...

    def send(self, peer: bytes, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """False when the peer is unknown, gone, or does not take its messages off the queue; the message is dropped."""
        ...

    def close(self) -> None:
        """Stop receiving; what was sent is still delivered within the network's linger. May be called twice.

        The address is free again soon afterwards, and at once when the network is closed.
        """
        ...


class Dealer(Protocol):
    """One connection to a Router. It waits for an absent one, and reconnects (as a new peer) when it was lost."""

    @property
    def bytes_received(self) -> int: ...

    @property
    def bytes_sent(self) -> int: ...

    def send(self, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """False when too much is waiting to be sent already; the message is dropped."""
        ...

    def close(self) -> None:
        """Stop receiving; what was sent is still delivered within the network's linger. May be called twice."""
        ...


class Network(Protocol):
    """Makes Routers and Dealers. ``rejected`` gets what could not be decoded, ``received`` everything else."""

    def bind(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[bytes, Envelope], None],
        rejected: Callable[[bytes, ProtocolError], None],
    ) -> Router:
        """Raises ConfigurationError for an address that cannot be used."""
        ...

    def connect(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[Envelope], None],
        rejected: Callable[[ProtocolError], None],
    ) -> Dealer:
        """Raises ConfigurationError for an address that cannot be one; nobody has to be there yet."""
        ...

    def close(self) -> None:
        """Close all of its Routers and Dealers; returns within the linger."""
        ...
