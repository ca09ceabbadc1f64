"""An edge's connection further up: when it connects anew, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedemu.coordinator.edge.plan import EdgePlan
from fedemu.coordinator.edge.upward import Upward
from fedemu.protocol.errors import HandshakeFailed, RefusedError, UnreachableError
from fedemu.protocol.sharing.trunk import Trunk

BEGAN = 1000


class Clocked:
    """An ``Upward`` with a clock of its own, what it told people, and the errors with which it ended."""

    def __init__(self, network: Any, address: str) -> None:
        self.now = BEGAN
        self.told: list[str] = []
        self.ended: list[BaseException] = []
        self.trunk = Trunk(network, asyncio.get_running_loop())
        plan = EdgePlan(up=address, down="", folder=Path(), lost_seconds=20.0, told=self.told.append)
        self.upward = Upward(plan, self.trunk, lambda: self.now, lambda *_: None, lambda _: None, self.ended.append)

    async def connect(self, settle: Callable[[], Any]) -> None:
        """Connect, and let the answer come."""
        self.upward.connect()
        await settle()

    async def pass_to(self, end: int, settle: Callable[[], Any]) -> None:
        """Let the seconds pass, with a look in each."""
        while self.now < end:
            self.now += 1
            self.upward.tick(self.now)
            await settle()


async def test_an_edge_connects_anew_when_its_coordinator_fell_silent_and_ends_when_it_stays_away(
    network: Any, root: Any, settle: Any
) -> None:
    made = Clocked(network, "root")
    await made.connect(settle)
    connections = len(network.routers["root"].dealers)
    await made.pass_to(BEGAN + 4, settle)
    assert made.told == ["an edge of run"]
    sent, received = made.upward.traffic
    await made.pass_to(BEGAN + 5, settle)
    assert made.told[1:] == ["the coordinator is gone; this edge looks for it for 15 s", "the coordinator is back"]
    assert len(network.routers["root"].dealers) == connections, "the connection before is closed"
    assert made.upward.traffic[0] > sent > 0, "a counter of traffic never falls"
    assert made.upward.traffic[1] > received > 0
    network.routers["root"].close()
    silent = made.now
    await made.pass_to(silent + 19, settle)
    assert made.ended == []
    await made.pass_to(silent + 20, settle)
    [error] = made.ended
    assert isinstance(error, UnreachableError)
    assert str(error).startswith("The coordinator at root has been away for 20 s, so this edge has stopped;")
    made.trunk.close()


async def test_what_comes_for_channels_shows_an_edge_that_its_coordinator_lives(
    network: Any, root: Any, settle: Any
) -> None:
    made = Clocked(network, "root")
    await made.connect(settle)
    network.routers["root"].close()
    for _ in range(10):
        await made.pass_to(made.now + 3, settle)
        made.trunk.heard()
    assert (made.told, made.ended) == (["an edge of run"], [])
    made.trunk.close()


async def test_an_edge_whose_key_was_refused_connects_anew_so_that_it_comes_in_once_it_is_approved(
    network: Any, settle: Any
) -> None:
    made = Clocked(network, "root")
    made.upward.connect()
    first = made.upward._dealer
    made.upward._rejected(HandshakeFailed("its connection is broken off"))
    await made.pass_to(BEGAN + 3, settle)
    assert made.upward._dealer is first, "ZeroMQ tries again by itself"
    made.upward._rejected(HandshakeFailed("its key is not approved", final=True))
    await made.pass_to(BEGAN + 6, settle)
    second = made.upward._dealer
    assert second is not first
    await made.pass_to(BEGAN + 9, settle)
    assert made.upward._dealer is second, "one new connection for each refusal"
    assert [told.split(";")[1] for told in made.told] == [" this edge goes on trying"] * 2
    await made.pass_to(BEGAN + 60, settle)
    with pytest.raises(RefusedError, match=r"^No way in within 60 s: its key is not approved\.$"):
        raise made.ended[0]
    made.trunk.close()


async def test_an_edge_without_a_coordinator_ends_with_a_sentence(network: Any, settle: Any) -> None:
    made = Clocked(network, "nowhere")
    await made.pass_to(BEGAN + 59, settle)
    assert made.ended == []
    made.upward.stood_still(10.0, made.now)
    await made.pass_to(BEGAN + 69, settle)
    assert made.ended == [], "the time for which the edge itself stood still does not count"
    await made.pass_to(BEGAN + 70, settle)
    with pytest.raises(UnreachableError, match="No coordinator answered at nowhere within 60 s; start one there"):
        raise made.ended[0]
    made.trunk.close()
