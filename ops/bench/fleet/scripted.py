"""A coordinator without rounds: it grants one lease, serves blobs, welcomes devices and answers heartbeats.

A subclass adds what it asks of devices. The benchmark of the fleet and many tests use such a coordinator instead of a
real one. It makes no decisions and no random draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.codec import UP, Buffer, Envelope
from fedemu.protocol.errors import BlobError, ProtocolError
from fedemu.protocol.messages import (
    Beat,
    BlobRef,
    Bye,
    Enroll,
    Granted,
    Heartbeat,
    Hello,
    Message,
    Need,
    Refused,
    Stop,
    Welcome,
)
from fedemu.protocol.transport.interface import Network, Router


@dataclass
class Terms:
    """What a scripted coordinator grants and tells. The terms may be changed between two messages.

    ``devices`` are the indices of the lease. ``data`` is the digest that the machine's data must have. ``horizon`` is
    the virtual time, in seconds, up to which devices announce their presence.
    """

    devices: range
    data: str
    heartbeat_seconds: float
    patience: int
    clock: Literal["virtual", "wall"] = "virtual"
    horizon: float = 1000.0
    lease: str = "lease-1"
    run: str = "scripted"


class ScriptedCoordinator:
    """Listens on ``network`` after ``open``, keeps its blobs in ``folder``, and answers by ``terms``.

    ``members`` has the peer of every welcomed device by index, ``supervisor`` the peer that was granted the lease.
    A subclass may do something else in ``enroll``, ``welcome``, ``heard`` and ``unreadable``.
    """

    def __init__(self, network: Network, folder: Path, terms: Terms, experiment: bytes, stream: bytes) -> None:
        self.network = network
        self.terms = terms
        self.members: dict[int, bytes] = {}
        self.supervisor: bytes | None = None
        self.router: Router
        self._store = BlobStore(folder)
        self._experiment = self.blob("experiment", experiment)
        self._stream = self.blob("partition", stream)
        self._devices: dict[bytes, int] = {}

    @property
    def address(self) -> str:
        """The address at which it listens, with the actual port."""
        return self.router.address

    def open(self, address: str) -> None:
        """Begin to listen at ``address``."""
        self.router = self.network.bind(address, UP, self.receive, self.unreadable)

    def close(self) -> None:
        """Close the whole network."""
        self.network.close()

    def stop(self, reason: str = "done") -> None:
        """Tell everyone that the run is over."""
        for peer in [*self.members.values(), self.supervisor]:
            if peer is not None:
                self.router.send(peer, Stop(reason=reason))

    def blob(self, key: str, data: bytes) -> BlobRef:
        """Keep ``data`` for peers that need it. Returns how ``key`` is named in a message."""
        return BlobRef(key=key, digest=self._store.put(data), size=len(data))

    def receive(self, peer: bytes, envelope: Envelope) -> None:
        """Answer one message. A stranger is refused until it enrols or says Hello."""
        match envelope.message:
            case Enroll() as enroll:
                self.enroll(peer, enroll)
            case Hello() as hello:
                self.welcome(peer, hello)
            case _ if not self._knows(peer):
                self.router.send(peer, Refused(reason="unknown_peer", detail="Who are you?"))
            case Heartbeat():
                self.router.send(peer, Beat())
            case Need() as need:
                self._serve(peer, need)
            case message:
                device = self._devices.get(peer)
                if isinstance(message, Bye) and device is not None:
                    del self.members[device]
                self.heard(peer, device, message, envelope.frames)

    def enroll(self, peer: bytes, enroll: Enroll) -> None:
        """Grant the lease."""
        self.supervisor = peer
        terms = self.terms
        granted = Granted(
            lease=terms.lease,
            run=terms.run,
            ranges=((terms.devices.start, terms.devices.stop),),
            experiment=self._experiment,
            partition=self._stream,
            data=terms.data,
            heartbeat_seconds=terms.heartbeat_seconds,
            patience=terms.patience,
        )
        self.router.send(peer, granted)

    def welcome(self, peer: bytes, hello: Hello) -> None:
        """Take the device in."""
        self.members[hello.device] = peer
        self._devices[peer] = hello.device
        terms = self.terms
        welcome = Welcome(
            device=hello.device,
            clock=terms.clock,
            horizon=terms.horizon,
            heartbeat_seconds=terms.heartbeat_seconds,
            patience=terms.patience,
            durable_round=0,
        )
        self.router.send(peer, welcome)

    def heard(self, peer: bytes, device: int | None, message: Message, frames: Sequence[Buffer]) -> None:
        """Any other message of a known peer; ``device`` is None for the supervisor."""

    def unreadable(self, peer: bytes, error: ProtocolError) -> None:
        """Raise RuntimeError, because a peer sent a message that cannot be read."""
        raise RuntimeError(f"a peer sent what cannot be read: {error}")

    def _knows(self, peer: bytes) -> bool:
        device = self._devices.get(peer)
        return peer == self.supervisor or (device is not None and self.members.get(device) == peer)

    def _serve(self, peer: bytes, need: Need) -> None:
        try:
            blob, data = self._store.answer(need)
        except BlobError as error:
            self.router.send(peer, Refused(reason="unknown_blob", detail=str(error)))
            return
        self.router.send(peer, blob, [data])
