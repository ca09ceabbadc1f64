"""Strangers at an edge without keys: how much it passes on, and for whom they cannot speak."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fedemu.coordinator.edge.allowances import PASSED_RATE, Allowances
from fedemu.coordinator.edge.plan import EdgePlan
from fedemu.coordinator.fleet.admission import most_strangers
from fedemu.protocol import messages as wire
from fedemu.protocol.transport.interface import Bounds

STRANGE = 2**30
"""The incarnation of devices that are none."""


def hello(device: int, lease: str = "lease") -> wire.Hello:
    return wire.Hello(device=device, incarnation=STRANGE, lease=lease)


def hellos(root: Any) -> list[int]:
    """The devices whose Hellos of strangers have come through the edge."""
    return [message.device for message in root.heard_of(wire.Hello) if message.incarnation == STRANGE]


async def test_a_stranger_can_neither_say_much_through_an_edge_nor_anything_long(
    root: Any, join: Any, connect: Any, settle: Any
) -> None:
    stranger = connect()
    stranger.dealer.send(wire.Presence(until=1.0, intervals=((0.0, 1.0),) * 1000))
    await settle()
    assert [answer.reason for answer in stranger.got] == ["unknown_peer"]
    assert root.last(wire.Presence) is None
    for _ in range(100):
        stranger.dealer.send(wire.Enroll(count=1, host="stranger"))
    await settle()
    assert len(root.heard_of(wire.Enroll)) == 19, "twenty messages, of which one was long"
    honest = await join(1)
    assert honest.kinds() == ["welcome"]


@pytest.mark.parametrize("fleet", [0])
@pytest.mark.usefixtures("scarce")
async def test_all_strangers_of_an_edge_have_one_allowance_together(
    root: Any, join: Any, connect: Any, settle: Any
) -> None:
    device = await join(1)
    for _ in range(5):
        stranger = connect()
        for _ in range(4):
            stranger.dealer.send(wire.Enroll(count=1, host="stranger"))
        await settle()
    assert len(root.heard_of(wire.Enroll)) == 9, "ten at once, of which one was the device's Hello"
    for _ in range(20):
        device.dealer.send(wire.Presence(until=1.0, intervals=((0.0, 1.0),) * 1000))
    await settle()
    assert len(root.heard_of(wire.Presence)) == 20, "it has its own"


async def test_a_channel_cannot_speak_for_devices_of_a_machine_on_another_connection(
    root: Any, join: Any, connect: Any, intrude: Any, settle: Any
) -> None:
    connect().dealer.send(wire.Enroll(count=3, host="machine"))
    thief = await intrude()
    thief.say(0, hello(1), hello(2, "another lease"))
    await settle()
    assert hellos(root) == [2]
    assert thief.refusals() == ["lease_unknown"]
    device = await join(1)
    assert device.kinds() == ["welcome"]


@pytest.mark.usefixtures("scarce")
async def test_devices_with_a_lease_get_through_when_strangers_have_used_up_what_may_pass(
    root: Any, join: Any, connect: Any, intrude: Any, settle: Any
) -> None:
    connect().dealer.send(wire.Enroll(count=3, host="machine"))
    flood = await intrude()
    flood.say(0, *[wire.Enroll(count=1, host="stranger")] * 100, *[hello(1, "no lease")] * 100)
    await settle()
    assert (len(root.heard_of(wire.Enroll)), hellos(root)) == (9, []), (
        "ten messages, of which one was that of the edge of nobody"
    )
    device = await join(1)
    assert device.kinds() == ["welcome"]


async def test_a_connection_whose_channels_say_more_than_an_edge_passes_on_is_closed(
    root: Any, intrude: Any, settle: Any
) -> None:
    flood = await intrude()
    for first in range(0, 10_000, 1000):
        flood.say(first, *[hello(1, "no lease")] * 1000)
    await settle()
    passed = len(hellos(root))
    assert 10 * PASSED_RATE <= passed < 5000
    flood.say(0, wire.Enroll(count=1, host="late"))
    await settle()
    assert (len(root.heard_of(wire.Enroll)), len(hellos(root))) == (0, passed)


@pytest.mark.usefixtures("scarce")
async def test_what_strangers_ask_while_the_coordinator_is_away_counts_when_it_is_back(
    root: Any, connect: Any, settle: Any
) -> None:
    root.hub.send(root.station, wire.Refused(reason="unknown_peer", detail="Who are you?"))
    await settle()
    for _ in range(30):
        connect().dealer.send(hello(1, "no lease"))
    await settle()
    assert hellos(root) == []
    for _ in range(200):
        await asyncio.sleep(0.05)
        if hellos(root):
            break
    await settle()
    assert len(hellos(root)) == 10


async def test_what_a_stranger_needs_is_left_to_the_coordinator_which_refuses_it(
    root: Any, join: Any, connect: Any, settle: Any, blob: wire.BlobRef
) -> None:
    device = await join(1)
    root.hub.send(root.of(1), wire.Offer(blobs=(blob,), round=1))
    await settle()
    need = wire.Need(digest=blob.digest, offset=0, length=100)
    stranger = connect()
    for peer in (stranger, device):
        peer.dealer.send(need)
    await settle()
    assert root.heard_of(wire.Need).count(need) == 1, "that of the device was served here"
    assert device.kinds() == ["welcome", "offer", "blob"]


async def test_a_connection_that_wants_more_of_blobs_than_a_run_needs_is_closed(
    root: Any, join: Any, settle: Any, blob: wire.BlobRef, caplog: pytest.LogCaptureFixture
) -> None:
    device, other = await join(1), await join(2)
    root.hub.send(root.of(1), wire.Offer(blobs=(blob,), round=1))
    await settle()
    for _ in range(70):
        device.dealer.send(wire.Need(digest=blob.digest, offset=0, length=2**24))
    device.dealer.send(wire.Need(digest=blob.digest, offset=0, length=1))
    await settle()
    assert device.kinds().count("blob") == 64, "64 MiB in answers of at most 1 MiB each, and eight times the blob"
    assert next(record.getMessage() for record in caplog.records) == "a connection was closed: too_much (1 so far)"
    other.dealer.send(wire.Need(digest=blob.digest, offset=0, length=100))
    await settle()
    assert other.kinds()[-1] == "blob"


@pytest.mark.parametrize("fleet", [3])
async def test_an_edge_lets_as_many_connections_without_a_place_be_open_as_a_coordinator(
    network: Any, start_edge: Any, give_places: Any, fleet: int, settle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[Bounds] = []
    bind = network.bind
    monkeypatch.setattr(network, "bind", lambda *words: bounds.append(words[-1]) or bind(*words))
    await start_edge("root", "edge")
    assert bounds[0].most_strangers() == EdgePlan.connections // 2, "all machines of a large run may come back"
    give_places()
    await settle()
    assert bounds[0].most_strangers() == most_strangers(fleet)


async def test_nothing_long_is_kept_of_strangers_while_the_coordinator_is_away(
    root: Any, connect: Any, settle: Any
) -> None:
    root.hub.send(root.station, wire.Refused(reason="unknown_peer", detail="Who are you?"))
    await settle()
    stranger = connect()
    stranger.dealer.send(hello(1, "no lease" * 1000))
    await settle()
    assert [answer.reason for answer in stranger.got] == ["unknown_peer"]


def test_a_connection_without_work_may_send_so_many_bytes_and_no_more() -> None:
    allowances = Allowances(50)
    size = 40 * 2**20
    assert [allowances.of_session(b"peer", size, 0.0) is None for _ in range(2)] == [True, False]
    allowances.asked(size, 0)
    assert allowances.unfinished == 320 * 2**20
    assert [allowances.of_session(b"peer", size, 0.0) is None for _ in range(18)] == [True] * 16 + [False] * 2
