"""The device of ``docs/minimal_device.py``, a program of its own, before a scripted coordinator."""

from __future__ import annotations

import ast
import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from fedemu.protocol import messages as m
from fedemu.protocol.blobs.tree_file import encode_tree
from fedemu.protocol.ids import digest_of
from fedemu.protocol.tensors import unpack

DEVICE = Path(__file__).parents[2] / "docs" / "minimal_device.py"
MODEL: dict[str, NDArray[Any]] = {
    "w": np.ones((600, 500), np.float32),
    "b": np.zeros(3),
    "steps": np.array(7, np.int64),
}
OFFSETS = np.array([0, 4, 9, 12])
INDICES = np.arange(12)
BLOBS = {
    "model": encode_tree(MODEL),
    "partition": encode_tree(
        {
            "offsets": OFFSETS,
            "indices": INDICES,
            "periods": np.zeros_like(INDICES),
            "seconds": np.zeros(len(INDICES)),
            "period_count": np.array([1]),
            "rules": np.array([1.0, 0.0, 0.0, 0.0]),
        }
    ),
}


def reference(key: str) -> m.BlobRef:
    return m.BlobRef(key=key, digest=digest_of(BLOBS[key]), size=len(BLOBS[key]))


class Coordinator:
    """Grants device 1, gives one ask, and stops when it has its result."""

    def __init__(self, side: Any, clock: Literal["virtual", "wall"]) -> None:
        self.side = side
        self.clock = clock
        self.result: m.Result | None = None
        self.frames: tuple[memoryview, ...] = ()
        self.work = m.Work(
            ask="1.0.0",
            program="train",
            task=0,
            start=5.0,
            shared=(reference("model"),),
            state=None,
            download_bytes=0,
            upload_bytes=0,
            passes=1.0,
            deadline=60.0,
            durable_round=0,
        )
        side.react = self.answer

    def answer(self, message: Any, peer: bytes) -> None:
        for answer, frames in self.answers(message):
            assert self.side.router.send(peer, answer, frames)

    def answers(self, message: Any) -> Iterator[tuple[m.Message, tuple[bytes, ...]]]:
        match message:
            case m.Enroll(count=1):
                yield self.granted(), ()
            case m.Need():
                [data] = [data for data in BLOBS.values() if digest_of(data) == message.digest]
                chunk = data[message.offset :][: message.length]
                yield m.Blob(digest=message.digest, offset=message.offset, size=len(data)), (chunk,)
            case m.Hello(device=1, incarnation=0, lease="token"):
                yield self.welcome(), ()
                if self.clock == "wall":
                    yield self.work, ()
            case m.Presence():
                yield self.work, ()
            case m.Scheduled(ask="1.0.0", event="finish"):
                yield m.Offer(blobs=self.work.shared, round=1), ()
                yield m.Proceed(ask="1.0.0"), ()
            case m.Heartbeat():
                yield m.Beat(), ()
            case m.Result(ask="1.0.0"):
                self.result, self.frames = message, self.side.frames[-1]
                yield m.Accepted(ask="1.0.0"), ()
                yield m.Stop(), ()

    def granted(self) -> m.Granted:
        return m.Granted(
            lease="token",
            run="test",
            ranges=((1, 2),),
            experiment=m.BlobRef(key="experiment", digest="0" * 64, size=2),
            partition=reference("partition"),
            data="0" * 64,
            heartbeat_seconds=1.0,
            patience=10,
        )

    def welcome(self) -> m.Welcome:
        return m.Welcome(device=1, clock=self.clock, horizon=100.0, heartbeat_seconds=1.0, patience=10, durable_round=0)


async def run_device(address: str) -> tuple[int | None, str]:
    """Its exit code and what it wrote to stderr."""
    device = await asyncio.create_subprocess_exec(sys.executable, str(DEVICE), address, stderr=asyncio.subprocess.PIPE)
    try:
        _, errors = await asyncio.wait_for(device.communicate(), 30)
    finally:
        if device.returncode is None:
            device.kill()
            await device.wait()
    return device.returncode, errors.decode()


@pytest.mark.parametrize("clock", ["virtual", "wall"])
async def test_it_takes_part_in_a_run_to_its_end(tcp: Any, eventually: Any, clock: Literal["virtual", "wall"]) -> None:
    coordinator = Coordinator(tcp.listen(), clock)
    address = coordinator.side.router.address
    assert await run_device(address) == (0, "")
    await eventually(lambda: coordinator.side.messages[-1] == m.Bye())
    assert coordinator.side.rejected == []
    assert coordinator.result is not None
    assert coordinator.result.examples == 5
    assert 0 <= (coordinator.result.seconds or 0.0) < 30
    deltas = unpack(coordinator.result.tensors, coordinator.frames)
    assert {name: (array.dtype, array.shape) for name, array in deltas.items()} == {
        f"delta/{name}": (array.dtype, array.shape) for name, array in MODEL.items()
    }
    assert not any(array.any() for array in deltas.values())


async def test_a_refusal_ends_it_with_the_coordinators_words(tcp: Any) -> None:
    side = tcp.listen()
    side.react = lambda message, peer: side.router.send(peer, m.Refused(reason="fleet_full", detail="All are taken."))
    assert await run_device(side.router.address) == (1, "All are taken.\n")


def test_it_needs_nothing_of_fedemu() -> None:
    imported = {
        name.name.partition(".")[0]
        for node in ast.walk(ast.parse(DEVICE.read_text()))
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert imported == {"hashlib", "json", "math", "msgpack", "numpy", "sys", "time", "zmq"}
