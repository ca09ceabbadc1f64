"""A coordinator reduced to membership, so that nothing but the fleet is measured: it welcomes devices and counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from fedemu.ops.assembly.parts import Parts
from fedemu.ops.bench.fleet.scripted import ScriptedCoordinator, Terms
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.blobs.tree_file import encode_tree
from fedemu.protocol.codec import Buffer
from fedemu.protocol.messages import Extend, Message, Presence
from fedemu.protocol.transport.zeromq import ZmqNetwork

HORIZON = 7200.0
"""Virtual seconds for which devices announce their presence, at first and again in every sweep."""


class FleetHost(ScriptedCoordinator):
    """Listens at ``address`` for one supervisor with ``devices`` devices of the preset ``digits``."""

    def __init__(self, folder: Path, address: str, devices: int) -> None:
        experiment, _ = load_experiment("digits", [f"fleet.devices={devices}", "fleet.per_round=1"], {})
        parts = Parts(experiment)
        terms = Terms(
            devices=range(devices),
            data=parts.corpus.digest,
            heartbeat_seconds=experiment.liveness.heartbeat_seconds,
            patience=experiment.liveness.patience,
            horizon=HORIZON,
        )
        stream = encode_tree(parts.stream.to_arrays())
        super().__init__(ZmqNetwork(), folder / "host", terms, experiment.to_bytes(), stream)
        self._answered: set[bytes] = set()
        self._all_answered = asyncio.Event()
        self.open(address)

    async def everyone(self, seconds: float) -> None:
        """Wait until every device has joined and announced its presence. Raises TimeoutError after ``seconds``."""
        async with asyncio.timeout(seconds):
            await self._all_answered.wait()

    async def sweep(self, seconds: float) -> None:
        """Send one message to every device and wait for all answers. Raises TimeoutError after ``seconds``."""
        self._answered.clear()
        self._all_answered.clear()
        for peer in self.members.values():
            self.router.send(peer, Extend(until=HORIZON))
        await self.everyone(seconds)

    def heard(self, peer: bytes, device: int | None, message: Message, frames: Sequence[Buffer]) -> None:
        if isinstance(message, Presence):
            self._answered.add(peer)
            if len(self._answered) == len(self.terms.devices):
                self._all_answered.set()
