"""The transport within one process. It can lose, delay, duplicate and reorder messages on request.

Messages are really encoded and decoded; only the sockets are missing. With the same seed and the same sequence of
sends, the same messages have the same faults.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from fedemu.protocol.codec import Buffer, Decoder, Envelope, Packed, encode
from fedemu.protocol.errors import ConfigurationError, ProtocolError
from fedemu.protocol.messages import Message
from fedemu.protocol.seeds import integer
from fedemu.protocol.transport.interface import (
    BOUNDLESS,
    Bounds,
    Screen,
    handing_on,
    handing_on_from_peers,
    let_all_pass,
)
from fedemu.protocol.transport.link import MOST_UNDER_WAY, Faults, Link

CallLater = Callable[[float, Callable[[], None]], Any]


class MemoryNetwork:
    """Routers and Dealers by address. An address is any text.

    If an address ends with ``:0`` or ``*``, the ``0`` or the ``*`` is replaced by a new number. ``call_later(seconds,
    callback)`` replaces the loop's clock in tests. At most ``most_under_way`` messages are on their way in one
    direction of a connection.
    """

    def __init__(
        self,
        faults: Faults | None = None,
        seed: int = 0,
        call_later: CallLater | None = None,
        most_under_way: int = MOST_UNDER_WAY,
    ) -> None:
        self.faults = faults or Faults()
        self.random = random.Random(integer(seed, purpose="transport"))
        self.routers: dict[str, MemoryRouter] = {}
        self.waiting: dict[str, list[MemoryDealer]] = {}
        self._call_later = call_later
        self._most_under_way = most_under_way
        self._peers = itertools.count(1)
        self._addresses = itertools.count(1)

    def bind(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[bytes, Envelope], None],
        rejected: Callable[[bytes, ProtocolError], None],
        screen: Screen = let_all_pass,
        bounds: Bounds = BOUNDLESS,
    ) -> MemoryRouter:
        if address.endswith((":0", "*")):
            address = f"{address.removesuffix('0').removesuffix('*')}{next(self._addresses)}"
        if address in self.routers:
            raise ConfigurationError(f"cannot listen at {address}: it is in use; choose another address")
        hand_on = handing_on_from_peers(decoder, received, rejected, screen)
        router = self.routers[address] = MemoryRouter(self, address, hand_on, bounds.closed)
        for dealer in self.waiting.pop(address, []):
            dealer.attach(router)
        return router

    def connect(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[Envelope], None],
        rejected: Callable[[ProtocolError], None],
    ) -> MemoryDealer:
        dealer = MemoryDealer(self, address, handing_on(decoder, received, rejected))
        router = self.routers.get(address)
        if router is None:
            self.waiting.setdefault(address, []).append(dealer)
        else:
            dealer.attach(router)
        return dealer

    def close(self) -> None:
        for router in list(self.routers.values()):
            router.close()
        for dealer in [dealer for dealers in self.waiting.values() for dealer in dealers]:
            dealer.close()

    def peer(self) -> bytes:
        """The name of a new peer, which no peer had before."""
        return next(self._peers).to_bytes(5, "big")

    def link(self) -> Link:
        """One direction of a new connection."""
        return Link(self.faults, self.random, self.later, self._most_under_way)

    def later(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` on the loop, after a delay that is drawn from the faults."""
        delay = self.random.uniform(0, self.faults.delay_seconds) if self.faults.delay_seconds else 0.0
        if self._call_later is not None:
            self._call_later(delay, callback)
        elif delay:
            asyncio.get_running_loop().call_later(delay, callback)
        else:
            asyncio.get_running_loop().call_soon(callback)


class MemoryRouter:
    """The side with the address. It knows its Dealers by the names of peers."""

    def __init__(
        self,
        network: MemoryNetwork,
        address: str,
        hand_on: Callable[[bytes, Sequence[Buffer]], None],
        closed: Callable[[bytes], None],
    ) -> None:
        self.address = address
        self.bytes_received = 0
        self.bytes_sent = 0
        self.dealers: dict[bytes, MemoryDealer] = {}
        self._network = network
        self._hand_on = hand_on
        self._gone = closed
        self._closed = False

    def send(self, peer: bytes, message: Message | Packed, frames: Sequence[Buffer] = (), again: bool = False) -> bool:
        dealer = self.dealers.get(peer)
        parts = _parts(message, frames)
        if dealer is None or not dealer.down.put(parts):
            return False
        self.bytes_sent += sum(map(len, parts))
        return True

    def is_sending(self, peer: bytes) -> bool:
        return False

    def cut(self, peer: bytes) -> None:
        dealer = self.dealers.pop(peer, None)
        if dealer is not None:
            up = dealer.detach()
            self._network.waiting[self.address].remove(dealer)
            dealer.attach(self)
            up.end(lambda: self.lose(peer))

    def lose(self, peer: bytes) -> None:
        """The connection of ``peer`` is gone, and all that it has sent has arrived."""
        if not self._closed:
            self._gone(peer)

    def look(self) -> None:
        """There is nothing to look at: this process made all connections itself."""

    def key_of(self, peer: bytes) -> str:
        dealer = self.dealers.get(peer)
        return "" if dealer is None else dealer.key

    def may_be_edge(self, peer: bytes) -> bool:
        return True

    def take(self, peer: bytes, frames: list[Buffer]) -> None:
        """A message of ``peer`` has arrived."""
        if self._closed:
            return
        self.bytes_received += sum(map(len, frames))
        self._hand_on(peer, frames)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        del self._network.routers[self.address]
        dealers, self.dealers = list(self.dealers.values()), {}
        for dealer in dealers:
            dealer.detach()


class MemoryDealer:
    """One connection to a Router, or the wait for a Router at the address.

    ``key`` is the public key that the Router sees. There is no cryptography in memory, so anybody may set any key.
    """

    def __init__(
        self,
        network: MemoryNetwork,
        address: str,
        hand_on: Callable[[Sequence[Buffer]], None],
    ) -> None:
        self.bytes_received = 0
        self.bytes_sent = 0
        self.key = ""
        self.down = network.link()
        self._up = network.link()
        self._network = network
        self._address = address
        self._hand_on = hand_on
        self._router: MemoryRouter | None = None
        self._peer = b""
        self._closed = False

    def attach(self, router: MemoryRouter) -> None:
        """Become a new peer of the Router that has the address now."""
        self._router = router
        self._peer = peer = self._network.peer()
        router.dealers[peer] = self
        self._up.open(lambda frames: router.take(peer, frames))
        self.down = self._network.link()
        self.down.open(self._take)

    def detach(self) -> Link:
        """Lose the Router, and wait for the next one at the address. Returns the link to the one that is lost."""
        self._router = None
        up, self._up = self._up, self._network.link()
        self._network.waiting.setdefault(self._address, []).append(self)
        return up

    def send(self, message: Message | Packed, frames: Sequence[Buffer] = ()) -> bool:
        parts = _parts(message, frames)
        if self._closed or not self._up.put(parts):
            return False
        self.bytes_sent += sum(map(len, parts))
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if (router := self._router) is not None:
            del router.dealers[self._peer]
            self._up.end(lambda: router.lose(self._peer))
        else:
            self._network.waiting[self._address].remove(self)

    def _take(self, frames: list[Buffer]) -> None:
        if self._closed:
            return
        self.bytes_received += sum(map(len, frames))
        self._hand_on(frames)


def _parts(message: Message | Packed, frames: Sequence[Buffer]) -> list[Buffer]:
    """The frames as a socket would deliver them: read-only bytes, for any kind of buffer."""
    return encode(message, [memoryview(frame).toreadonly() for frame in frames])
