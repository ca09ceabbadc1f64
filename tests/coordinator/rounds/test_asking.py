"""Which devices are asked, what they get, and how their replies count, in whole runs with a scripted fleet."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.interface import Ask, Reply, total
from fedemu.coordinator.asks.ask import Terms
from fedemu.coordinator.asks.exchange import Exchange
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.json_lines import read_lines
from fedemu.coordinator.record.run import Run
from fedemu.coordinator.record.summary import Summary
from fedemu.coordinator.rounds import asking
from fedemu.coordinator.serve import serve
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import DOWN, Limits
from fedemu.protocol.errors import ConfigurationError, QuorumError
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import Presence
from fedemu.protocol.sharing import edge_messages as edge
from fedemu.protocol.transport.memory import MemoryNetwork

Until = Callable[[Callable[[], object]], Awaitable[None]]

MakePlan = Callable[..., CoordinatorPlan]
MakeFleet = Callable[..., Any]
Play = Callable[[CoordinatorPlan], Awaitable[tuple[Summary, Run]]]
MEASURED = {"measured": frozenset({"model"})}


async def test_the_fold_is_the_weighted_mean_of_the_first_to_finish(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet(4, script=lambda index, work: {"after": 40.0 - index})
    plan = make_plan(devices=4, rounds=1, evaluate_every=5)
    _, left = await play(plan)
    # Devices 3, 2 and 1 finish first, with 1, 3 and 2 examples, and add 4/8, 3/8 and 2/8.
    assert left.rows[0].loss == pytest.approx((1 * 4 + 3 * 3 + 2 * 2) / 8 / 6)
    assert left.rows[0].virtual_time == 39.0
    assert left.rows[0].device_metrics == {"loss": 2.0}
    assert left.rows[0].device_seconds == (2.0 + 1.5 + 1.0) / 3


async def test_the_rules_of_an_ask_are_those_of_the_settings(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Terms] = []

    def kept(**rules: Any) -> Terms:
        seen.append(Terms(**rules))
        return seen[-1]

    monkeypatch.setattr(asking, "Terms", kept)
    times: dict[str, Any] = {"deadline": 90.0, "give_up": 30.0, "answer_timeout": 70.0, "heartbeat_seconds": 0.5}
    for name, silence, give_up in (("short", 20.0, 30.0), ("long", 40.0, 40.0)):
        make_fleet(3)
        await play(make_plan(name, devices=3, per_round=2, rounds=2, planned_silence=silence, **times))
        first, second = seen
        assert (str(first.ask), str(second.ask), first.wanted, first.optional) == ("1.0.0", "2.0.0", 2, False)
        assert (first.start, second.start) == (0.0, 11.0), "the second of three devices finishes after 11 s"
        assert {(each.deadline, each.give_up, each.answer_timeout, each.resend) for each in seen} == {
            (90.0, give_up, 70.0, 0.5)
        }
        seen.clear()


async def test_every_outcome_is_counted_where_it_belongs(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    acts = {
        0: {"after": 10.0, "reply": "nan"},
        1: {"after": 11.0, "reply": "failed"},
        2: {"after": 12.0},
        3: {"after": 5.0, "event": "drop", "cause": "offline", "back": 1000.0},
        4: {"after": 13.0},
        5: {"after": 14.0, "reply": "misshapen"},
        6: {"after": 15.0},
        7: {"after": 16.0},
        8: {"after": 700.0},
        9: {"reply": "declined"},
    }
    fleet = make_fleet(10, script=lambda index, work: acts[index])
    plan = make_plan(devices=10, per_round=3, over_selection=4.0, rounds=1)
    summary, left = await play(plan)
    row = left.rows[0]
    assert row.outcomes == {
        "accepted": 3, "dropped": 1, "late": 0, "cancelled": 2, "failed": 2, "rejected": 2,
    }  # fmt: skip
    assert row.virtual_time == 15.0
    assert not summary.perturbed
    assert row.crashed == 0, "the dropout was none of its process"
    first = {index: device.answers[0] for index, device in fleet.devices.items() if device.answers}
    assert [first[index].type for index in (0, 2, 7, 8)] == ["invalid", "accepted", "cancel", "cancel"]
    assert [first[index].reason for index in (0, 5)] == ["nonfinite", "shape"]
    assert {(event["reason"], event["count"]) for event in left.named("refusal")} == {("nonfinite", 1), ("shape", 1)}
    assert not {7, 8} & {index for index, _ in fleet.trained}
    [dropout] = left.named("dropout")
    assert (dropout["device"], dropout["ask"], dropout["cause"], dropout["back"]) == (3, "1.0.0", "offline", 1000.0)
    assert read_lines(plan.directory / "asks.jsonl") == [
        {
            "ask": "1.0.0", "round": 1, "attempt": 0, "program": "train", "start": 0.0, "end": 15.0, "wanted": 3,
            "devices": [*range(10)], "outcomes": "rfadaraccf",
            "times": [10.0, 11.0, 12.0, 5.0, 13.0, 14.0, 15.0, 16.0, 700.0, None],
        }
    ]  # fmt: skip


async def test_work_tells_that_earlier_asks_are_over_so_their_outcomes_are_not_sent(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    fleet = make_fleet(2)
    _, left = await play(make_plan(devices=2, per_round=1, over_selection=2.0, rounds=3, verdict_delay=60.0))
    assert [row.outcomes["accepted"] for row in left.rows] == [1, 1, 1]
    # A result that a device sends again is still answered at once.
    assert {answer.type for device in fleet.devices.values() for answer in device.answers} <= {"duplicate"}


async def test_an_outcome_that_waits_is_told_before_long(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    def script(index: int, work: wire.Work) -> Any:
        # The second round does not end before the other device was told how its first round ended.
        untold = work.ask == "2.0.0" and not fleet.devices[1].answers
        return {"after": 10.0 + index, "reply": "silent" if untold else "good"}

    def presence(index: int, until: float) -> Presence:
        return Presence(until=math.inf, intervals=((0.0, 5.0 if index else math.inf),))

    fleet = make_fleet(2, script=script, presence=presence)
    await play(make_plan(devices=2, per_round=1, over_selection=2.0, rounds=2, verdict_delay=0.05))
    assert [answer.type for answer in fleet.devices[1].answers] == ["cancel"]


async def test_a_dropped_device_is_not_asked_before_it_is_back(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    asked: dict[int, list[float]] = {}

    def script(index: int, work: wire.Work) -> Any:
        if work.start not in asked.setdefault(index, []):
            asked[index].append(work.start)
        return (
            {"after": 5.0, "event": "drop", "cause": "crash", "back": 35.0}
            if index == 0 and work.start == 0
            else {"after": 10.0}
        )

    make_fleet(3, script=script)
    _, left = await play(make_plan(devices=3, per_round=2, over_selection=2.0, rounds=5))
    assert asked == {0: [0.0, 40.0], 1: [0.0, 10.0, 20.0, 30.0, 40.0], 2: [0.0, 10.0, 20.0, 30.0, 40.0]}
    assert len(left.named("death")) == 1
    assert [(row.joined, row.dropped, row.crashed) for row in left.rows] == [(3, 1, 1), *[(3, 0, 0)] * 4]
    assert [row.online for row in left.rows] == [3, 2, 2, 2, 3], "who is away after a dropout is not on-line"


async def test_with_nobody_on_line_the_clock_jumps_and_presence_is_asked_for_ever_further(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    day = 86_400.0
    asked: list[float] = []

    def presence(index: int, until: float) -> Presence:
        asked.append(until)
        known = [(start, end) for start, end in ((5 * day, 5 * day + 24), (20 * day, 21 * day)) if start < until]
        if index == 3:  # it tells more than it is asked for, and the clock does not jump over what others have not told
            known = [(30 * day, 31 * day)]
        return Presence(until=until, intervals=tuple(known))

    make_fleet(4, presence=presence)
    _, left = await play(make_plan(devices=4, per_round=3, over_selection=1.0, rounds=3, quorum=1.0))
    assert [row.virtual_time for row in left.rows] == [5 * day + 12, 5 * day + 24, 20 * day + 12]
    assert set(asked) == {day * 2**power for power in range(6)}


async def test_a_device_that_cannot_announce_all_times_at_once_announces_more_when_these_are_over(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    def presence(index: int, until: float) -> Presence:
        first = (fleet.since + 10.0) // 20.0 * 20.0  # on-line for 10 s of every 20 s; two spells fit into a message
        return Presence(until=first + 30.0, intervals=((first, first + 10.0), (first + 20.0, first + 30.0)))

    fleet = make_fleet(3, script=lambda index, work: {"after": 8.0}, presence=presence)
    _, left = await play(make_plan(devices=3, per_round=3, over_selection=1.0, rounds=9, quorum=1.0))
    assert [row.virtual_time for row in left.rows] == [8.0, 16.0, 28.0, 36.0, 48.0, 56.0, 68.0, 76.0, 88.0]
    assert {row.online for row in left.rows} == {3}


async def test_devices_announce_further_times_also_after_ten_years(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    year = 365 * 86_400.0
    make_fleet(
        2,
        script=lambda index, work: {"after": 4 * year},
        presence=lambda index, until: Presence(until=until, intervals=((0.0, until),)),
    )
    _, left = await play(make_plan(devices=2, per_round=2, over_selection=1.0, rounds=4, deadline=5 * year))
    assert [row.virtual_time for row in left.rows] == [4 * year, 8 * year, 12 * year, 16 * year]


async def test_every_ask_of_a_script_is_an_exchange_of_its_own_and_nothing_keeps_it_when_it_is_over(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges: list[weakref.ref[Exchange]] = []

    def kept(*parts: Any) -> Exchange:
        exchange = Exchange(*parts)
        exchanges.append(weakref.ref(exchange))
        return exchange

    def script(index: int, work: wire.Work) -> Any:
        asks.add(work.ask)
        held.append([exchange() for exchange in exchanges[:-1]])
        return {"after": 10.0}

    asks: set[str] = set()
    held: list[list[Exchange | None]] = []
    make_fleet(script=script)
    monkeypatch.setattr(asking, "Exchange", kept)
    gc.disable()
    try:
        _, left = await play(make_plan(rounds=2, asks=2))
    finally:
        gc.enable()
    assert asks == {"1.0.0", "1.0.1", "2.0.0", "2.0.1"}
    assert held[-1] == [None] * 3
    assert [(row.selected, row.attempts, row.virtual_time) for row in left.rows] == [
        (8, 1, 20.0),
        (8, 1, 40.0),
    ]


async def test_edges_hear_how_the_replies_to_an_ask_are_added_up(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, network: MemoryNetwork
) -> None:
    heard: list[Any] = []
    station = network.connect("here", edge.down_decoder(Limits()), lambda got: heard.append(got.message), print)

    def script(index: int, work: wire.Work) -> Any:
        station.send(edge.Station())
        return {"after": 10.0}

    make_fleet(2, script=script)
    await play(make_plan(devices=2, per_round=2, over_selection=1.0, rounds=1, payload_bytes=1000))
    (gather,) = (message for message in heard if isinstance(message, edge.Gather))
    assert (gather.ask, gather.reducers) == ("1.0.0", (("model", "weighted_mean", "model"),))
    assert [leaf.name for leaf in gather.leaves] == ["model/w", "model/b"]
    assert gather.most_bytes == 1000, "the coordinator reads no longer sum"


async def test_a_device_gets_its_own_part_and_pays_for_it(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    downloads: dict[tuple[int, str], int] = {}

    def script(index: int, work: wire.Work) -> Any:
        downloads[index, work.ask] = work.download_bytes - work.shared[0].size
        return {"after": 10.0}

    fleet = make_fleet(2, script=script)
    plan = make_plan(devices=2, per_round=2, rounds=1, asks=2)
    await play(plan)
    assert downloads == {(0, "1.0.0"): 0, (1, "1.0.0"): 0, (0, "1.0.1"): 8, (1, "1.0.1"): 8}
    assert fleet.devices[1].parts["1.0.1"]["own"].tolist() == [1.0, 1.0]


async def test_a_part_of_its_own_that_no_device_would_read_ends_the_run_with_a_sentence(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DOWN, "limits", Limits(message_bytes=4000))

    def round(state: Any, context: Any) -> Generator[Ask, Any, Any]:
        each = {DeviceId(1): {"own": torch.zeros(context.round, 1000)}}  # 4,000 bytes, and then 8,000
        yield Ask("train", {"model": state.model}, {"model": total}, each=each)
        return state

    make_fleet(2)
    plan = make_plan(devices=2, per_round=2, rounds=2, give_up=0.5, attempts=1)
    plan.algorithm.round = round
    sentence = "The algorithm gives device 1 8000 bytes of its own for 'train', and a device reads at most 4000"
    with pytest.raises(ConfigurationError, match=sentence):
        await play(plan)


UNREADABLE = "no device could read its work for the program 'train' "


@pytest.mark.parametrize(
    ("shared", "each", "told"),
    [
        ({f"tree {i}": {"w": torch.zeros(1)} for i in range(64)}, None, f"{UNREADABLE}.*'shared': Expected"),
        ({"n" * 257: {"w": torch.zeros(1)}}, None, f"{UNREADABLE}.*'shared.*key': Expected"),
        ({}, {DeviceId(1): {"n" * 257: torch.zeros(1)}}, f"{UNREADABLE}.*'tensors.*name': Expected"),
        (
            {"mu": {"value": 0.5}},
            None,
            r"shared\['mu'\]\['value'\] of this Ask is a float; it must be a tensor, as torch",
        ),
        ({"mu": {"value": np.zeros(2)}}, None, r"shared\['mu'\]\['value'\] of this Ask is a ndarray; it must be a ten"),
        (
            {"mean": {7: torch.zeros(2)}},
            None,
            r"shared\['mean'\]\[7\] of this Ask is named by an int; a name must be te",
        ),
        ({}, {0: {"w": 1}}, r"each\[0\]\['w'\] of this Ask is an int; it must be a tensor"),
        ({"mu": {"value": torch.eye(2).to_sparse()}}, None, "a tensor that is sparse or has no values; it must be"),
        ({"mu": {"value": torch.zeros(2, device="meta")}}, None, "a tensor that is sparse or has no values; it must"),
        (
            {"mu": {"value": torch.zeros(2) * 1j}},
            None,
            "a tensor of complex64, which cannot travel; use one of float64",
        ),
    ],
)
async def test_an_ask_that_no_device_could_read_ends_the_run_with_a_sentence(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, shared: Any, each: Any, told: str
) -> None:
    def round(state: Any, context: Any) -> Generator[Ask, Any, Any]:
        yield Ask("train", {"model": state.model, **shared}, {"model": total}, each=each)
        return state

    make_fleet(2)
    plan = make_plan(devices=2, per_round=2, rounds=1, give_up=0.5, attempts=1)
    plan.algorithm.round = round
    with pytest.raises(ConfigurationError, match=told):
        await play(plan)


@pytest.mark.parametrize(("cohort", "asked", "accepted"), [("online", [0, 1, 3, 4], 3), ([4, 2, 1, 4], [1, 4], 1)])
async def test_other_cohorts_take_everyone_who_is_on_line_and_replies(
    make_plan: MakePlan, make_fleet: MakeFleet, cohort: Any, asked: list[int], accepted: int, play: Play, until: Until
) -> None:
    def presence(index: int, until: float) -> Presence:
        return Presence(until=until, intervals=((100.0 if index == 2 else 0.0, float("inf")),))

    seen: set[int] = set()
    make_fleet(
        5,
        script=lambda i, work: seen.add(i) or {"after": 10.0 + i, "reply": "nan" if i == 4 else "good"},
        presence=presence,
    )
    plan = make_plan(devices=5, per_round=2, rounds=1, cohort=cohort)
    _, left = await play(plan)
    assert sorted(seen) == asked
    assert (left.rows[0].accepted, left.rows[0].rejected) == (accepted, 1)
    assert left.rows[0].virtual_time == 600.0


async def test_devices_may_be_named_by_numbers_of_numpy(make_plan: MakePlan, make_fleet: MakeFleet, play: Play) -> None:
    make_fleet(script=lambda index, work: {"after": 700.0 if index == 2 else 10.0})
    summary, left = await play(make_plan(rounds=1, cohort=np.array([1, 2, 3])))
    assert (summary.outcome, left.rows[0].accepted, left.rows[0].late) == ("completed", 2, 1)


@pytest.mark.parametrize("clock", ["virtual", "wall"])
async def test_an_optional_ask_of_nobody_has_no_replies_and_is_over_at_once(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, clock: str
) -> None:
    def round(state: Any, context: Any) -> Generator[Ask, Any, Any]:
        reply = yield Ask("train", {"model": state.model}, {"model": total}, cohort=(), optional=True)
        assert reply == Reply({}, ())
        return state

    make_fleet()
    plan = make_plan(rounds=1, clock=clock)
    plan.algorithm.round = round
    summary, left = await play(plan)
    assert (summary.outcome, left.rows[0].selected) == ("completed", 0)


def _gone(index: int, until: float) -> Presence:
    """Device 1 is on-line for five seconds and never again, the others always are."""
    return Presence(until=math.inf, intervals=((0.0, 5.0 if index == 1 else math.inf),))


async def test_an_optional_ask_of_devices_that_have_gone_for_good_has_no_replies(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    replies = []

    def round(state: Any, context: Any) -> Generator[Ask, Any, Any]:
        reply = yield Ask("train", {"model": state.model}, {"model": total}, cohort=[0])
        reply = yield Ask("train", {"model": state.model}, {"model": total}, cohort=[1], optional=True)
        replies.append(reply)
        return state

    make_fleet(2, presence=_gone)
    plan = make_plan(devices=2, rounds=1)
    plan.algorithm.round = round
    summary, left = await play(plan)
    assert (summary.outcome, left.rows[0].selected, replies) == ("completed", 1, [Reply({}, ())])
    assert (left.rows[0].virtual_time, left.rows[0].online) == (10.0, 2), "both were on-line when the round began"


async def test_a_run_ends_if_the_devices_that_an_ask_names_have_gone_for_good(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet(2, script=lambda index, work: {"after": 10.0}, presence=_gone)
    plan = make_plan(devices=2, rounds=2, asks=2, cohort=[1])
    with pytest.raises(QuorumError, match="None of the devices that the algorithm names is on-line, and none has"):
        await play(plan)


@pytest.mark.parametrize("cohort", [(), [0, 3]])
async def test_a_cohort_that_names_nobody_or_a_device_that_is_not_of_the_fleet_ends_the_run(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, cohort: Any
) -> None:
    make_fleet(3)
    with pytest.raises(ConfigurationError, match=r"'cohort' of this Ask names (no device;|device 3; the devices of)"):
        await play(make_plan(devices=3, rounds=1, cohort=cohort))


async def test_downloads_are_charged_by_what_a_device_has_seen(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    sizes: dict[str, set[int]] = {}

    def script(index: int, work: wire.Work) -> Any:
        sizes.setdefault(work.ask, set()).add(work.download_bytes)
        size = work.shared[0].size
        assert work.upload_bytes == 16
        assert work.download_bytes == (0 if work.ask == "2.1.0" else size)
        return {"after": 900.0 if work.ask == "2.0.0" else 10.0}

    make_fleet(2, script=script)
    _, left = await play(make_plan(devices=2, per_round=2, rounds=2, attempts=2))
    assert list(sizes) == ["1.0.0", "2.0.0", "2.1.0"]
    size = max(sizes["1.0.0"])
    assert [(row.bytes_down, row.bytes_up) for row in left.rows] == [(2 * size, 32), (2 * size, 32)]


async def test_what_only_measures_costs_no_emulated_traffic(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    costs: list[tuple[int, int]] = []
    make_fleet(2, script=lambda index, work: costs.append((work.download_bytes, work.upload_bytes)) or {"after": 10.0})
    plan = make_plan(devices=2, per_round=2, rounds=1)
    plan.algorithm.programs = {"train": type("Measured", (type(plan.algorithm.programs["train"]),), MEASURED)()}
    _, left = await play(plan)
    assert set(costs) == {(0, 0)}
    assert [(row.accepted, row.bytes_down, row.bytes_up) for row in left.rows] == [(2, 0, 0)]


async def test_presence_that_is_not_announced_in_time_perturbs_and_loses_the_device(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    day = 86_400.0

    def presence(index: int, until: float) -> Presence:
        if index == 0 and until > day:  # asked to look farther ahead, it is gone before it answers
            fleet.devices[0].vanish()
        return Presence(until=until, intervals=((0.0, 5.0), (1.5 * day, 9 * day)))

    fleet = make_fleet(3, script=lambda index, work: {"after": 5.0 + index}, presence=presence)
    summary, left = await play(make_plan(devices=3, per_round=2, over_selection=2.0, rounds=2, give_up=3.0))
    assert [row.selected for row in left.rows] == [3, 2]
    assert summary.perturbed
    assert [event["device"] for event in left.named("given_up")] == [0]


async def test_a_device_that_never_comes_back_has_failed_and_the_run_is_perturbed(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    fleet = make_fleet(script=lambda index, work: {"after": 10.0 + index, "reply": "silent" if index == 0 else "good"})
    plan = make_plan(devices=6, per_round=6, over_selection=1.0, rounds=3, give_up=2.5, answer_timeout=2.5)
    summary, left = await play(plan)
    assert [(row.selected, row.accepted, row.failed) for row in left.rows] == [(6, 5, 1), (5, 5, 0), (5, 5, 0)]
    assert left.rows[0].virtual_time == 600.0
    assert summary.perturbed
    assert fleet.devices[0].verdicts == {}
    (given_up,) = left.named("given_up")
    assert [given_up[key] for key in ("device", "ask", "lacked", "among")] == [0, "1.0.0", "sent no result", 1]
    assert 2.5 <= given_up["waited"] < 60.0
    assert given_up["limit"] in {"fleet.give_up", "fleet.answer_timeout", "four times the longest wait before"}


async def test_a_device_that_was_given_up_is_asked_again_once_it_answers(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    def script(index: int, work: wire.Work) -> dict[str, Any]:
        if (index, work.ask) == (1, "2.0.0"):
            fleet.devices[0].dealer.send(wire.Failed(ask="1.0.0", reason="training", detail="it took too long"))
        return {"after": 10.0 + index, "reply": "silent" if (index, work.ask) == (0, "1.0.0") else "good"}

    fleet = make_fleet(script=script)
    plan = make_plan(devices=6, per_round=6, over_selection=1.0, rounds=3, give_up=2.5, answer_timeout=2.5)
    _, left = await play(plan)
    assert [(row.selected, row.accepted) for row in left.rows] == [(6, 5), (5, 5), (6, 6)]


async def test_a_device_that_lost_its_own_state_fails_once_and_begins_anew(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    given: dict[str, str | None] = {}

    def script(index: int, work: wire.Work) -> dict[str, Any]:
        if index == 0:
            given[work.ask] = work.state
        return {"after": 10.0, "reply": "own_state" if (index, work.ask) == (0, "2.0.0") else "good"}

    make_fleet(2, script=script)
    summary, left = await play(make_plan(devices=2, per_round=2, over_selection=1.0, rounds=4, replay=True))
    assert given == {"1.0.0": None, "2.0.0": "1.0.0", "3.0.0": None, "4.0.0": "3.0.0"}
    assert [row.failed for row in left.rows] == [0, 1, 0, 0]
    assert summary.perturbed


async def test_own_states_that_cost_a_try_its_quorum_are_not_asked_for_again_and_the_try_does_not_count(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    given: dict[str, set[str | None]] = {}

    def script(index: int, work: wire.Work) -> dict[str, Any]:
        given.setdefault(work.ask, set()).add(work.state)
        return {"after": 10.0, "reply": "own_state" if work.state == "1.0.0" else "good"}

    make_fleet(2, script=script)
    _, left = await play(make_plan(devices=2, per_round=2, over_selection=1.0, rounds=3, replay=True, attempts=1))
    assert given == {"1.0.0": {None}, "2.0.0": {"1.0.0"}, "2.1.0": {None}, "3.0.0": {"2.1.0"}}
    assert [row.accepted for row in left.rows] == [2, 2, 2]
    assert [row.attempts for row in left.rows] == [1, 2, 1]


async def test_devices_that_say_again_and_again_that_their_states_are_lost_do_not_hold_a_round_up_for_ever(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    asked: dict[str, None] = {}

    def script(index: int, work: wire.Work) -> dict[str, Any]:
        asked[work.ask] = None
        return {"after": 10.0, "reply": "good" if work.ask == "1.0.0" else "own_state"}

    make_fleet(2, script=script)
    plan = make_plan(devices=2, per_round=2, over_selection=1.0, rounds=3, replay=True, attempts=2)
    with pytest.raises(QuorumError, match=r"^Round 2 got 0 of the \d replies that it needs in the last of its 3 tries"):
        await play(plan)
    assert [*asked] == ["1.0.0", "2.0.0", "2.1.0", "2.2.0"]


async def test_a_program_whose_own_state_is_empty_keeps_none(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: dict[str, set[str | None]] = {}
    make_fleet(3, script=lambda index, work: states.setdefault(work.ask, set()).add(work.state) or {"after": 10.0})
    plan = make_plan(devices=3, per_round=3, rounds=2)
    monkeypatch.setattr(type(plan.algorithm.programs["train"]), "initial_own", lambda program, shared: {})
    await play(plan)
    assert states == {"1.0.0": {None}, "2.0.0": {None}}


async def test_devices_of_another_machine_begin_with_new_own_states(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    given: dict[str, str | None] = {}

    def script(index: int, work: wire.Work) -> dict[str, Any]:
        if index == 0:
            given[work.ask] = work.state
        return {"after": 10.0}

    plan: dict[str, Any] = {"devices": 2, "per_round": 2, "over_selection": 1.0, "replay": True, "give_up": 2.5}
    make_fleet(2, script=script)
    await play(make_plan(rounds=2, **plan))
    network = MemoryNetwork()
    make_fleet(2, script=script, network=network)  # it has no lease of an earlier life
    summary, left = await play(make_plan(rounds=4, network=network, **plan))
    assert given == {"1.0.0": None, "2.0.0": "1.0.0", "3.0.0": None, "4.0.0": "3.0.0"}
    assert [event["devices"] for event in left.named("own_states_lost")] == [2]
    assert (summary.perturbed, [row.failed for row in left.rows]) == (True, [0, 0, 0, 0])


async def test_they_do_so_also_if_the_coordinator_is_killed_before_its_next_checkpoint(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    given: dict[str, str | None] = {}

    def script(index: int, work: wire.Work) -> dict[str, Any]:
        given[work.ask] = work.state
        return {"after": 10.0, "reply": "silent" if killed is None and work.ask == "3.0.0" else "good"}

    plan: dict[str, Any] = {"devices": 2, "per_round": 2, "over_selection": 1.0, "replay": True, "give_up": 2.5}
    killed: bool | None = False
    make_fleet(2, script=script)
    await play(make_plan(rounds=2, **plan))
    killed, network = None, MemoryNetwork()
    fleet = make_fleet(2, script=script, network=network)
    second = asyncio.create_task(serve(make_plan(rounds=4, network=network, **plan)))
    await until(lambda: "3.0.0" in given)
    second.cancel()
    await asyncio.wait({second})
    assert given.pop("3.0.0") is None
    killed, network = True, MemoryNetwork()
    make_fleet(2, script=script, network=network, lease=fleet.granted.lease)
    summary, left = await play(make_plan(rounds=4, network=network, **plan))
    assert given == {"1.0.0": None, "2.0.0": "1.0.0", "3.0.0": None, "4.0.0": "3.0.0"}
    assert [event["devices"] for event in left.named("own_states_lost")] == [2]
    assert summary.perturbed


async def test_under_the_wall_clock_the_first_results_to_arrive_count(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    fleet = make_fleet(4, wall=True, script=lambda index, work: {"reply": "silent" if index == 3 else "good"})
    plan = make_plan(clock="wall", devices=4, per_round=4, over_selection=1.0, rounds=1, deadline=2.5)
    summary, left = await play(plan)
    assert summary.outcome == "completed"
    assert [(row.accepted, row.late) for row in left.rows] == [(3, 1)]
    assert left.rows[0].virtual_time >= 2.5
    assert fleet.devices[3].answers == [wire.Late(ask="1.0.0")]


async def test_under_the_wall_clock_it_is_told_why_devices_dropped_out_and_whose_process_crashed(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, until: Until
) -> None:
    crashing = {"event": "drop", "cause": "crash"}
    acts = {0: {"reply": "good"}, 1: crashing}
    fleet = make_fleet(5, wall=True, script=lambda index, work: acts.get(index, {"reply": "silent"}))
    plan = make_plan(clock="wall", devices=5, per_round=5, over_selection=1.0, rounds=1, quorum=0.2)
    running = asyncio.create_task(play(plan))
    await until(lambda: len(fleet.devices) == 5 and all(fleet.devices[device].works for device in (2, 3, 4)))
    for device, reason in ((2, "leave"), (3, "offline"), (4, "")):
        fleet.devices[device].dealer.send(wire.Bye(reason=reason))
    _, left = await running
    causes = {event["device"]: event["cause"] for event in left.named("dropout")}
    assert causes == {1: "crash", 2: "leave", 3: "offline", 4: None}
    assert [(row.accepted, row.dropped, row.crashed) for row in left.rows] == [(1, 4, 1)]
