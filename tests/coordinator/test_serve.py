"""Whole runs over the in-memory network with a scripted fleet."""

from __future__ import annotations

from collections.abc import Callable

from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.run_directory import read_run
from fedemu.coordinator.serve import serve

Plan = Callable[..., CoordinatorPlan]


async def test_a_run_completes_and_leaves_its_results(make_plan: Plan, make_fleet: Callable[..., object]) -> None:
    fleet = make_fleet()
    plan = make_plan()
    summary = await serve(plan)
    run = read_run(plan.directory)
    assert summary.outcome == "completed"
    assert [row["round"] for row in run.rows] == [1, 2, 3, 4]
    assert fleet.stopped == {-1, 0, 1, 2, 3, 4, 5}
