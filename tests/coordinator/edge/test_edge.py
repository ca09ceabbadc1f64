"""An edge between a hub and relays: what passes, what it keeps, and the sum that it sends."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from fedemu.algorithms.interface import Reducer
from fedemu.coordinator.edge.behind import Behind
from fedemu.coordinator.edge.gathering import Gathering
from fedemu.coordinator.sums.leaf import Leaf
from fedemu.coordinator.sums.messages import packed_of
from fedemu.coordinator.sums.partial import Partial
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import Envelope, Limits, Packed
from fedemu.protocol.errors import FedemuError, RefusedError
from fedemu.protocol.ids import digest_of
from fedemu.protocol.sharing import edge_messages as edge
from fedemu.protocol.sharing.hub import Hub
from fedemu.protocol.tensors import pack

GATHER = edge.Gather(
    ask="1.0.0",
    epoch=7,
    leaves=(wire.TensorSpec(name="delta/w", dtype="float32", shape=(2,)),),
    reducers=(("delta", "weighted_mean", "delta"),),
    max_norm=100.0,
)
REDUCERS = {"delta": Reducer("weighted_mean")}
LEAVES = {"delta/w": Leaf("float32", (2,))}


def value(message: edge.Partial, frames: tuple[memoryview, ...]) -> list[float]:
    sums = Partial(REDUCERS, LEAVES).unpack(packed_of(message, frames))
    return list(sums.finish()["delta"]["w"])


async def test_an_edge_sends_one_sum_of_the_results_that_it_keeps(root: Any, join: Any, settle: Any) -> None:
    devices = [await join(number) for number in range(3)]
    root.hub.send(root.station, GATHER)
    await settle()
    for device, values, examples in zip(devices, ([1.0, 2.0], [4.0, 5.0], [100.0, 0.0]), (1, 2, 3), strict=True):
        device.reply(values, examples)
    await settle()
    held = root.heard_of(edge.Held)
    assert [(m.examples, m.metrics, m.reason) for m in held] == [
        (1, {"loss": 1.0}, ""),
        (2, {"loss": 1.0}, ""),
        (3, {"loss": 1.0}, ""),
    ]
    assert root.last(wire.Result) is None, "the tensors stay at the edge"
    root.hub.send(root.station, edge.Sum(ask="1.0.0", epoch=7, devices=(0, 1)))
    _, partial, frames = await root.hears(edge.Partial)
    assert (set(partial.devices), partial.examples) == ({0, 1}, 3)
    assert value(partial, frames) == [3.0, 4.0]


async def test_an_edge_checks_results_as_the_coordinator_does(root: Any, join: Any, settle: Any) -> None:
    devices = [await join(number) for number in range(2)]
    root.hub.send(root.station, GATHER)
    await settle()
    devices[0].reply([float("nan"), 0.0], 1)
    devices[1].reply([1000.0, 0.0], 1)
    await settle()
    assert [m.reason for m in root.heard_of(edge.Held)] == ["nonfinite", "norm"]


async def test_a_second_result_of_a_device_changes_nothing_of_what_is_told_of_the_first(
    root: Any, join: Any, settle: Any
) -> None:
    device = await join(0)
    root.hub.send(root.station, GATHER)
    await settle()
    device.reply([1.0, 2.0], 1)
    device.reply([1.0, 2.0], 9)
    await settle()
    told = root.heard_of(edge.Held)
    root.hub.send(root.station, edge.Sum(ask="1.0.0", epoch=7, devices=(0,)))
    _, partial, _ = await root.hears(edge.Partial)
    assert ([held.examples for held in told], partial.examples) == ([1, 1], 1), "or else no sum is ever accepted"


async def test_a_device_cannot_say_itself_that_its_edge_keeps_its_result(root: Any, join: Any, settle: Any) -> None:
    device = await join(0)
    root.hub.send(root.station, GATHER)
    await settle()
    device.dealer.send(edge.Held(ask="1.0.0", examples=9, steps=1, metrics={}, epoch=7))
    device.reply([1.0, 2.0], 1)
    await settle()
    assert [held.examples for held in root.heard_of(edge.Held)] == [1], "or else the sum of all its neighbours is lost"


async def test_a_device_that_was_refused_cannot_reply_for_the_device_that_it_named(
    root: Any, join: Any, settle: Any
) -> None:
    victim, thief = await join(0), await join(1)
    root.hub.send(root.station, GATHER)
    thief.dealer.send(wire.Hello(device=0, incarnation=9, lease="stolen"))
    await settle()
    thief.reply([50.0, 50.0], 100)
    victim.reply([1.0, 2.0], 1)
    await settle()
    assert [held.examples for held in root.heard_of(edge.Held)] == [100, 1]
    root.hub.send(root.station, edge.Sum(ask="1.0.0", epoch=7, devices=(0,)))
    _, partial, frames = await root.hears(edge.Partial)
    assert (partial.devices, partial.examples, value(partial, frames)) == ((0,), 1, [1.0, 2.0])


async def test_what_an_edge_cannot_read_of_its_coordinator_ends_nothing(
    root: Any, join: Any, settle: Any, caplog: pytest.LogCaptureFixture
) -> None:
    device = await join(0)
    for tag in ("work", "offer", "granted", "welcome"):
        root.hub.send(root.of(0), Packed(msgspec.msgpack.encode({"t": tag, "v": 1, "blobs": 7})))
    root.hub.send(root.of(0), Packed(b"\x82\xa1t\xa4work"))
    await settle()
    root.hub.send(root.of(0), wire.Proceed(ask="1.0.0"))
    await settle()
    assert device.kinds() == ["welcome", "proceed"]
    assert caplog.records == []


@pytest.mark.parametrize(
    "answer",
    [{"t": "stationed", "v": 1, "colour": "red"}, {"t": "refused", "v": 1, "reason": "malformed", "detail": "what?"}],
)
async def test_an_edge_below_a_coordinator_of_another_version_ends_with_a_sentence(
    network: Any, start_edge: Any, settle: Any, answer: dict[str, Any]
) -> None:
    def received(peer: bytes, envelope: Envelope) -> None:
        router.send(peer, Packed(msgspec.msgpack.encode(answer)))

    router = network.bind("other", edge.up_decoder(Limits()), received, lambda peer, error: None)
    task = await start_edge("other", "edge")
    await settle()
    with pytest.raises(RefusedError, match="coordinator at other and this machine do not understand each other"):
        await asyncio.wait_for(task, 60)


async def test_an_edge_hears_and_answers_while_it_computes_a_sum(
    root: Any, join: Any, settle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over, add = [], threading.Event(), Gathering.sum

    def slowly(gathering: Gathering, kept: Any) -> Partial:
        begun.append(len(kept))
        assert over.wait(30)
        return add(gathering, kept)

    monkeypatch.setattr(Gathering, "sum", slowly)
    device = await join(0)
    root.hub.send(root.station, GATHER)
    await settle()
    device.reply([1.0, 2.0], 1)
    await settle()
    for _ in range(3):
        root.hub.send(root.station, edge.Sum(ask="1.0.0", epoch=7, devices=(0,)))
        await settle()
    await join(1)
    assert root.of(1), "its Hello passed the edge meanwhile"
    over.set()
    _, partial, _ = await root.hears(edge.Partial)
    await settle()
    assert (partial.devices, begun, len(root.heard_of(edge.Partial))) == ((0,), [1], 1)


async def test_a_sum_that_is_not_wanted_any_more_is_not_sent(
    root: Any, join: Any, settle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, add = threading.Event(), Gathering.sum
    monkeypatch.setattr(Gathering, "sum", lambda *of: over.wait(30) and add(*of))
    device = await join(0)
    for ask in ("1.0.0", "2.0.0"):
        root.hub.send(root.station, replace(GATHER, ask=ask))
        await settle()
        device.reply([1.0, 2.0], 1, ask)
        await settle()
        root.hub.send(root.station, edge.Sum(ask=ask, epoch=7, devices=(0,)))
        await settle()
    over.set()
    await root.hears(edge.Partial)
    assert [message.ask for message in root.heard_of(edge.Partial)] == ["2.0.0"]


async def test_an_edge_that_cannot_keep_a_result_ends_with_a_sentence(
    root: Any, join: Any, settle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.coordinator.asks.payload.FILE_THRESHOLD", 0)
    (tmp_path / "edge").mkdir(exist_ok=True)
    (tmp_path / "edge" / "results").touch()
    device = await join(0)
    root.hub.send(root.station, GATHER)
    await settle()
    device.reply([1.0, 2.0], 1)
    with pytest.raises(FedemuError, match=r"cannot keep a payload of 8 bytes in .*results"):
        await asyncio.wait_for(root.edge, 60)


async def test_results_of_another_ask_pass(root: Any, join: Any, settle: Any) -> None:
    device = await join(0)
    device.reply([1.0, 2.0], 1)
    await settle()
    assert isinstance(root.heard[-1][1], wire.Result)
    root.hub.send(root.station, GATHER)
    await settle()
    device.reply([1.0, 2.0], 1, "0.1.0")
    await settle()
    assert [result.ask for result in root.heard_of(wire.Result)] == ["1.0.0", "0.1.0"]
    assert root.heard_of(edge.Held) == []


async def test_results_whose_sum_has_more_bytes_than_are_read_pass(root: Any, join: Any, settle: Any) -> None:
    device = await join(0)
    root.hub.send(root.station, replace(GATHER, most_bytes=7))  # a place of this sum has 8 bytes
    await settle()
    device.reply([1.0, 2.0], 1)
    await settle()
    root.hub.send(root.station, edge.Sum(ask="1.0.0", epoch=7, devices=(0,)))
    _, partial, _ = await root.hears(edge.Partial)
    assert (partial.devices, partial.examples) == ((), 0), "so the device is asked again"
    root.hub.send(root.station, replace(GATHER, ask="2.0.0", most_bytes=7))
    for ask in ("1.0.0", "2.0.0"):
        device.reply([1.0, 2.0], 1, ask)
    await settle()
    assert [result.ask for result in root.heard_of(wire.Result)] == ["1.0.0", "2.0.0"]
    root.hub.send(root.station, replace(GATHER, ask="3.0.0", most_bytes=8))
    await settle()
    device.reply([1.0, 2.0], 1, "3.0.0")
    await settle()
    assert [held.ask for held in root.heard_of(edge.Held)] == ["1.0.0", "3.0.0"]


async def test_an_edge_that_comes_when_the_run_is_over_hears_so(
    root: Any, join: Any, settle: Any, start_edge: Any
) -> None:
    await join(0)  # its edge waits a little for its farewell
    root.hub.send(root.station, wire.Stop(reason="completed"))
    await settle()
    assert not root.edge.done()
    late = await start_edge("edge", "below")
    async with asyncio.timeout(10):
        assert await late == "completed"


async def test_a_new_edge_says_that_it_has_nothing_of_the_ask(root: Any, settle: Any) -> None:
    root.hub.send(root.station, edge.Sum(ask="1.0.0", epoch=7, devices=(0, 1)))
    await settle()
    assert root.last(edge.Partial)[1].devices == ()


async def test_a_blob_is_fetched_once_and_served_to_all(root: Any, join: Any, settle: Any, blob: Any) -> None:
    devices = [await join(number) for number in range(3)]
    root.hub.send(root.of(0), wire.Offer(blobs=(blob,), round=1))
    await settle()
    for device in devices:
        device.dealer.send(wire.Need(digest=blob.digest, offset=0, length=blob.size))
    await settle()
    assert [device.kinds()[-1] for device in devices] == ["blob"] * 3
    assert root.needs == 1


async def test_a_device_whose_result_is_on_its_way_is_not_told_to_proceed_again(
    root: Any, join: Any, settle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = await join(0)

    async def told(ask: str) -> int:
        root.hub.send(root.of(0), wire.Proceed(ask=ask))
        await settle()
        return int(device.kinds().count("proceed"))

    monkeypatch.setattr(Hub, "is_sending", lambda hub, peer: True)
    assert [await told("1.0.0"), await told("1.0.0")] == [1, 1]
    assert await told("2.0.0") == 2
    monkeypatch.setattr(Hub, "is_sending", lambda hub, peer: False)
    assert await told("2.0.0") == 3


async def test_a_device_is_told_to_proceed_in_each_session_however_much_its_machine_sends(
    root: Any, join: Any, settle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hub, "is_sending", lambda hub, peer: True)
    device = await join(0)
    for incarnation in (1, 2):  # the second one is in the next life of the coordinator, which asks the same again
        root.hub.send(root.of(0), wire.Proceed(ask="1.0.0"))
        await settle()
        assert device.kinds().count("proceed") == incarnation
        device.dealer.send(wire.Hello(device=0, incarnation=incarnation, lease="lease"))
        await settle()


async def test_a_blob_that_the_next_life_of_the_coordinator_does_not_have_yet_is_fetched_at_its_offer(
    root: Any, join: Any, settle: Any, blob: Any
) -> None:
    device, root.lacks = await join(0), {blob.digest}
    root.hub.send(root.of(0), wire.Offer(blobs=(blob,), round=1))
    await settle()
    device.dealer.send(wire.Need(digest=blob.digest, offset=0, length=blob.size))
    await settle()
    root.lacks.clear()
    root.hub.send(root.of(0), wire.Offer(blobs=(blob,), round=1))
    await settle()
    assert device.kinds()[-1] == "blob"


async def test_an_edge_below_learns_at_its_own_edge_that_a_blob_is_not_known_there(
    root: Any, intrude: Any, settle: Any, blob: Any
) -> None:
    below = await intrude()
    below.dealer.send(wire.Need(digest=blob.digest, offset=0, length=100))
    await settle()
    assert below.got[-1].message.reason == "unknown_blob"
    assert root.needs == 0, "the coordinator would call the edge unknown, which would begin anew, and ask again"


async def two_replies(root: Any, join: Any, settle: Any) -> Any:
    """A device at the edge and one at the edge below it have replied. Returns the latter."""
    near, far = await join(0), await join(1, "lower")
    root.hub.send(root.station, GATHER)
    await settle()
    near.reply([1.0, 2.0], 1)
    far.reply([4.0, 5.0], 2)
    await settle()
    return far


async def test_edges_behind_edges_send_their_sums_through_them(
    root: Any, join: Any, settle: Any, start_edge: Any
) -> None:
    await start_edge("edge", "lower")
    await two_replies(root, join, settle)
    root.hub.send(root.station, edge.Sum(ask="1.0.0", epoch=7, devices=(0, 1)))
    _, partial, frames = await root.hears(edge.Partial)
    assert set(partial.devices) == {0, 1}
    assert value(partial, frames) == [3.0, 4.0]


async def test_an_edge_gives_places_to_others_when_it_has_one_itself_and_only_to_those_that_may_be_edges(
    network: Any,
    start_edge: Any,
    intrude: Any,
    settle: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await start_edge("root", "edge")
    early = await intrude()
    assert early.got == []
    stationed = edge.Stationed(run="run", devices=5, heartbeat_seconds=1.0, patience=5)
    above = network.bind(
        "root", edge.up_decoder(Limits()), lambda peer, envelope: above.send(peer, stationed), lambda peer, error: None
    )
    await settle()
    assert [envelope.message for envelope in early.got] == [stationed]
    monkeypatch.setattr(Hub, "may_be_edge", lambda hub, peer: False)
    refused = await intrude()
    assert [envelope.message.reason for envelope in refused.got] == [edge.NO_EDGE]
    (told,) = caplog.messages
    assert told.startswith("a peer was refused: no_edge (1 so far): this key is not approved for an edge; say there: ")


async def test_edges_below_let_results_pass_once_the_sum_with_theirs_has_too_many_bytes(
    root: Any, join: Any, settle: Any, start_edge: Any
) -> None:
    await start_edge("edge", "lower")
    near, far = await join(0), await join(1, "lower")
    root.hub.send(root.station, replace(GATHER, most_bytes=16))
    await settle()
    near.reply([64.0, 0.0], 1)
    far.reply([2.0**-80, 0.0], 1)
    await settle()
    assert [held.ask for held in root.heard_of(edge.Held)] == ["1.0.0", "1.0.0"]
    root.hub.send(root.station, edge.Sum(ask="1.0.0", epoch=7, devices=(0, 1)))
    _, partial, _ = await root.hears(edge.Partial)
    assert partial.devices == ()
    await settle()
    near.reply([64.0, 0.0], 1)
    far.reply([2.0**-80, 0.0], 1)
    await settle()
    assert len(root.heard_of(wire.Result)) == 2, "an edge that keeps nothing could not add up what is kept below it"


@pytest.mark.parametrize(("place", "examples"), [("edge", 2), ("edge", 5), ("beside", 5)])
async def test_a_device_that_replies_at_two_edges_spoils_no_sum_of_its_neighbours(
    root: Any, join: Any, settle: Any, start_edge: Any, place: str, examples: int
) -> None:
    await start_edge("edge", "lower")
    await start_edge("edge", "beside")
    far = await two_replies(root, join, settle)
    moved = await join(1, place)
    moved.reply([4.0, 5.0], examples)
    await settle()
    told = [held.examples for held in root.heard_of(edge.Held)]
    assert told == [1, 2, examples], "the coordinator may go by either"
    root.hub.send(root.station, edge.Sum(ask="1.0.0", epoch=7, devices=(0, 1)))
    _, partial, frames = await root.hears(edge.Partial)
    assert (partial.devices, partial.examples, value(partial, frames)) == ((0,), 1, [1.0, 2.0])
    far.reply([4.0, 5.0], 2)
    await settle()
    root.hub.send(root.station, edge.Sum(ask="1.0.0", epoch=7, devices=(0, 1)))
    _, partial, frames = await root.hears(edge.Partial, 2)
    assert (set(partial.devices), partial.examples, value(partial, frames)) == ({0, 1}, 3, [3.0, 4.0])


@pytest.mark.parametrize(("blob_bytes", "upload_bytes"), [(40 * 2**20, 1), (1, 40 * 2**20)])
async def test_a_device_may_send_as_many_bytes_as_its_asks_need(
    root: Any, join: Any, settle: Any, blob_bytes: int, upload_bytes: int
) -> None:
    device = await join(1)
    large = wire.BlobRef(key="model", digest=digest_of(b""), size=blob_bytes)
    work = wire.Work(
        ask="1.0.0", program="train", task=0, start=0.0, shared=(large,), state=None, download_bytes=1,
        upload_bytes=upload_bytes, passes=1.0, processed=1.0, deadline=9.0, durable_round=0, epoch=7,
    )  # fmt: skip
    root.hub.send(root.of(1), work)
    await settle()
    values = np.zeros(10 * 2**20, np.float32)
    specs, frames = pack({"delta/w": values})
    result = wire.Result(ask="1.0.0", examples=1, steps=1, metrics={}, epoch=7, tensors=specs)
    for _ in range(5):
        device.dealer.send(result, frames)
    await settle()
    assert len(root.heard_of(wire.Result)) == 5


async def test_the_time_for_which_an_edge_itself_stood_still_does_not_count(
    root: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + 1000.0)
    await root.hears(wire.Heartbeat)
    assert not root.edge.done()


def test_people_are_told_who_is_behind_an_edge_when_the_numbers_have_come_to_rest() -> None:
    told: list[str] = []
    behind = Behind(told.append)
    behind.grant(b"m", "lease")
    for number in range(1500):
        behind.devices[bytes([number >> 8, number & 255])] = number
        behind.look(number / 1000, 0)
    assert told == []
    behind.devices[b"its next life"] = 7
    behind.grant(b"its next connection", "lease")
    behind.look(3.5, 0)
    behind.look(9.0, 0)
    behind.forget(b"m")
    behind.forget(b"its next connection")
    behind.look(10.0, 1)
    behind.look(12.0, 1)
    assert told == [
        "behind this edge: 1 machine, 1,500 devices",
        "behind this edge: 0 machines, 1,500 devices, 1 edge",
    ]
