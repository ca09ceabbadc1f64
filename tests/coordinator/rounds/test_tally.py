"""A round's row holds its outcomes, its measures and its real time. The model does not depend on real time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fedemu.algorithms.interface import Context, DeviceReply
from fedemu.coordinator.asks.parts import Contribution
from fedemu.coordinator.asks.payload import Payload
from fedemu.coordinator.evaluation.evaluate import Evaluation
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import Run
from fedemu.coordinator.record.summary import Summary
from fedemu.coordinator.rounds.tally import Tally
from fedemu.coordinator.timeline import Timeline
from fedemu.protocol.ids import DeviceId

MakePlan = Callable[..., CoordinatorPlan]
MakeFleet = Callable[..., Any]
Play = Callable[[CoordinatorPlan], Awaitable[tuple[Summary, Run]]]


def reply(device: int, seconds: float | None) -> Contribution:
    index = DeviceId(device)
    metrics = {"loss": 1.0, "drift": 2.0}
    return Contribution(DeviceReply(index, 3, 2, metrics, None), Payload(index, {}, None), seconds)  # type: ignore[arg-type]


def row_of(tally: Tally, **known: Any) -> Row:
    """The row of a round that began after 1 s and ends after 5.5 s, in which 30 bytes were sent and 7 received."""
    context = Context(round=3, task=1, seed=0, classes=2)
    clock = iter([0.0, *[4.5] * 9])
    tally.end(Timeline("virtual", 60.0, 1.0, lambda: next(clock)), (130, 27))
    return tally.row(context, **known)


def test_a_devices_replies_add_up_and_the_mean_is_over_devices_that_told() -> None:
    tally = Tally(began=1.0, wire=(100, 20), server_seconds=0.25, waited=3.0)
    for contribution in (reply(4, 1.0), reply(7, 0.5), reply(4, 2.0), reply(9, None)):
        tally.count(contribution)
    row = row_of(tally)
    assert (row.round_seconds, row.server_seconds, row.coordinator_seconds) == (4.5, 0.25, 1.5)
    assert row.device_seconds == (3.0 + 0.5) / 2
    assert list(row.device_metrics.items()) == [("drift", 2.0), ("loss", 1.0)], "in the order of their names"
    assert (row.virtual_time, row.wall_time) == (60.0, 5.5)
    assert (row.wire_bytes_down, row.wire_bytes_up) == (30, 7)


def test_a_round_in_which_nobody_told_has_no_time_of_devices() -> None:
    tally = Tally()
    tally.count(reply(4, None))
    assert row_of(tally).device_seconds is None


def test_a_round_that_was_not_evaluated_has_no_measures() -> None:
    row = row_of(Tally(), before=(0.5, 0.5), diagnosis={"local_forgetting": 0.25})
    assert (row.accuracy, row.class_accuracy, row.period_loss, row.round_forgetting) == (None, None, None, None)
    assert (row.local_forgetting, row.aggregation_forgetting, row.remarks) == (0.25, None, {})


def test_each_number_of_a_round_stands_in_its_own_column() -> None:
    outcomes = Counter(accepted=5, cancelled=40, late=30, dropped=20, failed=10, rejected=6)
    tally = Tally(joined=9, online=8, crashed=7, attempts=4, outcomes=outcomes, bytes_down=2, bytes_up=1)
    diagnosis: dict[str, Any] = {"local_forgetting": 0.1, "aggregation_forgetting": 0.2}
    diagnosis |= {"local_alignment": {"a": 0.3}, "global_alignment": {"a": 0.4}}
    found = Evaluation(0.5, 2.0, (0.25, 1.0))
    row = row_of(tally, evaluation=found, untrained=[0.6, 0.7], diagnosis=diagnosis, remarks={"b": 0.8})
    assert (row.round, row.task, row.joined, row.online, row.crashed, row.attempts) == (3, 1, 9, 8, 7, 4)
    assert (row.bytes_down, row.bytes_up) == (2, 1)
    assert {name: getattr(row, name) for name in outcomes} == dict(outcomes)
    assert row.selected == 111
    assert (row.accuracy, row.loss, row.class_accuracy) == (0.5, 2.0, (0.25, 1.0))
    assert (row.untrained_period_accuracy, row.remarks) == ((0.6, 0.7), {"b": 0.8})
    assert {name: getattr(row, name) for name in diagnosis} == diagnosis


def test_an_evaluation_is_compared_with_the_one_before() -> None:
    found = Evaluation(0.5, 2.0, (0.25, 1.0), (2.0, 2.0))
    assert row_of(Tally(), evaluation=found).round_forgetting is None
    row = row_of(Tally(), evaluation=found, before=(0.75, 0.875))
    assert row.round_forgetting == 0.25, "the second class gains less than the first one loses"
    assert row.consistency == pytest.approx((0.75 * 0.25 + 0.875) / (0.75**2 + 0.875**2) ** 0.5 / (0.25**2 + 1) ** 0.5)


def test_an_evaluation_on_a_part_of_the_samples_is_compared_with_none() -> None:
    row = row_of(Tally(), evaluation=Evaluation(0.5, 2.0, test_samples=4), before=(0.75, 0.5))
    assert (row.test_samples, row.accuracy, row.class_accuracy, row.round_forgetting) == (4, 0.5, None, None)


async def test_every_ask_of_a_round_counts(make_plan: MakePlan, make_fleet: MakeFleet, play: Play) -> None:
    make_fleet(2)
    plan = make_plan(devices=2, per_round=2, over_selection=1.0, rounds=2, asks=3)
    _, left = await play(plan)
    assert [row.device_seconds for row in left.rows] == [3 * (0.5 + 1.0) / 2] * 2


async def test_the_model_does_not_depend_on_what_devices_say_of_their_time(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    fleet = make_fleet()
    told, _ = await play(make_plan("told"))
    await fleet.close()
    make_fleet(seconds=None)
    untold, left = await play(make_plan("untold"))
    assert untold.model_digest == told.model_digest
    assert [row.device_seconds for row in left.rows] == [None] * 4
