"""What `fedemu run` does when its children end and when it is told to stop."""

import signal

import pytest

from fedemu.ops.running import launch_rules as rules
from fedemu.ops.running.codes import INTERNAL_ERROR, INTERRUPTED
from fedemu.ops.running.launch_rules import Action, CallDevices, Launch, Patience, Say, Send, StartDevices
from fedemu.ops.running.processes import LEFT_EARLY
from fedemu.protocol.wording import KILLED, ending


def sends(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Say)]


def with_devices() -> Launch:
    launch = Launch()
    assert launch.coordinator_opened() == [CallDevices()]
    return launch


def test_a_coordinator_that_ends_before_it_opened_ends_devices_that_were_never_called() -> None:
    launch = Launch()
    assert launch.coordinator_ended(2, now=1.0) == [Send("devices", signal.SIGTERM)]
    assert launch.exit_code is None
    launch.devices_ended(INTERRUPTED, now=1.1)
    assert launch.exit_code == 2


def test_a_coordinator_that_is_killed_before_it_opened_is_named() -> None:
    launch = Launch()
    said = [Say(f"the coordinator was ended by {KILLED}"), Send("devices", signal.SIGTERM)]
    assert launch.coordinator_ended(-signal.SIGKILL, now=1.0) == said
    launch.devices_ended(LEFT_EARLY, now=1.1)
    assert launch.exit_code == INTERRUPTED


def test_devices_are_not_called_for_a_run_that_is_stopping() -> None:
    launch = Launch()
    launch.signalled(now=1.0)
    assert launch.coordinator_opened() == []
    assert launch.coordinator_ended(4, now=2.0) == [Send("devices", signal.SIGTERM)]
    launch.devices_ended(LEFT_EARLY, now=2.1)
    assert launch.exit_code == 4


def test_a_completed_run_ends_with_the_coordinators_code_once_the_devices_have_left() -> None:
    launch = with_devices()
    assert launch.coordinator_ended(0, now=5.0) == []
    assert launch.exit_code is None
    assert launch.devices_ended(0, now=6.0) == []
    assert launch.exit_code == 0


def test_devices_that_do_not_leave_are_terminated_and_then_killed() -> None:
    launch = with_devices()
    launch.coordinator_ended(0, now=5.0)
    assert launch.tick(5.0 + Patience().departure - 0.1) == []
    late = 5.0 + Patience().departure
    assert launch.tick(late) == [Send("devices", signal.SIGTERM)]
    assert launch.tick(late + 1.0) == []
    assert launch.tick(late + Patience().termination) == [Send("devices", signal.SIGKILL)]
    launch.devices_ended(-9, now=late + 6.0)
    assert launch.exit_code == 0


def test_the_first_ctrl_c_asks_the_coordinator_for_a_checkpoint_and_the_second_kills_it() -> None:
    launch = with_devices()
    assert sends(launch.signalled(now=1.0)) == [Send("coordinator", signal.SIGINT)]
    assert sends(launch.signalled(now=2.0)) == [Send("coordinator", signal.SIGKILL)]


def test_a_terminal_that_is_closed_asks_for_a_checkpoint_although_it_hangs_up_twice() -> None:
    launch = with_devices()
    assert sends(launch.signalled(now=1.0)) == [Send("coordinator", signal.SIGINT)]
    assert launch.signalled(now=1.001) == []
    assert launch.tick(1.0 + Patience().checkpoint) == [Send("coordinator", signal.SIGKILL)]


def test_an_interrupted_coordinator_that_hangs_is_killed_in_the_end() -> None:
    launch = with_devices()
    launch.signalled(now=1.0)
    assert launch.tick(1.0 + Patience().checkpoint) == [Send("coordinator", signal.SIGKILL)]
    assert Say("the coordinator was ended by SIGKILL") in launch.coordinator_ended(-signal.SIGKILL, now=40.0)


def test_an_interrupted_run_ends_with_the_code_of_the_coordinator() -> None:
    launch = with_devices()
    launch.signalled(now=1.0)
    launch.devices_ended(0, now=1.5)
    launch.coordinator_ended(4, now=2.0)
    assert launch.exit_code == 4


def test_after_an_interruption_the_devices_are_not_waited_for_long() -> None:
    launch = with_devices()
    launch.signalled(now=1.0)
    launch.coordinator_ended(4, now=2.0)
    assert launch.tick(2.0 + Patience().retreat) == [Send("devices", signal.SIGTERM)]


def test_a_signal_after_the_end_of_the_coordinator_ends_the_devices_at_once() -> None:
    launch = with_devices()
    launch.coordinator_ended(0, now=2.0)
    assert launch.signalled(now=2.1) == [Send("devices", signal.SIGTERM)]
    assert launch.tick(2.0 + Patience().departure) == [Send("devices", signal.SIGKILL)]


def test_a_killed_coordinator_is_named_and_its_devices_are_ended_at_once() -> None:
    launch = with_devices()
    actions = launch.coordinator_ended(-signal.SIGKILL, now=3.0)
    assert actions == [Say(f"the coordinator was ended by {KILLED}"), Send("devices", signal.SIGTERM)]
    assert launch.tick(3.0 + Patience().termination) == [Send("devices", signal.SIGKILL)]
    launch.devices_ended(4, now=3.5)
    assert launch.exit_code == INTERRUPTED


def test_a_coordinator_that_left_before_it_began_has_told_nobody() -> None:
    launch = with_devices()
    launch.signalled(now=1.0)
    assert launch.coordinator_ended(LEFT_EARLY, now=1.1) == [Send("devices", signal.SIGTERM)]
    assert launch.tick(1.1 + Patience().termination - 0.1) == []  # they have the time to end what they started
    launch.devices_ended(LEFT_EARLY, now=6.0)
    assert launch.exit_code == INTERRUPTED


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGSEGV, INTERNAL_ERROR),
        (signal.SIGBUS, INTERNAL_ERROR),  # such as for a page that a full /dev/shm does not give
        (signal.SIGABRT, INTERNAL_ERROR),
        (signal.SIGRTMIN + 1, INTERRUPTED),
    ],
)
def test_a_coordinator_that_crashes_is_an_internal_error(number: int, code: int) -> None:
    """A signal of the real-time ones has no name, and is no crash."""
    launch = with_devices()
    launch.devices_ended(0, now=2.0)
    assert launch.coordinator_ended(-number, now=3.0) == [Say(f"the coordinator {ending(-number)}")]
    assert launch.exit_code == code


@pytest.mark.parametrize(
    ("last", "how", "told"), [(-signal.SIGINT, "was ended by SIGINT", False), (1, "ended with code 1", True)]
)
def test_a_killed_supervisor_is_started_again_but_not_for_ever(last: int, how: str, told: bool) -> None:
    launch = with_devices()
    for number in range(rules.MOST_RESTARTS):
        killed = 1 if number % 2 else -signal.SIGKILL  # a library may end its process by a code of its own
        assert sends(launch.devices_ended(killed, now=1.0)) == [StartDevices()]
    said, *sent = launch.devices_ended(last, now=1.0)
    assert said == Say(f"the devices' supervisor {how} after it was started again 5 times")
    assert sent == [Send("coordinator", signal.SIGINT)]
    launch.coordinator_ended(4, now=2.0)
    assert (launch.exit_code, launch.devices_said_why) == (INTERNAL_ERROR, told)


def test_a_coordinator_that_something_else_ended_is_told_and_is_an_internal_error() -> None:
    launch = with_devices()
    said, *sent = launch.coordinator_ended(1, now=1.0)
    assert (said, sent) == (Say("the coordinator ended with code 1"), [Send("devices", signal.SIGTERM)])
    launch.devices_ended(0, now=2.0)
    assert launch.exit_code == INTERNAL_ERROR


def test_a_supervisor_that_gives_up_stops_the_coordinator_and_its_code_is_the_runs() -> None:
    launch = with_devices()
    assert sends(launch.devices_ended(2, now=1.0)) == [Send("coordinator", signal.SIGINT)]
    launch.coordinator_ended(4, now=2.0)
    assert (launch.exit_code, launch.devices_said_why) == (2, True)


def test_a_supervisor_that_gives_up_when_the_coordinator_has_done_its_work_changes_nothing() -> None:
    launch = with_devices()
    launch.devices_ended(2, now=1.0)
    assert launch.coordinator_ended(0, now=1.1) == []
    assert launch.exit_code == 0


def test_a_supervisor_that_a_signal_of_others_ended_before_it_began_interrupts_the_run() -> None:
    launch = Launch()  # OpenBLAS raises SIGINT where it gets no threads
    assert sends(launch.devices_ended(LEFT_EARLY, now=1.0)) == [Send("coordinator", signal.SIGINT)]
    launch.coordinator_ended(LEFT_EARLY, now=1.1)
    assert launch.exit_code == INTERRUPTED


def test_devices_that_were_told_to_stop_do_not_stop_the_coordinator() -> None:
    launch = with_devices()
    assert launch.devices_ended(0, now=1.0) == []
    assert launch.exit_code is None
    launch.coordinator_ended(3, now=2.0)
    assert launch.exit_code == 3


def test_a_supervisor_that_dies_while_the_run_stops_is_not_started_again() -> None:
    launch = with_devices()
    launch.signalled(now=1.0)
    assert sends(launch.devices_ended(-signal.SIGKILL, now=1.5)) == []
