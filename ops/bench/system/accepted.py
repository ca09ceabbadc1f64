"""Finds the devices whose updates a run accepts, round by round, so that the floor can make the same updates.

The run is played in one process over the in-memory transport, where the coordinator's answers can be overheard. Runs
are deterministic. So a run of real processes accepts the same updates, and ends with the same model digest.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from fedemu.ops.assembly.coordinator import assemble
from fedemu.ops.experiment import Runtime
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.running.embedded import serve_embedded
from fedemu.ops.running.folder import claim
from fedemu.protocol.codec import Buffer, Decoder, Envelope
from fedemu.protocol.errors import ProtocolError
from fedemu.protocol.ids import AskId
from fedemu.protocol.messages import Accepted, Hello, Message
from fedemu.protocol.transport.interface import Bounds, Dealer, Router, Screen, let_all_pass
from fedemu.protocol.transport.memory import MemoryNetwork


class Overheard:
    """A network in memory that overhears the coordinator. Its methods are those of ``Network``.

    ``accepted`` holds, by round, the devices that were told that their updates are accepted, in this order.
    """

    def __init__(self) -> None:
        self.accepted: dict[int, list[int]] = defaultdict(list)
        self._network = MemoryNetwork()
        self._devices: dict[bytes, int] = {}

    def bind(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[bytes, Envelope], None],
        rejected: Callable[[bytes, ProtocolError], None],
        screen: Screen = let_all_pass,
        bounds: Bounds | None = None,
    ) -> Router:
        def overhear(peer: bytes, envelope: Envelope) -> None:
            if isinstance(envelope.message, Hello):
                self._devices[peer] = envelope.message.device
            received(peer, envelope)

        return _OverheardRouter(self._network.bind(address, decoder, overhear, rejected, screen, bounds), self._told)

    def connect(
        self,
        address: str,
        decoder: Decoder,
        received: Callable[[Envelope], None],
        rejected: Callable[[ProtocolError], None],
    ) -> Dealer:
        return self._network.connect(address, decoder, received, rejected)

    def close(self) -> None:
        self._network.close()

    def _told(self, peer: bytes, message: Message) -> None:
        if isinstance(message, Accepted):
            self.accepted[AskId.parse(message.ask).round].append(self._devices[peer])


class _OverheardRouter:
    def __init__(self, router: Router, told: Callable[[bytes, Message], None]) -> None:
        self._router = router
        self._told = told

    @property
    def address(self) -> str:
        return self._router.address

    @property
    def bytes_received(self) -> int:
        return self._router.bytes_received

    @property
    def bytes_sent(self) -> int:
        return self._router.bytes_sent

    def send(self, peer: bytes, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        self._told(peer, message)
        return self._router.send(peer, message, frames)

    def cut(self, peer: bytes) -> None:
        self._router.cut(peer)

    def look(self) -> None:
        self._router.look()

    def key_of(self, peer: bytes) -> str:
        return self._router.key_of(peer)

    def close(self) -> None:
        self._router.close()


async def overhear(overrides: Sequence[str]) -> tuple[dict[int, list[int]], str]:
    """The devices that are accepted in each round of the preset ``digits``, by round, and the model digest."""
    experiment, runtime = load_experiment("digits", list(overrides), {})
    network = Overheard()
    with tempfile.TemporaryDirectory(prefix="fedemu-bench-") as folder:
        directory = claim(experiment, Path(folder) / "run")
        try:
            summary = await serve_embedded(assemble(directory, experiment, network, runtime.bind), Runtime())
        finally:
            network.close()
    return dict(network.accepted), str(summary.model_digest)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    accepted, digest = asyncio.run(overhear(sys.argv[1:]))
    print(json.dumps({"accepted": accepted, "digest": digest}), file=answers, flush=True)
