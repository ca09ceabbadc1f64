"""The coordinator's timer: a fault in what it calls ends the run, and the run can be resumed."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from fedemu.coordinator.observer import Observers
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.run import Run
from fedemu.coordinator.record.summary import Summary
from fedemu.protocol.errors import FedemuError
from fedemu.protocol.transport.memory import MemoryNetwork

Play = Callable[[CoordinatorPlan], Awaitable[tuple[Summary, Run]]]


class FullDisk(Observers):
    """An observer that fails when the timer tells it about the fleet for the third time."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def fleet(self, counts: Mapping[str, int]) -> None:
        self.times += 1
        if self.times == 3:
            raise FedemuError("Cannot write events.jsonl: No space left on device.")


async def test_a_fault_in_the_timer_ends_the_run_with_a_checkpoint(
    make_plan: Callable[..., CoordinatorPlan], make_fleet: Callable[..., Any], play: Play
) -> None:
    fleet = make_fleet(
        2, script=lambda index, work: {"after": 1.0, "reply": "silent" if work.ask[0] == "3" else "good"}
    )
    plan = make_plan(devices=2, per_round=2, over_selection=1.0, rounds=4, observers=(FullDisk(),))
    with pytest.raises(FedemuError, match="No space left"):
        await play(plan)
    summary = json.loads((plan.directory / "summary.json").read_text())
    assert (summary["outcome"], summary["rounds"]) == ("failed", 2)
    again = MemoryNetwork()
    make_fleet(2, network=again, lease=fleet.granted.lease, script=lambda index, work: {"after": 1.0})
    finished, _ = await play(make_plan(devices=2, per_round=2, over_selection=1.0, rounds=4, network=again))
    assert (finished.outcome, finished.rounds) == ("completed", 4)
