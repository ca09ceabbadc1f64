"""An ask under the virtual clock: exact tables of outcomes, then invariants under any order of events."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedemu.coordinator.asks.ask import LIVES, Action, Give, Tell, Terms
from fedemu.coordinator.asks.virtual import VirtualAsk
from fedemu.protocol.ids import AskId, DeviceId
from fedemu.protocol.messages import Accepted, Cancel, Invalid, Late, Proceed, Scheduled

ASK = AskId(3, 0, 0)
BAD = "bad"
FAIL = "fail"


def terms(count: int, wanted: int, deadline: float = 100.0, **more: Any) -> Terms:
    return Terms(ASK, tuple(DeviceId(i) for i in range(count)), wanted, start=1000.0, deadline=deadline, **more)


def finish(at: float) -> Scheduled:
    return Scheduled(ask=str(ASK), event="finish", at=1000.0 + at)


def drop(at: float, back: float | None = None) -> Scheduled:
    return Scheduled(
        ask=str(ASK), event="drop", at=1000.0 + at, cause="offline", back=None if back is None else 1000.0 + back
    )


def opened(schedules: list[Scheduled | None], wanted: int, now: float = 0.0, **more: Any) -> VirtualAsk:
    """An ask whose devices are all connected and have told their schedules. A device with None declines."""
    machine = VirtualAsk(terms(len(schedules), wanted, **more), map(DeviceId, range(len(schedules))))
    machine.open(now)
    for index, schedule in enumerate(schedules):
        if schedule is None:
            machine.failed(DeviceId(index), now)
        else:
            machine.scheduled(DeviceId(index), schedule, now)
    return machine


def play(machine: VirtualAsk, bad: frozenset[int] = frozenset(), failing: frozenset[int] = frozenset()) -> VirtualAsk:
    """Let every device that may proceed answer, in index order, until the ask is closed."""
    while machine.end is None:
        device = next(device for device in machine.terms.cohort if machine.expects(device))
        if device in bad:
            machine.rejected(device, "norm", "", 0.0)
        elif device in failing:
            machine.failed(device, 0.0)
        else:
            machine.result(device, 0.0)
    machine.check()
    return machine


def table(machine: VirtualAsk) -> str:
    """The outcomes as one letter per device, in index order."""
    return "".join(machine.verdicts[device][0] for device in machine.terms.cohort)


def told(actions: list[Action]) -> dict[int, str]:
    return {action.device: action.message.type for action in actions if isinstance(action, Tell)}


@pytest.mark.parametrize(
    ("schedules", "wanted", "letters", "end"),
    [
        ([finish(30), finish(10), finish(20)], 2, "caa", 20.0),
        ([finish(10), finish(10), finish(10)], 2, "aac", 10.0),
        ([finish(0), finish(1)], 1, "ac", 0.0),
        ([finish(10), finish(101), finish(99.5)], 2, "aca", 99.5),
        ([finish(10), finish(101), finish(102)], 2, "all", 100.0),
        ([finish(100), finish(100.001)], 2, "al", 100.0),
        ([finish(10), drop(5), finish(20)], 2, "ada", 20.0),
        ([finish(10), drop(20), drop(20.5)], 1, "acc", 10.0),
        ([finish(10), finish(20), drop(20), drop(20.5)], 2, "aadc", 20.0),
        ([finish(10), drop(50), drop(101)], 2, "adl", 100.0),
        ([drop(5), drop(6)], 2, "dd", 100.0),
        ([None, finish(10), finish(20)], 2, "faa", 20.0),
        ([None, None], 1, "ff", 100.0),
        ([finish(math.inf), finish(3)], 2, "la", 100.0),
    ],
)
def test_schedules_decide_the_outcomes(
    schedules: list[Scheduled | None], wanted: int, letters: str, end: float
) -> None:
    machine = play(opened(schedules, wanted))
    assert (table(machine), machine.end) == (letters, 1000.0 + end)


def test_the_next_candidate_stands_in_for_a_rejected_or_failed_one_and_the_ask_lasts_longer() -> None:
    machine = play(opened([finish(10), finish(20), finish(30), finish(40)], 2), bad=frozenset({0}))
    assert (table(machine), machine.end) == ("raac", 1030.0)
    machine = play(opened([finish(10), finish(20), finish(30), drop(35)], 2), frozenset({0}), frozenset({1}))
    assert (table(machine), machine.end) == ("rfad", 1100.0)


def test_a_schedule_before_the_start_fails_the_device() -> None:
    assert table(play(opened([finish(-1), finish(3)], 1))) == "fa"


def test_nobody_proceeds_before_all_are_scheduled() -> None:
    machine = VirtualAsk(terms(3, 2), map(DeviceId, range(3)))
    assert machine.open(0.0) == [Give(DeviceId(0)), Give(DeviceId(1)), Give(DeviceId(2))]
    assert machine.scheduled(DeviceId(0), finish(10), 0.0) == []
    assert machine.scheduled(DeviceId(1), drop(5), 0.0) == []
    assert not machine.expects(DeviceId(0))
    assert told(machine.scheduled(DeviceId(2), finish(20), 0.0)) == {0: "proceed", 2: "proceed", 1: "proceed"}


def test_the_ask_tells_for_how_long_it_waits_for_devices_without_a_connection() -> None:
    machine = VirtualAsk(terms(3, 2, give_up=60.0), map(DeviceId, range(3)))
    machine.open(0.0)
    assert machine.awaited(0.0) is None
    machine.left(DeviceId(0), 10.0)
    machine.left(DeviceId(1), 15.0)
    assert machine.awaited(40.0) == (2, 30.0, 35.0)
    machine.joined(DeviceId(1), 41.0)
    assert machine.awaited(42.0) == (1, 32.0, 28.0)


def test_the_wait_for_a_candidate_without_a_connection_begins_when_it_went_away() -> None:
    machine = opened([finish(10), finish(20), finish(30)], 1, give_up=60.0)
    for device in range(3):
        machine.left(DeviceId(device), 5.0)
    machine.tick(66.0)  # device 0 is given up, so device 1 may proceed
    assert machine.awaited(66.0) == (1, 61.0, 0.0)
    machine.tick(66.25)
    machine.tick(66.5)
    assert table(machine) == "fff"


def test_the_wait_for_a_candidate_that_has_come_back_begins_with_its_turn() -> None:
    machine = opened([finish(10), finish(20)], 1, give_up=60.0, answer_timeout=100.0)
    machine.left(DeviceId(1), 5.0)
    machine.joined(DeviceId(1), 10.0)
    machine.failed(DeviceId(0), 50.0)
    machine.tick(150.0)
    assert not machine.given_up
    machine.tick(150.5)
    assert machine.given_up == {1: ("sent no result", 100.5, "fleet.answer_timeout")}


def test_outcomes_are_told_as_soon_as_they_are_certain() -> None:
    machine = opened([finish(10), finish(20), finish(30), drop(25), drop(5)], 2)
    assert machine.verdicts == {4: "dropped"}
    assert told(machine.result(DeviceId(1), 0.0)) == {1: "accepted"}
    assert told(machine.rejected(DeviceId(0), "norm", "too long", 0.0)) == {0: "invalid", 2: "proceed", 3: "proceed"}
    assert machine.end is None
    assert machine.result(DeviceId(2), 0.0) == [Tell(DeviceId(2), Accepted(ask=str(ASK)))]
    assert (machine.end, machine.accepted) == (1030.0, (1, 2))


def test_too_few_candidates_are_told_late_while_the_others_train() -> None:
    machine = VirtualAsk(terms(3, 2), map(DeviceId, range(3)))
    machine.open(0.0)
    machine.scheduled(DeviceId(0), finish(10), 0.0)
    machine.scheduled(DeviceId(1), finish(150), 0.0)
    actions = machine.scheduled(DeviceId(2), drop(50, back=500), 0.0)
    assert actions == [
        Tell(DeviceId(0), Proceed(ask=str(ASK))),
        Tell(DeviceId(2), Proceed(ask=str(ASK))),
        Tell(DeviceId(1), Late(ask=str(ASK))),
    ]
    assert (machine.away, machine.causes) == ({2: 1500.0}, {2: "offline"})


def test_devices_after_the_last_accepted_one_are_cancelled() -> None:
    machine = opened([finish(10), finish(20)], 1)
    actions = machine.result(DeviceId(0), 0.0)
    assert actions == [Tell(DeviceId(0), Accepted(ask=str(ASK))), Tell(DeviceId(1), Cancel(ask=str(ASK)))]


def test_a_failure_before_its_turn_counts_only_when_its_turn_comes() -> None:
    machine = opened([finish(10), finish(20), finish(30)], 1)
    machine.failed(DeviceId(1), 0.0)
    machine.rejected(DeviceId(0), "nonfinite", "", 0.0)
    assert machine.expects(DeviceId(2))
    assert table(play(machine)) == "rfa"
    machine = opened([finish(10), finish(20)], 1)
    machine.failed(DeviceId(1), 0.0)
    assert table(play(machine)) == "ac"


def test_a_device_that_returns_gets_its_work_and_its_proceed_again() -> None:
    machine = VirtualAsk(terms(2, 1), [DeviceId(0)])
    assert machine.open(0.0) == [Give(DeviceId(0))]
    assert machine.joined(DeviceId(1), 1.0) == [Give(DeviceId(1))]
    machine.scheduled(DeviceId(0), finish(10), 1.0)
    machine.scheduled(DeviceId(1), finish(20), 1.0)
    assert machine.left(DeviceId(0), 2.0) == []
    assert machine.joined(DeviceId(0), 3.0) == [Give(DeviceId(0)), Tell(DeviceId(0), Proceed(ask=str(ASK)))]
    assert machine.joined(DeviceId(1), 3.0) == [Give(DeviceId(1))]
    machine.result(DeviceId(0), 4.0)
    assert machine.joined(DeviceId(0), 5.0) == []
    assert not machine.perturbed


def test_a_planned_drop_is_not_asked_again_when_the_device_is_reborn() -> None:
    machine = opened([finish(10), drop(5)], 1)
    machine.left(DeviceId(1), 1.0)
    assert machine.joined(DeviceId(1), 2.0) == []
    assert machine.verdicts == {1: "dropped"}


def test_a_drop_is_told_with_its_time_and_its_cause_and_one_without_a_cause_is_off_line() -> None:
    crash = Scheduled(ask=str(ASK), event="drop", at=1005.0, cause="crash")
    machine = opened([crash, Scheduled(ask=str(ASK), event="drop", at=1006.0), finish(10)], 1)
    assert machine.causes == {0: "crash", 1: "offline"}
    assert machine.away == {0: 1005.0, 1: 1006.0}, "they say nothing of their return"
    assert machine.times() == {0: 1005.0, 1: 1006.0, 2: 1010.0}


def test_a_device_that_stays_away_beyond_give_up_fails_and_perturbs_the_run() -> None:
    machine = opened([finish(10), finish(20)], 1, give_up=60.0)
    machine.left(DeviceId(0), 5.0)
    assert machine.tick(65.0) == []
    assert machine.tick(65.1) == [Tell(DeviceId(1), Proceed(ask=str(ASK)))]
    assert (machine.verdicts[DeviceId(0)], machine.perturbed) == ("failed", True)
    ((device, missed),) = machine.given_up.items()
    assert (device, missed.lacked, round(missed.seconds, 3)) == (0, "had no connection", 60.1)


def test_what_several_devices_that_are_given_up_at_once_change_is_told() -> None:
    machine = opened([finish(10), finish(20), finish(30), finish(40)], 2, give_up=60.0)
    for device in (0, 1):
        machine.left(DeviceId(device), 0.0)
    assert told(machine.tick(61.0)) == {2: "proceed", 3: "proceed"}


def test_the_time_for_which_the_coordinator_stood_still_does_not_count() -> None:
    machine = opened([finish(10), finish(20)], 1, give_up=60.0)
    machine.left(DeviceId(0), 5.0)
    machine.stalled(130.0)
    assert machine.tick(195.0) == []
    assert machine.awaited(195.0) == (1, 60.0, 0.0)
    assert machine.tick(195.1) == [Tell(DeviceId(1), Proceed(ask=str(ASK)))]
    machine = VirtualAsk(terms(1, 1, give_up=60.0, resend=60.0), [DeviceId(0)])
    machine.open(0.0)
    machine.stalled(130.0)
    assert machine.tick(189.9) == []
    assert machine.tick(190.0) == [Give(DeviceId(0))]
    machine = opened([finish(10), finish(20)], 2, give_up=60.0, answer_timeout=600.0)
    machine.result(DeviceId(0), 1.0)
    machine.underway(DeviceId(1), 2.0)
    machine.stalled(130.0)
    machine.tick(191.9)
    assert not machine.given_up
    machine.tick(192.0)
    assert machine.given_up == {1: ("sent no result", 61.0, "fleet.give_up")}
    machine = opened([finish(10), finish(20)], 1, give_up=60.0)
    machine.left(DeviceId(1), 5.0)
    machine.stalled(130.0)
    machine.failed(DeviceId(0), 140.0)
    assert machine.awaited(140.0) == (1, 5.0, 55.0)


def test_a_large_cohort_that_is_given_up_at_once_costs_a_few_steps_for_each_device(calls_in: Any) -> None:
    steps = []
    for count in (50, 500):
        schedules: list[Scheduled | None] = [finish(10), drop(60)] * (count // 2)
        machine = opened(schedules, count)
        for device in machine.terms.cohort:
            machine.left(device, 0.0)
        steps.append(calls_in(partial(machine.tick, 100.0)))
        assert table(machine) == "fd" * (count // 2)
    assert steps[1] < 15 * steps[0]


def test_a_device_that_does_not_answer_its_work_within_give_up_fails() -> None:
    machine = VirtualAsk(terms(2, 1, give_up=60.0), [DeviceId(0)])
    machine.open(5.0)
    machine.tick(66.0)
    assert table(machine) == "ff"
    assert machine.perturbed
    assert machine.given_up == {
        0: ("did not answer its work", 61.0, "fleet.give_up"),
        1: ("had no connection", 61.0, "fleet.give_up"),
    }


@pytest.mark.parametrize("first", [100.0, 10.0])
def test_training_may_take_four_times_the_longest_gap_between_results(first: float) -> None:
    machine = opened([finish(10), finish(20), finish(30)], 3, now=7000.0, give_up=60.0, answer_timeout=600.0)
    machine.tick(7600.0)
    assert not machine.verdicts
    machine.result(DeviceId(0), 7000.0 + first)
    machine.result(DeviceId(1), 7110.0)
    machine.tick(7510.0)
    assert DeviceId(2) not in machine.verdicts
    machine.tick(7510.1)
    assert machine.verdicts[DeviceId(2)] == "failed"
    assert machine.given_up[DeviceId(2)].limit == "four times the longest wait before"


def test_a_result_that_is_on_its_way_may_take_the_answer_timeout_and_is_not_asked_for_meanwhile() -> None:
    machine = opened([finish(10), finish(20), finish(30)], 3, give_up=60.0, answer_timeout=600.0)
    machine.result(DeviceId(0), 1.0)
    for now in range(1, 601):
        if now % 10 == 1:  # a connection with losses stands still now and then
            machine.underway(DeviceId(1), float(now))
        asked = [action.device for action in machine.tick(float(now)) if isinstance(action, Give)]
        assert DeviceId(1) not in asked
        if now == 61:
            assert not machine.given_up
    assert machine.given_up == {2: ("sent no result", 61.0, "fleet.give_up")}
    machine.underway(DeviceId(1), 602.0)
    machine.tick(602.0)
    assert machine.given_up[DeviceId(1)] == ("sent no result", 601.0, "fleet.answer_timeout")


def test_a_result_that_stopped_on_its_way_has_give_up_left() -> None:
    machine = opened([finish(10), finish(20)], 2, give_up=60.0, answer_timeout=600.0)
    machine.result(DeviceId(0), 1.0)
    machine.underway(DeviceId(1), 100.0)
    machine.tick(159.9)
    assert not machine.given_up
    machine.tick(160.0)
    assert machine.given_up[DeviceId(1)] == ("sent no result", 159.0, "fleet.give_up")


def test_a_result_that_is_on_its_way_has_no_less_time_than_another() -> None:
    machine = opened([finish(10), finish(20)], 2, give_up=60.0, answer_timeout=100.0)
    machine.result(DeviceId(0), 50.0)
    machine.underway(DeviceId(1), 240.0)
    machine.tick(250.0)
    assert not machine.given_up
    machine.tick(250.5)
    assert machine.given_up == {1: ("sent no result", 200.5, "four times the longest wait before")}


def test_a_device_whose_result_an_edge_has_lost_is_asked_again_and_its_wait_begins_anew() -> None:
    machine = opened([finish(10), finish(20)], 2, give_up=60.0)
    for device in machine.terms.cohort:
        machine.kept(device, 5.0)
    machine.left(DeviceId(1), 30.0)
    assert machine.lost(DeviceId(0), 50.0) == [Give(DeviceId(0)), Tell(DeviceId(0), Proceed(ask=str(ASK)))]
    assert machine.lost(DeviceId(1), 50.0) == []
    assert machine.awaited(50.0) == (1, 20.0, 40.0)
    machine.tick(90.5)
    machine.tick(110.5)
    assert machine.given_up == {
        0: ("sent no result", 60.5, "fleet.give_up"),
        1: ("had no connection", 60.5, "fleet.give_up"),
    }


def test_nothing_is_awaited_of_a_device_whose_result_an_edge_keeps() -> None:
    machine = opened([finish(10), finish(20)], 2, give_up=60.0)
    machine.kept(DeviceId(0), 1.0)
    machine.left(DeviceId(0), 2.0)
    machine.underway(DeviceId(1), 10.0)
    assert machine.awaited(10.0) is None
    assert machine.joined(DeviceId(0), 20.0) == []
    assert [action.device for action in machine.tick(43.0)] == [1, 1], "its work, and that it may proceed"
    assert machine.result(DeviceId(0), 50.0) == [Tell(DeviceId(0), Accepted(ask=str(ASK)))]
    machine.tick(70.5)
    assert machine.given_up == {1: ("sent no result", 69.5, "fleet.give_up")}, "the result came at 1 s, not its sum"


def test_a_result_that_an_edge_has_lost_is_not_asked_for_if_it_came_past_the_edge() -> None:
    machine = opened([finish(10), finish(20)], 2)
    machine.kept(DeviceId(0), 1.0)
    machine.result(DeviceId(0), 2.0)
    assert machine.lost(DeviceId(0), 3.0) == []
    assert list(machine.running) == [1]
    assert play(machine).end == 1020.0


def test_the_first_result_may_take_the_answer_timeout() -> None:
    machine = opened([finish(10), finish(20)], 2, give_up=60.0, answer_timeout=600.0)
    machine.tick(600.0)
    assert not machine.given_up
    machine.tick(601.0)
    assert machine.given_up[DeviceId(0)] == ("sent no result", 601.0, "fleet.answer_timeout")


def test_a_device_that_keeps_coming_back_is_given_up() -> None:
    machine = opened([finish(10)], 1, now=5.0)
    for life in range(LIVES + 1):
        machine.tick(5.0 + life)
        assert not machine.verdicts
        machine.left(DeviceId(0), 5.0 + life)
        machine.joined(DeviceId(0), 5.0 + life)
    machine.tick(5.0 + LIVES)
    assert machine.given_up == {0: ("came back again and again without a result", LIVES, f"{LIVES} lives")}


@pytest.mark.parametrize(("scheduled", "end"), [(False, 120.0), (True, 660.0)])
def test_coming_back_again_and_again_makes_an_ask_longer_by_give_up_and_no_more(scheduled: bool, end: float) -> None:
    machine = VirtualAsk(terms(1, 1, give_up=60.0, answer_timeout=600.0), [DeviceId(0)])
    machine.open(0.0)
    if scheduled:
        machine.scheduled(DeviceId(0), finish(10), 0.0)
    for now in range(0, int(end) + 1, 50):
        machine.joined(DeviceId(0), float(now))
        machine.tick(float(now))
    machine.tick(end)
    assert not machine.verdicts
    machine.tick(end + 0.1)
    assert table(machine) == "f"


def test_a_message_without_an_answer_is_sent_again_ever_more_rarely() -> None:
    machine = VirtualAsk(terms(1, 1, resend=2.0), [DeviceId(0)])
    machine.open(0.0)
    sent = [now for now in range(40) if machine.tick(float(now)) == [Give(DeviceId(0))]]
    assert sent == [2, 6, 14, 30]
    machine.scheduled(DeviceId(0), finish(3), 40.0)
    assert machine.tick(41.0) == []
    assert machine.tick(42.0) == [Give(DeviceId(0)), Tell(DeviceId(0), Proceed(ask=str(ASK)))]
    machine.joined(DeviceId(0), 43.0)
    assert machine.tick(44.9) == []
    assert machine.tick(45.0) == [Give(DeviceId(0)), Tell(DeviceId(0), Proceed(ask=str(ASK)))]


def test_a_rejection_names_its_reason() -> None:
    machine = opened([finish(10)], 1)
    actions = machine.rejected(DeviceId(0), "norm", "too long", 0.0)
    assert actions == [Tell(DeviceId(0), Invalid(ask=str(ASK), reason="norm", detail="too long"))]


def test_a_second_schedule_does_not_count() -> None:
    machine = opened([finish(10), finish(20)], 1)
    assert machine.scheduled(DeviceId(0), finish(90), 0.0) == []
    assert table(play(machine)) == "ac"


schedule = st.one_of(
    st.none(),
    st.integers(0, 14).map(lambda tenth: finish(10.0 * tenth)),
    st.integers(0, 14).map(lambda tenth: drop(10.0 * tenth, 10.0 * tenth + 7)),
)
behaviour = st.sampled_from(["good", "good", "good", BAD, FAIL])


@given(st.lists(st.tuples(schedule, behaviour), min_size=1, max_size=8), st.integers(1, 5), st.data())
def test_no_order_of_events_changes_an_outcome(
    devices: list[tuple[Scheduled | None, str]], wanted: int, data: st.DataObject
) -> None:
    bad = frozenset(index for index, (_, kind) in enumerate(devices) if kind == BAD)
    failing = frozenset(index for index, (_, kind) in enumerate(devices) if kind == FAIL)
    calm = play(opened([schedule for schedule, _ in devices], wanted), bad, failing)

    cohort = [DeviceId(index) for index in range(len(devices))]
    present = set(data.draw(st.lists(st.sampled_from(cohort), unique=True)))
    machine = VirtualAsk(terms(len(devices), wanted), present)
    wild = Wild(machine, devices, present)
    wild.perform(machine.open(0.0))
    for _ in range(60):
        choices = wild.choices()
        if machine.end is not None or not choices:
            break
        kind, device = data.draw(st.sampled_from(choices))
        wild.perform(wild.step(kind, device))
        machine.check()
    wild.settle()
    assert machine.verdicts == calm.verdicts
    assert (machine.end, machine.accepted, machine.away) == (calm.end, calm.accepted, calm.away)
    assert not machine.perturbed


class Wild:
    """Devices that answer in any order, die, come back and repeat themselves."""

    def __init__(self, machine: VirtualAsk, devices: list[tuple[Scheduled | None, str]], present: set[DeviceId]):
        self.machine, self.devices, self.present = machine, devices, present
        self.has_work: set[DeviceId] = set()
        self.may_proceed: set[DeviceId] = set()

    def choices(self) -> list[tuple[str, DeviceId]]:
        every = [DeviceId(index) for index in range(len(self.devices))]
        return (
            [("join", device) for device in every if device not in self.present]
            + [("leave", device) for device in every if device in self.present]
            + [("work", device) for device in every if device in self.has_work]
            + [("answer", device) for device in every if device in self.may_proceed & self.has_work]
        )

    def step(self, kind: str, device: DeviceId) -> list[Action]:
        machine = self.machine
        plan, behaviour = self.devices[device]
        if kind == "join":
            self.present.add(device)
            return machine.joined(device, 0.0)
        if kind == "leave":
            for held in (self.present, self.has_work, self.may_proceed):
                held.discard(device)
            return machine.left(device, 0.0)
        if kind == "work":
            return machine.failed(device, 0.0) if plan is None else machine.scheduled(device, plan, 0.0)
        if not machine.expects(device):
            return []
        if behaviour == BAD:
            return machine.rejected(device, "norm", "", 0.0)
        return machine.failed(device, 0.0) if behaviour == FAIL else machine.result(device, 0.0)

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Give):
                assert action.device in self.present
                self.has_work.add(action.device)
            elif isinstance(action.message, Proceed) and action.device in self.present:
                self.may_proceed.add(action.device)

    def settle(self) -> None:
        """Bring all devices back and let them do what they have to."""
        for device in set(self.machine.terms.cohort) - self.present:
            self.perform(self.step("join", device))
        for _ in range(2 + len(self.devices)):
            for device in self.machine.terms.cohort:
                for kind in ("work", "answer"):
                    if kind == "work" or self.machine.expects(device):
                        self.perform(self.step(kind, device))
        self.machine.check()


@pytest.mark.parametrize(
    ("schedules", "letters", "end"),
    [
        ([finish(30), finish(10), finish(20)], "aaa", 30.0),
        ([finish(30), drop(5), finish(20)], "ada", 30.0),
        ([finish(10), drop(50)], "ad", 50.0),
        ([drop(5), drop(7)], "dd", 7.0),
        ([finish(10), finish(101)], "al", 100.0),
        ([finish(10), drop(101)], "al", 100.0),
        ([finish(10), Scheduled(ask=str(ASK), event="drop", at=1005.0, cause="silence", back=None)], "ad", 100.0),
        ([finish(10), None], "af", 10.0),
        ([None], "f", 0.0),
    ],
)
def test_an_optional_ask_waits_for_nobody_who_is_known_to_be_gone(
    schedules: list[Scheduled | None], letters: str, end: float
) -> None:
    machine = play(opened(schedules, len(schedules), optional=True))
    assert (table(machine), machine.end) == (letters, 1000.0 + end)
