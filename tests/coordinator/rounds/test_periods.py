"""The rounds of a period begin when the period does, and the clock never goes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fedemu.coordinator.fleet.journal import LeaseJournal
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.run import read_run
from fedemu.coordinator.serve import serve
from fedemu.protocol import messages as wire
from fedemu.protocol.errors import Interrupted
from fedemu.protocol.transport.memory import MemoryNetwork

MakePlan = Callable[..., CoordinatorPlan]
MakeFleet = Callable[..., Any]


class Starts:
    """A script for devices that take 10 s for each Work. It remembers when each round's work began."""

    def __init__(self) -> None:
        self.of_round: dict[int, float] = {}

    def __call__(self, index: int, work: wire.Work) -> Mapping[str, Any]:
        self.of_round[int(work.ask.split(".")[0])] = work.start
        return {"after": 10.0}


def periods_of(seconds: float, rounds: int = 2) -> dict[str, Any]:
    return {
        "task_of_round": lambda round: (round - 1) // rounds,
        "task_begins": lambda task: task * seconds,
    }


def rows(plan: CoordinatorPlan) -> list[tuple[int, float]]:
    return [(row.task, row.virtual_time) for row in read_run(plan.directory).rows]


async def test_the_virtual_clock_jumps_to_the_beginning_of_a_period(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    starts = Starts()
    make_fleet(script=starts)
    plan = make_plan(rounds=5, **periods_of(1000.0))
    await asyncio.wait_for(serve(plan), 60)
    assert starts.of_round == {1: 0.0, 2: 10.0, 3: 1000.0, 4: 1010.0, 5: 2000.0}
    assert rows(plan) == [(0, 10.0), (0, 20.0), (1, 1010.0), (1, 1020.0), (2, 2010.0)]


async def test_a_period_that_is_late_begins_at_once(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    starts = Starts()
    make_fleet(script=starts)
    await asyncio.wait_for(serve(make_plan(rounds=4, **periods_of(15.0))), 60)
    assert starts.of_round == {1: 0.0, 2: 10.0, 3: 20.0, 4: 30.0}


@pytest.mark.parametrize("rounds", [1, 2, 3])
async def test_a_resumed_run_begins_its_periods_at_the_same_times(
    make_plan: MakePlan, make_fleet: MakeFleet, rounds: int
) -> None:
    starts = Starts()
    make_fleet(script=starts)
    plan = make_plan(rounds=rounds, **periods_of(1000.0))
    await asyncio.wait_for(serve(plan), 60)
    [grant] = LeaseJournal(plan.directory / "checkpoint" / "leases.jsonl").entries()
    network = MemoryNetwork()
    make_fleet(script=starts, network=network, lease=grant["grant"])
    plan = make_plan(network=network, rounds=5, **periods_of(1000.0))
    await asyncio.wait_for(serve(plan), 60)
    assert starts.of_round == {1: 0.0, 2: 10.0, 3: 1000.0, 4: 1010.0, 5: 2000.0}
    assert rows(plan)[-1] == (2, 2010.0)


async def test_under_the_wall_clock_a_period_is_waited_for(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    starts = Starts()
    make_fleet(4, wall=True, script=starts)
    fleet = {"devices": 4, "per_round": 4, "over_selection": 1.0, "deadline": 5.0}
    plan = make_plan(clock="wall", rounds=2, **fleet, **periods_of(1.5, rounds=1))
    await asyncio.wait_for(serve(plan), 60)
    assert starts.of_round[1] < 1.5 <= starts.of_round[2] < 3.0


async def test_the_wait_for_a_period_can_be_interrupted(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    make_fleet(4, wall=True, script=Starts())
    fleet = {"devices": 4, "per_round": 4, "over_selection": 1.0, "deadline": 5.0}
    plan = make_plan(clock="wall", rounds=2, **fleet, **periods_of(3600.0, rounds=1))
    running = asyncio.create_task(serve(plan))
    async with asyncio.timeout(60):
        while not (plan.directory / "metrics.jsonl").is_file() or not read_run(plan.directory).rows:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Interrupted, match="Stopped after round 1 of 2"):
        await asyncio.wait_for(running, 60)
