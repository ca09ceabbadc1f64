"""A coordinator reduced to membership, so that nothing but the fleet is measured: it grants, welcomes, and counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from fedemu.ops.assembly.partition import build_partition
from fedemu.ops.assembly.stream import open_stream
from fedemu.ops.data.corpora import open_corpus
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.blobs.tree_file import encode_tree
from fedemu.protocol.codec import UP, Envelope
from fedemu.protocol.errors import ProtocolError
from fedemu.protocol.ids import Digest
from fedemu.protocol.messages import (
    Beat,
    Blob,
    BlobRef,
    Enroll,
    Extend,
    Granted,
    Heartbeat,
    Hello,
    Message,
    Need,
    Presence,
    Stop,
    Welcome,
)
from fedemu.protocol.transport.zeromq import ZmqNetwork

HORIZON = 7200.0
"""Seconds of the experiment for which devices announce their presence, then and on every sweep anew."""


class FleetHost:
    """Listens at ``address`` for one supervisor with ``devices`` devices of the preset ``digits``."""

    def __init__(self, folder: Path, address: str, devices: int) -> None:
        experiment, _ = load_experiment("digits", [f"fleet.devices={devices}", "fleet.per_round=1"], {})
        corpus = open_corpus(experiment)
        partition = build_partition(corpus, experiment.data, devices=devices, seed=experiment.seed)
        self._store = BlobStore(folder / "host")
        self._devices = devices
        self._liveness = experiment.liveness
        self._experiment = self._blob("experiment", experiment.to_bytes())
        stream, _ = open_stream(experiment, corpus, partition)
        self._partition = self._blob("partition", encode_tree(stream.to_arrays()))
        self._data = corpus.digest
        self._supervisor = b""
        self._members: dict[bytes, int] = {}
        self._answered: set[bytes] = set()
        self._network = ZmqNetwork()
        self._changed = asyncio.Event()
        self._router = self._network.bind(address, UP, self._received, self._unreadable)

    async def everyone(self, seconds: float) -> None:
        """Until every device has said Hello, and what it is asked for as a newcomer."""
        await self._until(lambda: len(self._answered) == self._devices, seconds)

    async def sweep(self, seconds: float) -> None:
        """One message to every device, and its answer."""
        self._answered.clear()
        for peer in self._members:
            self._router.send(peer, Extend(until=HORIZON))
        await self._until(lambda: len(self._answered) == self._devices, seconds)

    def stop(self) -> None:
        for peer in [*self._members, self._supervisor]:
            self._router.send(peer, Stop(reason="completed"))

    def close(self) -> None:
        self._network.close()

    def _blob(self, key: str, data: bytes) -> BlobRef:
        return BlobRef(key=key, digest=self._store.put(data), size=len(data))

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def _received(self, peer: bytes, envelope: Envelope) -> None:
        message: Message = envelope.message
        match message:
            case Presence():
                self._answered.add(peer)
                if len(self._answered) == self._devices:
                    self._changed.set()
            case Heartbeat():
                self._router.send(peer, Beat())
            case Hello():
                self._members[peer] = message.device
                self._router.send(peer, self._welcome(message))
            case Enroll():
                self._supervisor = peer
                self._router.send(peer, self._granted())
            case Need():
                data = self._store.read(Digest(message.digest), message.offset, message.length)
                size = self._store.size(Digest(message.digest))
                self._router.send(peer, Blob(digest=message.digest, offset=message.offset, size=size), [data])

    def _granted(self) -> Granted:
        return Granted(
            lease="bench",
            run="bench",
            ranges=((0, self._devices),),
            experiment=self._experiment,
            partition=self._partition,
            data=self._data,
            heartbeat_seconds=self._liveness.heartbeat_seconds,
            patience=self._liveness.patience,
        )

    def _welcome(self, hello: Hello) -> Welcome:
        return Welcome(
            device=hello.device,
            clock="virtual",
            horizon=HORIZON,
            heartbeat_seconds=self._liveness.heartbeat_seconds,
            patience=self._liveness.patience,
            durable_round=0,
        )

    def _unreadable(self, peer: bytes, error: ProtocolError) -> None:
        raise RuntimeError(f"a device of this very version sent what can't be read: {error}")
