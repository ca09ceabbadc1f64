"""What a round costs in real time: columns that nothing in the run depends on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fedemu.algorithms.interface import DeviceReply
from fedemu.coordinator.asks.exchange import Contribution
from fedemu.coordinator.asks.payload import Payload
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.run_directory import Run, read_run
from fedemu.coordinator.rounds.tally import Tally
from fedemu.coordinator.serve import serve
from fedemu.protocol.ids import DeviceId

MakePlan = Callable[..., CoordinatorPlan]
MakeFleet = Callable[..., Any]


async def play(plan: CoordinatorPlan) -> tuple[str, Run]:
    summary = await asyncio.wait_for(serve(plan), 60)
    return str(summary.model_digest), read_run(plan.directory)


def reply(device: int, seconds: float | None) -> Contribution:
    index = DeviceId(device)
    return Contribution(DeviceReply(index, 3, 2, {"loss": 1.0}, None), Payload(index, {}, None), seconds)  # type: ignore[arg-type]


def test_a_devices_replies_add_up_and_the_mean_is_over_devices_that_told() -> None:
    tally = Tally(server_seconds=0.25, waited=3.0)
    for contribution in (reply(4, 1.0), reply(7, 0.5), reply(4, 2.0), reply(9, None)):
        tally.count(contribution)
    assert tally.real_times(4.5) == {
        "round_seconds": 4.5,
        "server_seconds": 0.25,
        "coordinator_seconds": 1.5,
        "device_seconds": (3.0 + 0.5) / 2,
    }


def test_a_round_in_which_nobody_told_has_no_time_of_devices() -> None:
    tally = Tally()
    tally.count(reply(4, None))
    assert tally.real_times(1.0)["device_seconds"] is None


async def test_every_ask_of_a_round_counts(make_plan: MakePlan, make_fleet: MakeFleet) -> None:
    make_fleet(2)
    plan = make_plan(devices=2, per_round=2, over_selection=1.0, rounds=2, asks=3)
    _, left = await play(plan)
    assert [row["device_seconds"] for row in left.rows] == [3 * (0.5 + 1.0) / 2] * 2


async def test_the_model_does_not_depend_on_what_devices_say_of_their_time(
    make_plan: MakePlan, make_fleet: MakeFleet
) -> None:
    fleet = make_fleet()
    told, _ = await play(make_plan("told"))
    await fleet.close()
    make_fleet(seconds=None)
    untold, left = await play(make_plan("untold"))
    assert untold == told
    assert [row["device_seconds"] for row in left.rows] == [None] * 4
