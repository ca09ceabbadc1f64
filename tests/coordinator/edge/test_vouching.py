"""An edge vouches for the keys of the machines behind it: a lease belongs to a machine, and not to its edge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fedemu.coordinator.edge.edge import Edge
from fedemu.coordinator.edge.plan import EdgePlan
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.run import Run
from fedemu.coordinator.record.summary import Summary
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import DOWN
from fedemu.protocol.sharing import edge_messages as edge
from fedemu.protocol.transport.memory import MemoryDealer, MemoryNetwork

Until = Callable[[Callable[[], object]], Awaitable[None]]
MakePlan = Callable[..., CoordinatorPlan]
MakeFleet = Callable[..., Any]
Play = Callable[[CoordinatorPlan], Awaitable[tuple[Summary, Run]]]
SMALL = {"devices": 2, "per_round": 2, "over_selection": 1.0, "rounds": 3}


class Keyed:
    """A network in memory, on which all connections are made with a key."""

    def __init__(self, network: MemoryNetwork, key: str) -> None:
        self._network = network
        self._key = key

    def connect(self, *arguments: Any) -> MemoryDealer:
        dealer = self._network.connect(*arguments)
        dealer.key = self._key
        return dealer

    def close(self) -> None: ...


@pytest.fixture
async def start_edge(network: MemoryNetwork, tmp_path: Path) -> AsyncIterator[Callable[[str, str, str], None]]:
    tasks: list[asyncio.Task[str]] = []

    def start(up: str, down: str, key: str) -> None:
        plan = EdgePlan(up=up, down=down, folder=tmp_path / down)
        tasks.append(asyncio.ensure_future(Edge(plan, Keyed(network, key), network).run()))

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def keys_of(plan: CoordinatorPlan) -> list[str]:
    lines = next(plan.directory.rglob("leases.jsonl")).read_text().splitlines()
    return [json.loads(line[: line.rindex("}") + 1])["key"] for line in lines]


@pytest.mark.parametrize("behind_two", [False, True], ids=["one edge", "an edge behind an edge"])
async def test_another_machine_behind_the_same_edge_takes_no_device_with_a_stolen_lease(
    make_plan: MakePlan,
    make_fleet: MakeFleet,
    play: Play,
    until: Until,
    network: MemoryNetwork,
    start_edge: Callable[[str, str, str], None],
    behind_two: bool,
) -> None:
    start_edge("here", "top", "TOP")
    if behind_two:
        start_edge("top", "site", "SITE")
    place = "site" if behind_two else "top"
    plan = make_plan(**SMALL)
    fleet = make_fleet(2, address=place, network=Keyed(network, "mine"))
    running = asyncio.create_task(play(plan))
    await until(lambda: fleet.granted is not None)
    heard: list[Any] = []
    thief = Keyed(network, "another").connect(place, DOWN, lambda envelope: heard.append(envelope.message), print)
    thief.send(edge.Vouch(key="TOP mine"))
    thief.send(wire.Hello(device=0, incarnation=2**30, lease=fleet.granted.lease))
    thief.send(wire.Enroll(count=2, lease=fleet.granted.lease))
    await until(lambda: len(heard) == 2)
    assert [message.reason for message in heard] == ["lease_unknown"] * 2
    summary, left = await running
    assert (summary.outcome, summary.perturbed) == ("completed", False)
    assert {event["device"] for event in left.named("join")} == {0, 1}
    assert keys_of(plan) == ["TOP SITE mine" if behind_two else "TOP mine"]


async def test_only_an_edge_can_vouch(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until, network: MemoryNetwork
) -> None:
    fleet = make_fleet(2, network=Keyed(network, "TOP mine"))
    plan = make_plan(**SMALL)
    running = asyncio.create_task(play(plan))
    await until(lambda: fleet.granted is not None)
    heard: list[Any] = []
    thief = Keyed(network, "TOP").connect("here", DOWN, lambda envelope: heard.append(envelope.message), print)
    thief.send(edge.Vouch(key="mine"))
    thief.send(wire.Enroll(count=2, lease=fleet.granted.lease))
    await until(lambda: len(heard) == 1)
    assert heard[0].reason == "lease_unknown"
    await running
    assert keys_of(plan) == ["TOP mine"]
