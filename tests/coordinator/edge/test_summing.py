"""The sums of an edge that has edges below: whom it asks for a part, and which parts it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fedemu.algorithms.interface import Reducer
from fedemu.coordinator.edge.gathering import Gathering
from fedemu.coordinator.edge.summing import Summing
from fedemu.coordinator.sums.leaf import Leaf
from fedemu.coordinator.sums.messages import packed_of
from fedemu.coordinator.sums.partial import Partial
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import Envelope
from fedemu.protocol.sharing import edge_messages as edge
from fedemu.protocol.tensors import pack

GATHER = edge.Gather(
    ask="1.0.0",
    epoch=7,
    leaves=(wire.TensorSpec(name="delta/w", dtype="float32", shape=(2,)),),
    reducers=(("delta", "weighted_mean", "delta"),),
    max_norm=100.0,
)


class Tried:
    """The sums of an edge that gathers and has edges below: what it says further up, and what it tells those below."""

    def __init__(self, folder: Path, *stations: bytes) -> None:
        self.folder = folder
        self.said: asyncio.Queue[tuple[Any, Sequence[Any]]] = asyncio.Queue()
        self.told: list[tuple[bytes, Any]] = []
        self.failed: asyncio.Queue[BaseException] = asyncio.Queue()
        self.sending: set[bytes] = set()
        self.summing = Summing(
            folder,
            lambda message, frames: self.said.put_nowait((message, frames)),
            lambda station, message: self.told.append((station, message)),
            self.failed.put_nowait,
            self.sending.__contains__,
        )
        self.summing.gather(GATHER)
        for station in stations:
            self.summing.join(station)
        assert self.told == [(station, GATHER) for station in stations]
        self.told.clear()

    def asked(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """The edges below that were asked for a part since the last look, and for which devices."""
        asked = [(station, message.devices) for station, message in self.told if isinstance(message, edge.Sum)]
        self.told.clear()
        return asked

    def keep(self, device: int, values: list[float], examples: int, epoch: int | None = 7) -> bool:
        """A device right behind the edge sends a result. Returns whether it is kept, and does not pass."""
        specs, frames = pack({"delta/w": np.array(values, np.float32)})
        result = wire.Result(ask="1.0.0", examples=examples, steps=1, metrics={}, epoch=epoch, tensors=specs)
        return self.summing.keep(device, result, frames) is not None

    def begin(self, *devices: int) -> None:
        self.summing.begin(edge.Sum(ask="1.0.0", epoch=7, devices=devices))

    def merge(self, station: bytes, devices: list[int], values: list[float], **changes: Any) -> None:
        """An edge below sends the sum over one result."""
        below = Gathering(GATHER, self.folder)
        total = below.sum([({"delta/w": np.array(values, np.float32)}, 2)] if devices else [])
        message, frames = below.told(total, devices)
        self.summing.merge(station, Envelope(replace(message, **changes), tuple(frames)))

    async def says(self) -> tuple[tuple[int, ...], list[float]]:
        """The devices in the next sum that the edge sends, and its weighted mean."""
        async with asyncio.timeout(30):
            message, frames = await self.said.get()
        if not message.devices:
            return (), []
        sums = Partial({"delta": Reducer("weighted_mean")}, {"delta/w": Leaf("float32", (2,))})
        return message.devices, list(sums.unpack(packed_of(message, frames)).finish()["delta"]["w"])


@pytest.fixture
async def tried(tmp_path: Path) -> AsyncIterator[Callable[..., Tried]]:
    """Opens the sums of an edge with the edges below that are named."""
    made: list[Tried] = []

    def open_it(*stations: bytes) -> Tried:
        made.append(Tried(tmp_path, *stations))
        return made[-1]

    yield open_it
    for each in made:
        each.summing.close()


async def test_each_edge_below_is_asked_for_its_own_devices(tried: Callable[..., Tried]) -> None:
    edges = tried(b"one", b"two")
    edges.keep(1, [1.0, 2.0], 1)
    for station, device in ((b"one", 2), (b"two", 3), (b"one", 4), (b"two", 5)):
        edges.summing.kept_by(station, device)
    edges.begin(1, 2, 3, 4)
    assert edges.asked() == [(b"one", (2, 4)), (b"two", (3,))]
    edges.merge(b"two", [3], [4.0, 5.0])
    edges.summing.leave(b"one")
    assert await edges.says() == ((1, 3), [3.0, 4.0]), "the devices of an edge that is gone are asked again"


async def test_an_edge_below_is_asked_again_unless_its_part_is_on_its_way(tried: Callable[..., Tried]) -> None:
    edges = tried(b"below")
    edges.summing.kept_by(b"below", 3)
    for sending, asked in ((False, [(b"below", (3,))]), (False, [(b"below", (3,))]), (True, [])):
        edges.sending.update({b"below"} if sending else ())
        edges.begin(3)
        assert edges.asked() == asked


async def test_the_sum_that_was_wanted_last_is_sent_alone(tried: Callable[..., Tried]) -> None:
    edges = tried(b"below")
    edges.keep(1, [1.0, 2.0], 1)
    edges.summing.kept_by(b"below", 3)
    edges.begin(1, 3)
    edges.begin(3)
    assert edges.asked() == [(b"below", (3,)), (b"below", (3,))]
    edges.merge(b"below", [3], [4.0, 5.0])
    assert await edges.says() == ((3,), [4.0, 5.0])
    edges.begin(1)
    assert await edges.says() == ((1,), [1.0, 2.0])
    assert edges.said.empty()


@pytest.mark.parametrize(
    ("station", "devices", "changes"),
    [
        (b"below", [3], {"ask": "0.0.0"}),
        (b"below", [3], {"epoch": 6}),
        (b"another", [3], {}),
    ],
)
async def test_a_part_of_another_sum_is_not_taken(
    tried: Callable[..., Tried], station: bytes, devices: list[int], changes: dict[str, Any]
) -> None:
    edges = tried(b"below", b"another")
    edges.summing.kept_by(b"below", 3)
    edges.begin(3)
    edges.merge(station, devices, [9.0, 9.0], **changes)
    edges.merge(b"below", [3], [4.0, 5.0])
    assert await edges.says() == ((3,), [4.0, 5.0])


@pytest.mark.parametrize("devices", [[], [3, 5], [5]])
async def test_a_part_with_devices_that_were_not_asked_for_or_with_none_adds_nothing(
    tried: Callable[..., Tried], devices: list[int]
) -> None:
    edges = tried(b"below")
    edges.keep(1, [1.0, 2.0], 1)
    edges.summing.kept_by(b"below", 3)
    edges.summing.kept_by(b"below", 4)
    edges.begin(1, 3, 4)
    edges.merge(b"below", devices, [9.0, 9.0])
    assert await edges.says() == ((1,), [1.0, 2.0])


async def test_a_part_that_cannot_be_read_adds_nothing_and_the_log_says_so(
    tried: Callable[..., Tried], caplog: pytest.LogCaptureFixture
) -> None:
    edges = tried(b"below")
    edges.keep(1, [1.0, 2.0], 1)
    edges.summing.kept_by(b"below", 3)
    edges.begin(1, 3)
    edges.merge(b"below", [3], [9.0, 9.0], lowest=())
    assert await edges.says() == ((1,), [1.0, 2.0])
    assert "the sum of an edge below cannot be used: the parts of a sum do not fit each other" in caplog.text


@pytest.mark.parametrize(("most_bytes", "devices"), [(8, (1,)), (7, ())])
async def test_a_sum_with_more_bytes_than_are_read_is_not_sent_and_edges_below_hear_that_results_pass(
    tried: Callable[..., Tried], most_bytes: int, devices: tuple[int, ...]
) -> None:
    edges = tried(b"below")
    edges.summing.gather(gather := replace(GATHER, most_bytes=most_bytes))
    edges.told.clear()
    edges.keep(1, [1.0, 2.0], 1)
    edges.begin(1)
    assert (await edges.says())[0] == devices
    assert edges.told == ([] if devices else [(b"below", replace(gather, most_bytes=0))])
    assert edges.summing.gathers == bool(devices)
    edges.told.clear()
    edges.summing.gather(another := replace(gather, ask="2.0.0"))
    assert edges.told == ([(b"below", another)] if devices else [])


async def test_an_edge_that_is_told_to_let_results_pass_tells_those_below(tried: Callable[..., Tried]) -> None:
    edges = tried(b"below")
    edges.summing.gather(passing := replace(GATHER, most_bytes=0))
    assert (edges.summing.gathers, edges.told) == (False, [(b"below", passing)])
    edges.summing.join(b"late")
    assert edges.told[1:] == []


async def test_results_for_another_life_of_the_coordinator_pass(tried: Callable[..., Tried]) -> None:
    edges = tried()
    kept = [edges.keep(device, [1.0, 2.0], 1, epoch) for device, epoch in ((1, 6), (2, 7), (3, None))]
    assert kept == [False, True, True], "a device of one's own may say no epoch"


async def test_a_sum_of_another_ask_is_one_of_no_results(tried: Callable[..., Tried]) -> None:
    edges = tried()
    edges.keep(1, [1.0, 2.0], 1)
    edges.summing.begin(edge.Sum(ask="0.9.0", epoch=7, devices=(1,)))
    message, _ = edges.said.get_nowait()
    assert (message.ask, message.devices, message.examples) == ("0.9.0", (), 0)


async def test_the_same_ask_told_again_changes_nothing_and_another_one_forgets_all(tried: Callable[..., Tried]) -> None:
    edges = tried(b"below", b"gone")
    edges.summing.leave(b"gone")
    edges.keep(1, [1.0, 2.0], 1)
    edges.summing.kept_by(b"below", 3)
    edges.summing.gather(GATHER)
    assert edges.told == []
    edges.begin(1, 3)
    assert edges.asked() == [(b"below", (3,))]
    edges.summing.gather(another := replace(GATHER, ask="2.0.0"))
    assert edges.told == [(b"below", another)]
    edges.summing.begin(edge.Sum(ask="2.0.0", epoch=7, devices=(1, 3)))
    assert edges.asked() == []
    assert await edges.says() == ((), [])
    assert edges.said.empty(), "the sum that was under way is given up"


async def test_a_device_that_has_moved_for_good_is_asked_once_more_and_counts_then(tried: Callable[..., Tried]) -> None:
    edges = tried(b"before", b"now")
    edges.summing.kept_by(b"before", 3)
    edges.summing.kept_by(b"now", 3)
    edges.begin(3)
    assert await edges.says() == ((), [])
    edges.summing.kept_by(b"now", 3)
    edges.begin(3)
    assert edges.asked() == [(b"now", (3,))]


async def test_the_reply_of_a_device_whose_edge_is_gone_counts_at_the_edge_above(tried: Callable[..., Tried]) -> None:
    edges = tried(b"below")
    edges.summing.kept_by(b"below", 1)
    edges.summing.leave(b"below")
    edges.summing.leave(b"a machine that was no edge")
    edges.keep(1, [4.0, 5.0], 2)
    edges.begin(1)
    assert await edges.says() == ((1,), [4.0, 5.0])


async def test_an_edge_hears_of_a_sum_that_cannot_be_computed(
    tried: Callable[..., Tried], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(gathering: Gathering, kept: Any) -> Partial:
        raise MemoryError

    monkeypatch.setattr(Gathering, "sum", broken)
    edges = tried()
    edges.begin(3)
    async with asyncio.timeout(30):
        assert isinstance(await edges.failed.get(), MemoryError)
