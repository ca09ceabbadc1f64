"""A device's runtime: what it does on each message, also if the message comes twice, late or in another order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fedemu.algorithms.replay.buffer import Buffer
from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.device.behaviour.availability import TooFarAhead
from fedemu.device.behaviour.behaviour import Assignment, Schedule
from fedemu.device.bus import Done, JobFailed, Joined, Submit, Withdraw
from fedemu.device.memory.replay_buffer import buffer_leaves
from fedemu.device.memory.store import OwnStore, write_own
from fedemu.device.memory.stream import DeviceStream
from fedemu.device.runtime.actions import Action, Connect, Crash, Disconnect, Leave, Retire, Send, Sleep, Tell
from fedemu.device.runtime.membership import Membership
from fedemu.device.runtime.runtime import DeviceRuntime
from fedemu.protocol import messages as wire
from fedemu.protocol.ids import AskId, DeviceId
from fedemu.protocol.messages import (
    Accepted,
    Beat,
    BlobRef,
    Bye,
    Cancel,
    Declined,
    Duplicate,
    Extend,
    Failed,
    Heartbeat,
    Hello,
    Invalid,
    Late,
    Presence,
    Proceed,
    Refused,
    Result,
    Scheduled,
    Stop,
    TensorSpec,
    Welcome,
    Work,
)

WEIGHT = TensorSpec(name="model/w", dtype="float32", shape=(2,))
MODEL = BlobRef(key="model", digest="a" * 64, size=10)


class Scripted:
    """A behaviour with the schedule and the on-line times that the test sets."""

    def __init__(self, schedule: Schedule, presence: tuple[tuple[float, float], ...] = ((0.0, math.inf),)) -> None:
        self.answer = schedule
        self.intervals = presence
        self.asked: list[Assignment] = []

    def presence(self, until: float, since: float = 0.0) -> tuple[tuple[float, float], ...]:
        return tuple(interval for interval in self.intervals if interval[0] < until and interval[1] > since)

    def schedule(self, assignment: Assignment) -> Schedule:
        self.asked.append(assignment)
        return self.answer


FINISH = Schedule("finish", 12.0)


def a_work(ask: str = "3.0.0", **changes: Any) -> Work:
    fields: dict[str, Any] = {
        "ask": ask,
        "program": "train",
        "task": 1,
        "start": 10.0,
        "shared": (MODEL,),
        "state": None,
        "download_bytes": 100,
        "upload_bytes": 50,
        "passes": 5.0,
        "deadline": 600.0,
        "durable_round": 0,
    }
    return Work(**(fields | changes))


def done(ask: str = "3.0.0", wrote_own: bool = False) -> Done:
    return Done(
        device=7, ask=ask, examples=3, steps=2, metrics={"loss": 0.5}, label_counts=None, seconds=0.25,
        wrote_own=wrote_own, tensors=(WEIGHT,),
    )  # fmt: skip


PAYLOAD = [np.array([1.0, 2.0], np.float32).tobytes()]
RESULT = Result(
    ask="3.0.0", examples=3, steps=2, metrics={"loss": 0.5}, label_counts=None, seconds=0.25, tensors=(WEIGHT,)
)


def a_plan(*periods: tuple[int, ...], **rules: Any) -> StreamPlan:
    """The stream of one device, period by period, a round each."""
    indices = np.array([index for period in periods for index in period], np.int64)
    numbers = np.repeat(np.arange(len(periods)), [len(period) for period in periods])
    offsets = np.array([0, len(indices)])
    return StreamPlan(Arrivals(offsets, indices, numbers, np.zeros(len(indices)), len(periods)), **rules)


PLAN = a_plan((4, 5, 6))


class Device:
    """A runtime whose clock the test moves, with everything that it has said."""

    def __init__(self, folder: Path, behaviour: Scripted, incarnation: int = 5, plan: StreamPlan | None = None) -> None:
        self.now = 0.0
        self.behaviour = behaviour
        self.store = OwnStore(folder)
        self.machine = DeviceRuntime(
            Membership(DeviceId(7), incarnation, "lease", heartbeat_seconds=2.0, patience=5),
            behaviour,  # type: ignore[arg-type]
            DeviceStream(plan or PLAN, 0),
            self.store,
        )

    def start(self, away: float = 0.0) -> list[Action]:
        return self.machine.start(self.now, away)

    def get(self, message: Any, frames: Sequence[Any] = ()) -> list[Action]:
        return self.machine.receive(message, frames, self.now)

    def trained(self, answer: Done | JobFailed | None = None, frames: Sequence[Any] = PAYLOAD) -> list[Action]:
        return self.machine.trained(answer or done(), frames, self.now)

    def wait_until_due(self) -> list[Action]:
        self.now = self.machine.due
        return self.machine.tick(self.now)

    def join(self, clock: str = "virtual", elapsed: float = 0.0) -> list[Action]:
        self.start()
        return self.get(welcome(clock, elapsed))


def welcome(clock: Any = "virtual", elapsed: float = 0.0) -> Welcome:
    return Welcome(
        device=7, clock=clock, horizon=1000.0, heartbeat_seconds=2.0, patience=5, durable_round=0, elapsed=elapsed
    )


def messages(actions: Sequence[Action]) -> list[Any]:
    return [action.message if isinstance(action, Send | Tell) else action for action in actions]


@pytest.fixture
def new(tmp_path: Path) -> Callable[..., Device]:
    def make(schedule: Schedule = FINISH, plan: StreamPlan | None = None, **options: Any) -> Device:
        return Device(tmp_path / "7", Scripted(schedule, **options), plan=plan)

    return make


def test_a_device_says_hello_on_a_fresh_connection_and_announces_its_presence(new: Callable[..., Device]) -> None:
    device = new()
    assert device.start() == [Connect(), Send(Hello(device=7, incarnation=5, lease="lease"))]
    assert messages(device.get(welcome())) == [
        Joined(device=7, incarnation=5),
        Presence(until=1000.0, intervals=((0.0, math.inf),)),
    ]
    assert device.get(welcome()) == []


def test_presence_is_announced_again_when_more_is_wanted(new: Callable[..., Device]) -> None:
    device = new(presence=((0.0, 10.0), (500.0, 600.0), (1500.0, 1600.0)))
    device.join()
    assert messages(device.get(Extend(until=2000.0))) == [
        Presence(until=2000.0, intervals=((0.0, 10.0), (500.0, 600.0), (1500.0, 1600.0)))
    ]


def test_presence_reaches_only_as_far_as_one_message_holds_its_intervals(
    new: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.device.runtime.runtime.MAX_INTERVALS", 2)
    device = new(presence=((0.0, 10.0), (500.0, 600.0), (1500.0, 1600.0)))
    device.join()
    assert messages(device.get(Extend(until=1200.0))) == [
        Presence(until=1200.0, intervals=((0.0, 10.0), (500.0, 600.0)))
    ]
    assert messages(device.get(Extend(until=2000.0))) == [
        Presence(until=600.0, intervals=((0.0, 10.0), (500.0, 600.0)))
    ]


def test_presence_leaves_out_what_is_over_by_the_time_that_the_coordinator_told_last(
    new: Callable[..., Device],
) -> None:
    device = new(presence=((0.0, 10.0), (500.0, 600.0), (1500.0, 1600.0)))
    device.join()
    device.get(a_work(start=550.0))
    running = (500.0, 600.0)
    assert messages(device.get(Extend(until=2000.0))) == [Presence(until=2000.0, intervals=(running, (1500.0, 1600.0)))]
    device.get(a_work(start=600.0))
    assert messages(device.get(Extend(until=2000.0))) == [Presence(until=2000.0, intervals=((1500.0, 1600.0),))]
    assert messages(device.get(Extend(until=2000.0, since=1600.0))) == [Presence(until=2000.0, intervals=())]


def test_a_coordinator_that_has_gone_back_in_time_hears_again_what_was_over(new: Callable[..., Device]) -> None:
    device = new(presence=((0.0, 10.0), (500.0, 600.0)))
    device.join()
    device.get(a_work(start=550.0))
    device.start()
    told = messages(device.get(welcome(elapsed=5.0)))
    assert told[1] == Presence(until=1000.0, intervals=((0.0, 10.0), (500.0, 600.0)))


class Shortsighted(Scripted):
    """A behaviour that knows nothing of what comes after a day."""

    def presence(self, until: float, since: float = 0.0) -> tuple[tuple[float, float], ...]:
        if until > 86400.0:
            raise TooFarAhead("too far ahead")
        return super().presence(until, since)

    def schedule(self, assignment: Assignment) -> Schedule:
        if assignment.start > 86400.0:
            raise TooFarAhead("too far ahead")
        return super().schedule(assignment)


def test_a_device_asked_for_what_is_too_far_ahead_goes_on(tmp_path: Path) -> None:
    device = Device(tmp_path / "7", Shortsighted(FINISH))
    device.join()
    assert device.get(Extend(until=1e300)) == []
    assert messages(device.get(a_work(start=1e300, epoch=5))) == [
        Failed(ask="3.0.0", reason="timetable", detail="too far ahead", epoch=5)
    ]
    assert messages(device.get(a_work("4.0.0"))) == [Scheduled(ask="4.0.0", event="finish", at=12.0)]


def test_work_is_scheduled_by_what_the_device_holds(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    assert messages(device.get(a_work())) == [Scheduled(ask="3.0.0", event="finish", at=12.0)]
    assert device.behaviour.asked == [Assignment(AskId(3, 0, 0), 10.0, 100, 50, 15.0)]


def test_a_job_carries_samples_own_part_and_paths(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    own_part = TensorSpec(name="w", dtype="float32", shape=(1,))
    device.get(a_work(state="2.0.0", tensors=(own_part,)), [b"\0\0\x80\x3f"])
    (tell,) = device.get(Proceed(ask="3.0.0"))
    assert isinstance(tell, Tell)
    assert tell.message == Submit(
        device=7,
        ask="3.0.0",
        program="train",
        task=1,
        shared=(MODEL,),
        own=device.store.path("2.0.0"),
        next_own=device.store.path("3.0.0"),
        tensors=(TensorSpec(name=".", dtype="int64", shape=(3,)), own_part),
    )
    assert np.frombuffer(tell.frames[0], np.int64).tolist() == [4, 5, 6]
    assert tell.frames[1] == b"\0\0\x80\x3f"


def submitted(device: Device, work: Work) -> tuple[Submit, dict[str, list[int]]]:
    """The job that a work gives a trainer, and the samples that it names."""
    device.get(work)
    (tell,) = device.get(Proceed(ask=work.ask))
    assert isinstance(tell, Tell)
    assert isinstance(tell.message, Submit)
    named = zip(tell.message.tensors, tell.frames, strict=True)
    return tell.message, {spec.name: np.frombuffer(frame, np.int64).tolist() for spec, frame in named}


def test_a_device_names_the_samples_of_the_period_and_nothing_of_earlier_ones(new: Callable[..., Device]) -> None:
    device = new(plan=a_plan((1, 2), (3,), (4, 5), (6,)))
    device.join()
    job, samples = submitted(device, a_work())
    assert samples == {".": [4, 5]}
    assert job.budget == 0


def test_periods_without_a_selection_stay_sealed_until_the_next_work(new: Callable[..., Device]) -> None:
    """The emulated time follows from the samples that are trained on: two of the period, and a full buffer."""
    device = new(plan=a_plan((1, 2), (3,), (4, 5), (6,), budget=2))
    device.join()
    job, samples = submitted(device, a_work())
    assert samples == {".": [4, 5], ".sealed.0": [1, 2], ".sealed.1": [3]}
    assert job.budget == 2
    assert device.behaviour.asked[-1].samples == 5.0 * (2 + 2)


def test_samples_that_are_processed_in_any_case_take_time_if_the_device_has_any(new: Callable[..., Device]) -> None:
    for plan, expected in ((PLAN, 5.0 * 3 + 40.0), (a_plan(()), 0.0)):
        device = new(plan=plan)
        device.join()
        device.get(a_work(task=0, ask="1.0.0", processed=40.0))
        assert device.behaviour.asked[-1].samples == expected


def test_a_buffer_counts_as_far_as_its_version_has_come(new: Callable[..., Device]) -> None:
    device = new(plan=a_plan((1, 2), (3,), (4, 5), (6,), budget=3))
    device.join()
    buffer = Buffer(np.array([2]), np.array([0]), period=1, seen=2)
    write_own(Path(device.store.path("2.0.0")), buffer_leaves(buffer))
    _, samples = submitted(device, a_work(state="2.0.0"))
    assert samples == {".": [4, 5], ".sealed.1": [3]}
    assert device.behaviour.asked[-1].samples == 5.0 * (2 + 2)


def test_samples_that_arrived_after_the_last_question_of_a_period_are_lost(
    new: Callable[..., Device],
) -> None:
    device = new(plan=a_plan((1, 2, 7), (3,), (4, 5), budget=9))
    device.join()
    write_own(Path(device.store.path("1.0.1")), buffer_leaves(Buffer(asked=2)))
    _, samples = submitted(device, a_work(state="1.0.1"))
    assert samples == {".": [4, 5], ".sealed.0": [1, 2], ".sealed.1": [3]}


def test_a_result_is_sent_once_trained_and_forgotten_once_accepted(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    assert device.trained() == [Send(RESULT, PAYLOAD)]
    assert device.get(Accepted(ask="3.0.0")) == []
    assert device.get(Accepted(ask="3.0.0")) == []
    device.now = 5.0
    assert device.get(Beat()) == []
    assert device.wait_until_due() == [Send(Heartbeat())]


def test_work_of_a_later_ask_says_that_earlier_ones_are_over(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    for ask in ("3.0.0", "4.0.0"):
        assert messages(device.get(a_work(ask))) == [Scheduled(ask=ask, event="finish", at=12.0)]
        device.get(Proceed(ask=ask))
        if ask == "3.0.0":
            device.trained()
    actions = device.get(a_work("5.0.0"))
    assert actions[0] == Tell(Withdraw(device=7, ask="4.0.0")), "nobody waits for its result any more"
    assert messages(actions[1:]) == [Scheduled(ask="5.0.0", event="finish", at=12.0)]
    device.now = 25.0
    assert device.wait_until_due() == [Send(Heartbeat())], "the result for 3.0.0 is not sent again"


def test_proceed_while_training_starts_no_second_job(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    device.get(a_work())
    assert len(device.get(Proceed(ask="3.0.0"))) == 1
    assert device.get(Proceed(ask="3.0.0")) == []
    assert messages(device.get(a_work())) == [Scheduled(ask="3.0.0", event="finish", at=12.0)]


def test_proceed_or_work_again_brings_the_kept_result_again(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    device.trained()
    assert messages(device.get(a_work(durable_round=2))) == [Scheduled(ask="3.0.0", event="finish", at=12.0)]
    assert device.get(Proceed(ask="3.0.0")) == [Send(RESULT, PAYLOAD)]


def test_a_coordinator_in_its_next_life_that_asks_the_same_gets_the_kept_result_in_its_name(
    new: Callable[..., Device],
) -> None:
    device = new()
    device.join()
    assert messages(device.get(a_work(epoch=8)))[0].epoch == 8
    device.get(Proceed(ask="3.0.0"))
    assert device.trained() == [Send(replace(RESULT, epoch=8), PAYLOAD)]
    assert messages(device.get(a_work(epoch=9)))[0].epoch == 9
    assert device.get(Proceed(ask="3.0.0")) == [Send(replace(RESULT, epoch=9), PAYLOAD)]


@pytest.mark.parametrize("change", [{"start": 11.0}, {"frames": [b"another"]}])
def test_a_coordinator_in_its_next_life_that_asks_something_else_gets_a_new_result(
    change: dict[str, Any], new: Callable[..., Device]
) -> None:
    part = TensorSpec(name="w", dtype="int8", shape=(7,))
    device = new()
    device.join()
    device.get(a_work(epoch=8, tensors=(part,)), [b"the one"])
    device.get(Proceed(ask="3.0.0"))
    device.trained()
    frames = change.pop("frames", [b"the one"])
    device.get(a_work(epoch=9, tensors=(part,), **change), frames)
    (job,) = messages(device.get(Proceed(ask="3.0.0")))
    assert isinstance(job, Submit)
    assert messages(device.trained())[0].epoch == 9


def test_a_failure_names_the_epoch_of_its_work(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    device.get(a_work(epoch=8))
    device.get(Proceed(ask="3.0.0"))
    failed = device.trained(JobFailed(device=7, ask="3.0.0", reason="training", detail=""))
    assert messages(failed) == [Failed(ask="3.0.0", reason="training", epoch=8)]


def test_a_result_that_nobody_answers_is_sent_again_only_when_the_coordinator_asks(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    device.trained()
    while device.now < 400.0:
        device.get(Beat())
        assert device.wait_until_due() == [Send(Heartbeat())]
    assert messages(device.get(Proceed(ask="3.0.0"))) == [RESULT]


def test_after_a_reconnection_the_kept_result_is_sent_under_a_new_incarnation(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    device.trained()
    device.now = 10.0
    assert device.machine.tick(10.0) == [Connect(), Send(Hello(device=7, incarnation=6, lease="lease"))]
    assert messages(device.get(welcome()))[2:] == [RESULT]


def test_a_job_that_ends_while_unconnected_is_reported_after_the_welcome(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    device.now = 10.0
    device.machine.tick(10.0)
    assert device.trained() == []
    assert messages(device.get(welcome()))[2:] == [RESULT]


def test_work_that_differs_under_the_same_name_starts_over(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    device.trained()
    device.get(a_work(start=99.0))
    (again,) = messages(device.get(Proceed(ask="3.0.0")))
    assert isinstance(again, Submit)


@pytest.mark.parametrize(
    "verdict",
    [
        Accepted(ask="3.0.0"),
        Late(ask="3.0.0"),
        Cancel(ask="3.0.0"),
        Invalid(ask="3.0.0", reason="shape"),
        Duplicate(ask="3.0.0", verdict="accepted"),
    ],
)
def test_a_verdict_ends_the_work_and_leaves_it_to_later_work_which_state_counts(
    new: Callable[..., Device], verdict: Any
) -> None:
    device = new()
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    write_own(Path(device.store.path("3.0.0")), {"w": np.zeros(1)})
    device.trained(done(wrote_own=True))
    assert device.get(verdict) == []
    assert device.get(verdict) == []
    device.get(a_work("4.0.0", durable_round=2))
    assert device.store.versions == {AskId(3, 0, 0)}
    device.get(a_work("5.0.0", state="3.0.0", durable_round=4))
    assert device.store.versions == {AskId(3, 0, 0)}
    device.get(a_work("6.0.0", durable_round=5))
    assert device.store.versions == frozenset()


def test_a_cancelled_job_is_withdrawn_and_its_late_result_goes_nowhere(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    assert messages(device.get(Cancel(ask="3.0.0"))) == [Withdraw(device=7, ask="3.0.0")]
    write_own(Path(device.store.path("3.0.0")), {"w": np.zeros(1)})
    assert device.trained(done(wrote_own=True)) == []
    device.get(a_work("4.0.0", durable_round=3))
    assert device.store.versions == frozenset()


def test_superseded_states_go_once_a_later_one_is_durable(new: Callable[..., Device]) -> None:
    device = new()
    for round in (1, 2):
        write_own(Path(device.store.path(AskId(round, 0, 0))), {"w": np.zeros(1)})
        device.store.written(AskId(round, 0, 0))
    device.join()
    device.get(a_work(state="2.0.0", durable_round=1))
    assert device.store.versions == {AskId(1, 0, 0), AskId(2, 0, 0)}
    device.get(a_work(ask="4.0.0", state="2.0.0", durable_round=3))
    assert device.store.versions == {AskId(2, 0, 0)}


def test_verdicts_and_proceeds_about_unknown_asks_change_nothing(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    for message in (Accepted(ask="9.0.0"), Late(ask="9.0.0"), Cancel(ask="9.0.0"), Proceed(ask="9.0.0")):
        assert device.get(message) == []


def test_a_proceed_that_overtook_its_work_counts(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    device.get(Proceed(ask="3.0.0"))
    assert [type(message) for message in messages(device.get(a_work()))] == [Scheduled, Submit]


def test_a_job_that_fails_is_reported_with_its_reason(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    failed = JobFailed(device=7, ask="3.0.0", reason="training", detail="no data")
    assert messages(device.trained(failed, ())) == [Failed(ask="3.0.0", reason="training", detail="no data")]


def test_a_planned_refusal_is_said_at_once(new: Callable[..., Device]) -> None:
    device = new(Schedule("finish", 12.0, reply="decline"))
    device.join()
    assert messages(device.get(a_work())) == [Declined(ask="3.0.0", reason="declined")]


def test_a_planned_duplicate_is_sent_twice(new: Callable[..., Device]) -> None:
    device = new(Schedule("finish", 12.0, reply="duplicate"))
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    assert device.trained() == [Send(RESULT, PAYLOAD)] * 2


def test_a_corrupt_result_that_could_not_be_read_is_given_up(new: Callable[..., Device]) -> None:
    device = new(Schedule("finish", 12.0, reply="corrupt", corruption="truncate"))
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    (send,) = device.trained()
    assert isinstance(send, Send)
    assert [len(frame) for frame in send.frames] == [4]
    assert messages(device.get(Refused(reason="malformed", detail="short"))) == [
        Failed(ask="3.0.0", reason="malformed", detail="short", planned=True)
    ]


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ("crash", [Crash(0.0)]),
        ("leave", [Send(Bye(reason="leave")), Leave(0.0)]),
        ("offline", [Send(Bye(reason="offline")), Disconnect()]),
        ("silence", []),
    ],
)
def test_a_planned_drop_out_happens_when_told_to_proceed(
    new: Callable[..., Device], cause: Any, expected: list[Action]
) -> None:
    device = new(Schedule("drop", 11.0, cause, 50.0))
    device.join()
    assert messages(device.get(a_work())) == [Scheduled(ask="3.0.0", event="drop", at=11.0, cause=cause, back=50.0)]
    assert device.get(Proceed(ask="3.0.0")) == expected


def test_after_going_off_line_under_the_virtual_clock_the_device_is_back_at_once(new: Callable[..., Device]) -> None:
    device = new(Schedule("drop", 11.0, "offline", 50.0))
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    assert device.machine.due == device.now
    assert device.wait_until_due() == [Connect(), Send(Hello(device=7, incarnation=6, lease="lease"))]


def test_a_silent_device_ignores_everything_until_it_comes_back_on_a_fresh_connection(
    new: Callable[..., Device],
) -> None:
    device = new(Schedule("drop", 11.0, "silence", 50.0))
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    assert device.get(a_work("4.0.0")) == []
    assert device.wait_until_due() == [Connect(), Send(Hello(device=7, incarnation=6, lease="lease"))]
    assert device.now == 12.0, "the coordinator notices after 10 s, and has one heartbeat more for it"


def test_a_planned_silence_is_over_when_work_begins_after_it(new: Callable[..., Device]) -> None:
    device = new(Schedule("drop", 11.0, "silence", 50.0))
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    assert device.get(a_work("4.0.0", start=49.0)) == [], "it is silent by plan until then"
    back = [Connect(), Send(Hello(device=7, incarnation=6, lease="lease"))]
    assert device.get(a_work("5.0.0", start=50.0)) == back
    assert device.now == 0.0, "no real time has passed"
    device.get(welcome())
    assert messages(device.get(a_work("5.0.0", start=50.0)))[0].ask == "5.0.0"


def test_a_silent_device_that_is_to_sleep_ends_its_life_without_a_word(new: Callable[..., Device]) -> None:
    device = new(Schedule("drop", 11.0, "silence", 50.0))
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    assert device.get(wire.Sleep()) == [Sleep()]
    assert device.machine.due == math.inf


def test_a_device_that_never_comes_back_by_plan_does_not_hear_work(new: Callable[..., Device]) -> None:
    device = new(Schedule("drop", 11.0, "silence", math.inf))
    device.join()
    device.get(a_work())
    device.get(Proceed(ask="3.0.0"))
    assert device.get(a_work("5.0.0", start=1e9)) == []


def test_heartbeats_begin_at_different_moments_and_keep_the_interval(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    assert device.wait_until_due() == [Send(Heartbeat())]
    first = device.now
    assert first == pytest.approx(2.0 * (7 * 0.6180339887 % 1.0))
    device.get(Beat())
    device.wait_until_due()
    assert device.now == pytest.approx(first + 2.0)


def test_every_message_counts_as_a_heartbeat(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    device.now = 1.0
    device.get(a_work())
    beats = []
    while not beats:
        beats = device.wait_until_due()
    assert beats == [Send(Heartbeat())]
    assert device.now == 3.0


def test_a_coordinator_that_started_again_hears_hello_on_the_same_connection_once(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    unknown = Refused(reason="unknown_peer", detail="")
    assert device.get(unknown) == [Send(Hello(device=7, incarnation=6, lease="lease"))]
    assert device.get(unknown) == []
    assert Joined(device=7, incarnation=6) in messages(device.get(welcome()))


@pytest.mark.parametrize("reason", ["lease_unknown", "unknown_peer"])
def test_a_device_whose_supervisor_is_not_back_or_whose_hello_is_lost_says_it_again_and_ever_later(
    new: Callable[..., Device], reason: str
) -> None:
    device = new()
    device.start()
    times = []
    for incarnation in range(6, 16):
        assert device.get(Refused(reason=reason, detail="")) == []
        assert device.wait_until_due() == [Send(Hello(device=7, incarnation=incarnation, lease="lease"))]
        times.append(device.now)
    assert times == [0.25, 0.75, 1.75, 3.75, 7.75, 15.75, 31.75, 63.75, 103.75, 143.75]
    assert Joined(device=7, incarnation=15) in messages(device.get(welcome()))


def test_a_superseded_device_retires(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    assert device.get(Refused(reason="superseded", detail="")) == [Retire()]
    assert device.machine.due == math.inf
    assert device.get(a_work()) == []


def test_stop_is_answered_with_a_goodbye(new: Callable[..., Device]) -> None:
    device = new()
    device.join()
    assert device.get(Stop(reason="done")) == [Send(Bye(reason="done")), Retire()]


def test_a_device_that_is_told_to_quit_says_goodbye_if_it_has_a_connection(new: Callable[..., Device]) -> None:
    device = new()
    device.start(away=30.0)
    assert device.machine.quit() == [Retire()]
    device = new()
    device.start()
    assert device.machine.quit() == [Send(Bye(reason="stopped")), Retire()]
    device = new()
    device.join()
    assert device.machine.quit() == [Send(Bye(reason="stopped")), Retire()]


def test_a_next_life_may_have_to_begin_later(new: Callable[..., Device]) -> None:
    device = new()
    assert device.start(away=30.0) == []
    assert device.machine.due == 30.0
    assert device.wait_until_due()[0] == Connect()
