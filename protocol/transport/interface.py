"""What a transport is: one address, and many peers that talk to it. It uses callbacks on an event loop.

Messages from one sender to one receiver arrive in order or not at all; no message is certain to arrive. Nothing blocks.
Callbacks run on the loop, never inside ``send``. The buffers that are given to ``send`` must not change afterwards.
Received buffers stay valid as long as someone holds them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from fedemu.protocol.codec import Buffer, Decoder, Envelope, Packed
from fedemu.protocol.errors import ProtocolError
from fedemu.protocol.messages import Message
from fedemu.protocol.wording import is_milestone

TURN_SECONDS: Final = 0.01
"""A transport that has handed on messages for so long gives the loop's other callbacks their turn."""
Screen = Callable[[bytes, Sequence[Buffer]], ProtocolError | None]
"""A look at the frames of a peer's message before they are decoded. An error means that they are not."""


def let_all_pass(peer: bytes, frames: Sequence[Buffer]) -> None:
    """The screen that stops nothing."""


def handing_on(
    decoder: Decoder, received: Callable[[Envelope], None], rejected: Callable[[ProtocolError], None]
) -> Callable[[Sequence[Buffer]], None]:
    """What a Dealer does with the frames of a message: ``received`` gets it decoded, or ``rejected`` the error."""

    def hand_on(frames: Sequence[Buffer]) -> None:
        try:
            envelope = decoder.decode(frames)
        except ProtocolError as error:
            rejected(error)
        else:
            received(envelope)

    return hand_on


def handing_on_from_peers(
    decoder: Decoder,
    received: Callable[[bytes, Envelope], None],
    rejected: Callable[[bytes, ProtocolError], None],
    screen: Screen,
) -> Callable[[bytes, Sequence[Buffer]], None]:
    """What a Router does with the frames of a peer's message that ``screen`` lets pass, and with others."""

    def hand_on(peer: bytes, frames: Sequence[Buffer]) -> None:
        if (stopped := screen(peer, frames)) is not None:
            rejected(peer, stopped)
            return
        try:
            envelope = decoder.decode(frames)
        except ProtocolError as error:
            rejected(peer, error)
        else:
            received(peer, envelope)

    return hand_on


class Repeated:
    """Counts what peers can repeat without end. It logs the 1st, 10th, 100th... time, since others would fill the log.

    ``text`` has a place for each fact, and at last one for the count.
    """

    def __init__(self, log: logging.Logger, text: str) -> None:
        self._log = log
        self._text = text
        self._times = 0

    def count(self, *facts: str) -> None:
        """It has happened once more."""
        self._times += 1
        if is_milestone(self._times):
            self._log.warning(self._text, *facts, self._times)


FULL_QUEUE: Final = "the queue to peer %s is full; its messages are dropped (full queues so far: %d)"


@dataclass(frozen=True)
class Bounds:
    """What a Router allows its connections. Those of peers that ``knows`` does not know are strangers.

    ``connections`` is the most that may be open, and ``most_strangers`` tells the most of strangers at this moment. A
    stranger may be silent for ``idle_seconds``. ``strangers_unfinished`` is the most bytes of a stranger's message that
    has not ended, and ``most_unfinished`` tells that number for other peers at this moment.
    The Router calls ``ended`` with the reason (connections, unfinished, idle) of each connection that it closes, and
    ``closed`` with each peer whose connection is gone. ``queue`` is the most messages that wait for one peer, 0 without
    a limit. Further ones are dropped. Most queues are empty; a full queue means that its peer is dead, or that it asks
    for chunks of blobs and does not read them. A chunk has 1 MiB.
    """

    connections: int
    most_strangers: Callable[[], int]
    knows: Callable[[bytes], bool]
    ended: Callable[[str], None]
    closed: Callable[[bytes], None]
    most_unfinished: Callable[[], int]
    strangers_unfinished: int = 2**20
    idle_seconds: float = 30.0
    queue: int = 64


BOUNDLESS: Final = Bounds(
    connections=2**31,
    most_strangers=lambda: 2**31,
    knows=lambda peer: True,
    ended=lambda reason: None,
    closed=lambda peer: None,
    most_unfinished=lambda: 2**63,
    strangers_unfinished=2**63,
)
"""The bounds that allow everything but queues without an end."""


class Handle(Protocol):
    """A callback that will be called later."""

    def cancel(self) -> None:
        """Do not call it."""
        ...


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

    def call_later(self, delay: float, callback: Callable[..., object], /, *arguments: Any) -> Handle:
        """Call ``callback`` with the arguments after some seconds, unless the result is cancelled."""
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

    def send(self, peer: bytes, message: Message | Packed, frames: Sequence[Buffer] = (), again: bool = False) -> bool:
        """Send a message to a peer. Returns whether it is on its way.

        The message is dropped if the peer is unknown or gone, or if the queue to it is full. The log tells of a full
        queue, unless the message is sent ``again`` in that case.
        """
        ...

    def is_sending(self, peer: bytes) -> bool:
        """Whether a part of a long message of a peer came lately, and its end did not come yet.

        Within a machine messages come at once, so it is False there.
        """
        ...

    def cut(self, peer: bytes) -> None:
        """Close the connection of a peer, if it can be found. An honest peer comes back on a new one."""
        ...

    def look(self) -> None:
        """Close connections that break the bounds, or whose keys were revoked. To be called a few times a second.

        Raises FedemuError if the file of the address was removed, so that nobody can connect any more.
        """
        ...

    def key_of(self, peer: bytes) -> str:
        """The public key with which a peer came in, empty on a Router without keys."""
        ...

    def may_be_edge(self, peer: bytes) -> bool:
        """Whether the key of a peer is approved for an edge. Without keys every peer may be one."""
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

    def send(self, message: Message | Packed, frames: Sequence[Buffer] = ()) -> bool:
        """Send a message. Returns False, and drops the message, if too many messages already wait."""
        ...

    def close(self) -> None:
        """Stop receiving. Messages sent before are still delivered within the network's linger. May be called twice."""
        ...


class Dialer(Protocol):
    """Makes Dealers. ``received`` gets decoded messages, ``rejected`` the errors of the others."""

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
        """Close everything that the network has made. Returns within the linger."""
        ...


class Network(Dialer, Protocol):
    """Makes Routers, too."""

    def bind(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[bytes, Envelope], None],
        rejected: Callable[[bytes, ProtocolError], None],
        screen: Screen = let_all_pass,
        bounds: Bounds = BOUNDLESS,
    ) -> Router:
        """A Router that listens at the address. Raises ConfigurationError if the address cannot be used.

        ``screen`` sees the frames of each message before they are decoded. Connections without ``bounds`` need not be
        counted.
        """
        ...
