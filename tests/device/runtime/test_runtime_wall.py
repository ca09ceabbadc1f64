"""A device under the wall clock: it takes its time, really goes away, and comes back by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.device.behaviour.behaviour import Assignment, Schedule
from fedemu.device.bus import Done, JobFailed, Joined, Submit
from fedemu.device.memory.store import OwnStore
from fedemu.device.memory.stream import DeviceStream
from fedemu.device.runtime.actions import Action, Connect, Crash, Disconnect, Leave, Send, Tell
from fedemu.device.runtime.membership import Membership
from fedemu.device.runtime.runtime import DeviceRuntime
from fedemu.device.runtime.wall import WallClock
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import Beat, Bye, Failed, Hello, Result, Welcome, Work

START = 500.0
PLAN = StreamPlan(Arrivals(np.array([0, 1]), np.array([1]), np.array([0]), np.zeros(1), period_count=1))
"""What the monotonic clock shows when the experiment begins."""
ALWAYS = ((0.0, math.inf),)


class Scripted:
    def __init__(self, schedule: Schedule, presence: tuple[tuple[float, float], ...]) -> None:
        self._schedule, self._presence = schedule, presence

    def presence(self, until: float, since: float = 0.0) -> tuple[tuple[float, float], ...]:
        return tuple(interval for interval in self._presence if interval[0] < until and interval[1] > since)

    def schedule(self, assignment: Assignment) -> Schedule:
        return self._schedule


class Device:
    """A device that is a member since the experiment began. All times are on the experiment's clock."""

    def __init__(self, folder: Path, schedule: Schedule, presence: tuple[tuple[float, float], ...]) -> None:
        self.machine = DeviceRuntime(
            Membership(DeviceId(0), 1, "lease", heartbeat_seconds=2.0, patience=5),
            Scripted(schedule, presence),  # type: ignore[arg-type]
            DeviceStream(PLAN, 0),
            OwnStore(folder),
        )
        self.machine.start(START)

    def get(self, message: Any, time: float) -> list[Action]:
        return self.machine.receive(message, (), START + time)

    def welcome(self, time: float = 0.0) -> list[Any]:
        message = Welcome(
            device=0, clock="wall", horizon=0.0, heartbeat_seconds=2.0, patience=5, durable_round=0, elapsed=time
        )
        return said(self.get(message, time))

    def work(self, time: float, ask: str = "1.0.0") -> list[Any]:
        message = Work(
            ask=ask, program="train", task=0, start=time, shared=(), state=None, download_bytes=0, upload_bytes=0,
            passes=1.0, deadline=60.0, durable_round=0,
        )  # fmt: skip
        return said(self.get(message, time))

    def trained(self, time: float) -> list[Any]:
        done = Done(
            device=0, ask="1.0.0", examples=1, steps=1, metrics={}, label_counts=None, wrote_own=False, tensors=()
        )
        return said(self.machine.trained(done, (), START + time))

    def failed(self, time: float) -> list[Any]:
        failed = JobFailed(device=0, ask="1.0.0", reason="training", detail="")
        return said(self.machine.trained(failed, (), START + time))

    def run_until(self, end: float) -> list[tuple[float, Any]]:
        """The messages that the device sends by itself until ``end``, with their times. Its heartbeats are answered."""
        heard: list[tuple[float, Any]] = []
        while self.machine.due <= START + end:
            now = self.machine.due
            heard += [(round(now - START, 3), message) for message in said(self.machine.tick(now))]
            self.get(Beat(), now - START)
        return [(time, message) for time, message in heard if type(message).__name__ != "Heartbeat"]


def said(actions: Sequence[Action]) -> list[Any]:
    return [action.message if isinstance(action, Send | Tell) else action for action in actions]


@pytest.fixture
def new(tmp_path: Path) -> Callable[..., Device]:
    def make(schedule: Schedule, presence: tuple[tuple[float, float], ...] = ALWAYS) -> Device:
        return Device(tmp_path, schedule, presence)

    return make


RESULT = Result(ask="1.0.0", examples=1, steps=1, metrics={}, tensors=())


def test_a_device_announces_neither_presence_nor_schedule_and_begins_at_once(new: Callable[..., Device]) -> None:
    device = new(Schedule("finish", 20.0))
    assert device.welcome() == [Joined(device=0, incarnation=1)]
    (job,) = device.work(10.0)
    assert isinstance(job, Submit)


def test_a_failure_is_told_until_the_next_work_comes(new: Callable[..., Device]) -> None:
    device = new(Schedule("finish", 20.0))
    device.welcome()
    device.work(10.0)
    failure = Failed(ask="1.0.0", reason="training", detail="")
    device.run_until(20.0)
    assert device.failed(21.0) == [failure]
    assert device.run_until(40.0) == [(31.0, failure)], "it may have been lost on its way"
    device.work(40.0, "2.0.0")
    assert device.run_until(400.0) == []


def test_a_result_leaves_when_the_emulated_work_is_over(new: Callable[..., Device]) -> None:
    device = new(Schedule("finish", 20.0))
    device.welcome()
    device.work(10.0)
    assert device.trained(11.0) == []
    assert device.run_until(25.0) == [(20.0, RESULT)]


def test_a_result_that_nobody_answers_is_sent_again_after_ever_longer_waits(new: Callable[..., Device]) -> None:
    device = new(Schedule("finish", 20.0))
    device.welcome()
    device.work(10.0)
    device.trained(11.0)
    sent = device.run_until(350.0)
    assert sent == [(time, RESULT) for time in (20.0, 30.0, 50.0, 90.0, 170.0, 250.0, 330.0)]


def test_a_result_that_was_computed_too_late_leaves_at_once(new: Callable[..., Device]) -> None:
    device = new(Schedule("finish", 20.0))
    device.welcome()
    device.work(10.0)
    assert device.trained(22.0) == [RESULT]


def test_work_asked_again_does_not_send_the_result_early(new: Callable[..., Device]) -> None:
    device = new(Schedule("finish", 20.0))
    device.welcome()
    device.work(10.0)
    device.trained(11.0)
    assert device.work(10.0) == []


@pytest.mark.parametrize(
    ("cause", "expected"),
    [("crash", [Crash(30.0)]), ("leave", [Bye(reason="leave"), Leave(30.0)])],
)
def test_a_planned_end_happens_at_its_time_and_says_how_long_it_lasts(
    new: Callable[..., Device], cause: Any, expected: list[Any]
) -> None:
    device = new(Schedule("drop", 15.0, cause, 45.0))
    device.welcome()
    assert device.work(10.0) == []
    heard = []
    while not heard:
        now = device.machine.due
        heard = [message for message in said(device.machine.tick(now)) if type(message).__name__ != "Heartbeat"]
        device.get(Beat(), now - START)
    assert now - START == 15.0
    assert heard == expected


def test_silence_lasts_as_long_as_the_plan_says(new: Callable[..., Device]) -> None:
    device = new(Schedule("drop", 11.0, "silence", 60.0))
    device.welcome()
    device.work(10.0)
    assert device.run_until(65.0) == [(60.0, Connect()), (60.0, Hello(device=0, incarnation=2, lease="lease"))]


def test_a_device_goes_off_line_and_comes_back_by_its_timetable(new: Callable[..., Device]) -> None:
    device = new(Schedule("finish", 5.0), presence=((0.0, 30.0), (70.0, math.inf)))
    device.welcome()
    assert device.run_until(75.0) == [
        (30.0, Bye(reason="offline")),
        (30.0, Disconnect()),
        (70.0, Connect()),
        (70.0, Hello(device=0, incarnation=2, lease="lease")),
    ]


def test_a_device_that_is_off_line_at_its_birth_leaves_until_its_time_comes(new: Callable[..., Device]) -> None:
    device = new(Schedule("finish", 5.0), presence=((40.0, math.inf),))
    assert device.welcome(10.0) == [Joined(device=0, incarnation=1), Bye(reason="offline"), Disconnect()]
    assert device.machine.due == START + 40.0


def test_a_device_that_never_returns_waits_forever(new: Callable[..., Device]) -> None:
    device = new(Schedule("finish", 5.0), presence=((0.0, 30.0),))
    device.welcome()
    device.run_until(30.0)
    assert device.machine.due == math.inf


def test_going_off_line_lets_unfinished_work_go(new: Callable[..., Device]) -> None:
    device = new(Schedule("drop", 30.0, "offline", 70.0), presence=((0.0, 30.0), (70.0, math.inf)))
    device.welcome()
    device.work(10.0)
    device.run_until(70.0)
    assert device.welcome(71.0) == [Joined(device=0, incarnation=2)]
    assert [type(message) for _, message in device.run_until(200.0)] == []


def test_the_coordinators_time_in_a_work_sets_the_clock(new: Callable[..., Device]) -> None:
    device = new(Schedule("finish", 110.0))
    device.welcome()
    device.work(100.0)
    device.trained(101.0)
    assert device.run_until(115.0) == [(110.0, RESULT)]


def test_presence_beyond_a_day_is_looked_up_when_it_is_due() -> None:
    days = tuple((day * 86_400.0, day * 86_400.0 + 3600.0) for day in range(40) if day not in range(3, 30))
    clock = WallClock(Scripted(Schedule("finish", 0.0), days), elapsed=2 * 86_400.0 + 3700.0, now=0.0)  # type: ignore[arg-type]
    assert clock.end_of_presence(0.0) == -math.inf
    assert clock.seconds_to_return(0.0) == 28 * 86_400.0 - 3700.0
