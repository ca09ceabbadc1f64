"""The device of ``docs/minimal_device.py``, which is a program of its own, with a scripted coordinator."""

from __future__ import annotations

import ast
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import zmq.auth
from numpy.typing import NDArray

from fedemu.ops.bench.fleet.scripted import ScriptedCoordinator, Terms
from fedemu.protocol import messages as wire
from fedemu.protocol.blobs.tree_file import encode_tree
from fedemu.protocol.codec import Buffer, Envelope
from fedemu.protocol.errors import ProtocolError
from fedemu.protocol.tensors import unpack
from fedemu.protocol.transport.curve import ServerKeys
from fedemu.protocol.transport.interface import Network
from fedemu.protocol.transport.zeromq import ZmqNetwork

DEVICE = Path(__file__).parents[2] / "docs" / "minimal_device.py"
MODEL: dict[str, NDArray[Any]] = {
    "w": np.ones((600, 500), np.float32),
    "b": np.zeros(3),
    "steps": np.array(7, np.int64),
}
OFFSETS = np.array([0, 4, 9, 12])
INDICES = np.arange(12)
STREAM = encode_tree(
    {
        "offsets": OFFSETS,
        "indices": INDICES,
        "periods": np.zeros_like(INDICES),
        "seconds": np.zeros(len(INDICES)),
        "period_count": np.array([1]),
        "rules": np.array([1.0, 0.0, 0.0, 0.0]),
    }
)


class Coordinator(ScriptedCoordinator):
    """Grants device 1, gives one ask, and stops when it has its result."""

    def __init__(self, network: Network, folder: Path, clock: Literal["virtual", "wall"]) -> None:
        terms = Terms(range(1, 2), "0" * 64, heartbeat_seconds=1.0, patience=10, clock=clock, horizon=100.0)
        super().__init__(network, folder, terms, b"{}", STREAM)
        self.messages: list[wire.Message] = []
        self.rejected: list[ProtocolError] = []
        self.result: wire.Result | None = None
        self.frames: Sequence[Buffer] = ()
        self.work = wire.Work(
            ask="1.0.0",
            program="train",
            task=0,
            start=5.0,
            shared=(self.blob("model", encode_tree(MODEL)),),
            state=None,
            download_bytes=0,
            upload_bytes=0,
            passes=1.0,
            deadline=60.0,
            durable_round=0,
            epoch=77,
        )

    def receive(self, peer: bytes, envelope: Envelope) -> None:
        self.messages.append(envelope.message)
        super().receive(peer, envelope)

    def unreadable(self, peer: bytes, error: ProtocolError) -> None:
        self.rejected.append(error)

    def welcome(self, peer: bytes, hello: wire.Hello) -> None:
        super().welcome(peer, hello)
        if self.terms.clock == "wall":
            self.router.send(peer, self.work)

    def heard(self, peer: bytes, device: int | None, message: wire.Message, frames: Sequence[Buffer]) -> None:
        match message:
            case wire.Presence():
                self.router.send(peer, self.work)
            case wire.Scheduled(ask="1.0.0", event="finish"):
                self.router.send(peer, wire.Offer(blobs=self.work.shared, round=1))
                self.router.send(peer, wire.Proceed(ask="1.0.0"))
            case wire.Result(ask="1.0.0"):
                self.result, self.frames = message, frames
                self.router.send(peer, wire.Accepted(ask="1.0.0"))
                self.router.send(peer, wire.Stop())


async def run_device(*words: str) -> tuple[int | None, str]:
    """The exit code of the device, and what it wrote to stderr."""
    device = await asyncio.create_subprocess_exec(sys.executable, str(DEVICE), *words, stderr=asyncio.subprocess.PIPE)
    try:
        _, errors = await asyncio.wait_for(device.communicate(), 30)
    finally:
        if device.returncode is None:
            device.kill()
            await device.wait()
    return device.returncode, errors.decode()


@pytest.mark.parametrize("clock", ["virtual", "wall"])
async def test_the_device_takes_part_in_a_run_to_its_end(
    tcp: Any, tmp_path: Path, eventually: Any, clock: Literal["virtual", "wall"]
) -> None:
    coordinator = Coordinator(tcp.network, tmp_path, clock)
    coordinator.open(tcp.wildcard)
    assert await run_device(coordinator.address) == (0, "")
    await eventually(lambda: coordinator.messages[-1] == wire.Bye())
    assert coordinator.messages[0] == wire.Enroll(count=1)
    assert wire.Hello(device=1, incarnation=0, lease="lease-1") in coordinator.messages
    assert coordinator.rejected == []
    assert coordinator.result is not None
    assert (coordinator.result.examples, coordinator.result.epoch) == (5, 77)
    assert 0 <= (coordinator.result.seconds or 0.0) < 30
    deltas = unpack(coordinator.result.tensors, coordinator.frames)
    assert {name: (array.dtype, array.shape) for name, array in deltas.items()} == {
        f"delta/{name}": (array.dtype, array.shape) for name, array in MODEL.items()
    }
    assert not any(array.any() for array in deltas.values())


async def test_it_takes_part_with_keys(tmp_path: Path) -> None:
    files = [zmq.auth.create_certificates(tmp_path, name) for name in ("server", "machine")]
    (public, secret), (approved, _) = (zmq.auth.load_certificate(secret) for _, secret in files)
    assert secret is not None
    keys = ServerKeys(public.decode(), secret.decode(), {approved.decode()}.__contains__)
    network = ZmqNetwork(keys=keys)
    coordinator = Coordinator(network, tmp_path / "blobs", "wall")
    coordinator.open("tcp://127.0.0.1:*")
    try:
        assert await run_device(coordinator.address, str(files[0][0]), str(files[1][1])) == (0, "")
    finally:
        network.close()
    assert coordinator.result is not None


async def test_a_refusal_ends_it_with_the_coordinators_words(tcp: Any) -> None:
    side = tcp.listen()
    side.react = lambda message, peer: side.router.send(
        peer, wire.Refused(reason="fleet_full", detail="All are taken.")
    )
    assert await run_device(side.router.address) == (1, "All are taken.\n")


def test_the_device_needs_nothing_of_fedemu() -> None:
    imported = {
        name.name.partition(".")[0]
        for node in ast.walk(ast.parse(DEVICE.read_text()))
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert imported == {"hashlib", "json", "math", "msgpack", "numpy", "sys", "time", "zmq"}
