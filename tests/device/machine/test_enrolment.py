"""A machine's membership at the coordinator: first contact, former leases, heartbeats, and giving up in time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedemu.device.machine.enrolment import Enrolment
from fedemu.device.runtime.actions import Connect
from fedemu.protocol.errors import MalformedMessage, RefusedError, UnreachableError, VersionMismatch
from fedemu.protocol.messages import BlobRef, Compute, Enroll, Granted, Heartbeat, Refused


def a_grant(lease: str = "L", run: str = "run") -> Granted:
    blob = BlobRef(key="experiment", digest="a" * 64, size=1)
    return Granted(
        lease=lease, run=run, ranges=((0, 3),), experiment=blob, partition=blob, data="b" * 64,
        heartbeat_seconds=2.0, patience=5,
    )  # fmt: skip


def an_enrolment(*leases: str) -> Enrolment:
    return Enrolment("tcp://here:1", 3, "host", leases=leases, connect_seconds=60.0, lost_seconds=120.0)


def let_pass(machine: Enrolment, end: float) -> None:
    """Let the machine do what is due before ``end``."""
    while (now := machine.due) < end:
        machine.tick(now)


def refused(reason: str) -> Refused:
    return Refused(reason=reason, detail="Because.")


ENROLL = Enroll(count=3, lease=None, host="host")


def test_it_asks_again_on_the_same_connection_until_somebody_answers() -> None:
    machine = an_enrolment()
    assert machine.start(0.0) == [Connect(), ENROLL]
    assert machine.due == 2.0
    assert machine.tick(1.9) == []
    assert machine.tick(2.0) == [ENROLL]
    assert machine.accept(a_grant(), 3.0)
    assert machine.due == 5.0
    assert machine.tick(4.9) == []
    assert machine.tick(5.0) == [Heartbeat()]
    assert machine.due == 7.0


def test_it_says_how_it_computes() -> None:
    compute = Compute(fedemu="1", torch="2", numpy="3", device="cpu")
    machine = Enrolment("here", 3, "host", compute=compute, leases=(), connect_seconds=60.0, lost_seconds=120.0)
    assert machine.start(0.0) == [Connect(), Enroll(count=3, lease=None, host="host", compute=compute)]


def test_a_second_grant_is_no_news() -> None:
    machine = an_enrolment()
    machine.start(0.0)
    assert machine.accept(a_grant(), 1.0)
    assert not machine.accept(a_grant(), 1.0)


def test_an_address_where_nobody_answers_ends_with_a_sentence_that_names_it() -> None:
    machine = an_enrolment()
    machine.start(0.0)
    let_pass(machine, 60.0)
    with pytest.raises(UnreachableError, match=r"tcp://here:1 within 60 s.*--connect"):
        machine.tick(60.0)


def test_former_leases_are_tried_before_a_new_one_is_asked_for() -> None:
    machine = an_enrolment("old", "older")
    assert machine.start(0.0) == [Connect(), Enroll(count=3, lease="old", host="host")]
    assert machine.refuse(refused("lease_unknown"), 1.0) == [Enroll(count=3, lease="older", host="host")]
    assert machine.refuse(refused("lease_unknown"), 1.0) == [ENROLL]


def test_a_second_refusal_of_the_same_lease_does_not_pass_over_the_next_one() -> None:
    machine = an_enrolment("old", "older")
    machine.start(0.0)
    machine.tick(2.0)
    machine.tick(4.0)
    assert machine.refuse(refused("lease_unknown"), 5.0) == [Enroll(count=3, lease="older", host="host")]
    assert machine.refuse(refused("lease_unknown"), 5.0) == []
    assert machine.refuse(refused("lease_unknown"), 5.0) == []
    assert machine.refuse(refused("lease_unknown"), 5.0) == [ENROLL]
    assert machine.refuse(refused("lease_unknown"), 5.0) == []


def test_answers_that_a_closed_connection_owed_are_not_waited_for() -> None:
    machine = an_enrolment("old", "older")
    machine.start(0.0)
    machine.tick(2.0)
    machine.bar("its key is unknown", final=True)
    assert machine.tick(4.0) == [Connect(), Enroll(count=3, lease="old", host="host")]
    assert machine.refuse(refused("lease_unknown"), 5.0) == [Enroll(count=3, lease="older", host="host")]
    assert machine.refuse(refused("lease_unknown"), 5.0) == [ENROLL]


def test_a_lease_whose_former_holder_is_not_yet_dead_is_waited_for() -> None:
    machine = an_enrolment("old")
    machine.start(0.0)
    assert machine.refuse(refused("lease_taken"), 0.5) == []
    assert machine.tick(2.0) == [Enroll(count=3, lease="old", host="host")]


def test_a_lease_that_stays_taken_ends_with_the_coordinators_reason() -> None:
    machine = an_enrolment("old")
    machine.start(0.0)
    machine.refuse(refused("lease_taken"), 0.5)
    let_pass(machine, 60.0)
    with pytest.raises(RefusedError, match="Because") as error:
        machine.tick(60.0)
    assert error.value.reason == "lease_taken"


def test_with_all_devices_taken_the_machine_waits_idly_for_the_end() -> None:
    machine = an_enrolment()
    machine.start(0.0)
    assert machine.refuse(refused("fleet_full"), 1.0) == []
    assert machine.idle
    assert machine.due == 10.0
    assert machine.tick(9.0) == []
    assert machine.tick(10.0) == [ENROLL]
    assert machine.due == 20.0
    machine.heard(100.0)
    machine.tick(100.0)
    machine.accept(a_grant(), 110.0)
    assert not machine.idle


def test_a_machine_that_waits_idly_gives_up_a_coordinator_that_does_not_answer() -> None:
    machine = an_enrolment()
    machine.start(0.0)
    machine.heard(1.0)
    machine.refuse(refused("fleet_full"), 1.0)
    let_pass(machine, 121.0)
    assert machine.due == 121.0
    with pytest.raises(UnreachableError, match="has been away for 120 s"):
        machine.tick(121.0)


def test_a_machine_that_waits_idly_takes_a_former_lease_that_has_become_free() -> None:
    free: list[str] = []

    class Former:
        def __iter__(self) -> Iterator[str]:
            while free:
                yield free.pop()

    machine = Enrolment("tcp://here:1", 3, "host", leases=Former(), connect_seconds=60.0, lost_seconds=120.0)
    machine.start(0.0)
    machine.refuse(refused("fleet_full"), 1.0)
    free.append("old")
    assert machine.tick(10.0) == [Enroll(count=3, lease="old", host="host")]
    assert machine.refuse(refused("lease_unknown"), 11.0) == [ENROLL]
    machine.refuse(refused("fleet_full"), 12.0)
    machine.heard(20.0)
    free.append("older")
    assert machine.tick(21.0) == [Enroll(count=3, lease="older", host="host")]
    assert machine.accept(a_grant(), 21.5)


def test_other_refusals_end_it() -> None:
    machine = an_enrolment()
    machine.start(0.0)
    with pytest.raises(RefusedError, match=r"tcp://here:1 refused this machine: Because\."):
        machine.refuse(refused("compute"), 1.0)


@pytest.mark.parametrize("reason", ["malformed", "version"])
def test_a_coordinator_of_another_version_is_told_before_there_is_a_place_and_after_it_started_again(
    reason: str,
) -> None:
    said = r"^The coordinator at tcp://here:1 and this machine do not understand each other \((Because\.|v 2)\); "
    machine = an_enrolment()
    machine.start(0.0)
    with pytest.raises(RefusedError, match=said):
        machine.refuse(refused(reason), 1.0)
    with pytest.raises(RefusedError, match=said):
        machine.misread(VersionMismatch("v 2"))
    machine.accept(a_grant(), 2.0)
    machine.misread(MalformedMessage("field", "one message is lost"))
    machine.refuse(refused("unknown_peer"), 3.0)
    with pytest.raises(RefusedError, match=said) as error:
        machine.refuse(refused(reason), 4.0)
    assert error.value.reason == "version"


def test_a_coordinator_that_started_again_is_shown_the_lease_once() -> None:
    machine = an_enrolment()
    machine.start(0.0)
    machine.accept(a_grant(), 0.0)
    machine.heard(1001.0)
    assert machine.refuse(refused("unknown_peer"), 1001.0) == [Enroll(count=3, lease="L", host="host")]
    assert machine.refuse(refused("unknown_peer"), 1001.0) == []
    assert machine.due == 1003.0, "the connection is old, and not silent"
    assert machine.seeking
    assert machine.tick(1002.9) == []
    machine.accept(a_grant(), 1001.5)
    assert machine.due == 1003.5
    assert not machine.seeking


def test_a_silent_coordinator_is_sought_on_fresh_connections_until_it_is_given_up() -> None:
    machine = an_enrolment()
    machine.start(0.0)
    machine.accept(a_grant(), 0.0)
    fresh = [Connect(), Enroll(count=3, lease="L", host="host")]
    times = []
    while machine.due < 120.0:
        now = machine.due
        if machine.tick(now) == fresh:
            times.append(now)
    assert times == [10.0 * step for step in range(1, 12)]
    assert machine.seconds_left(130.0) == 0.0
    with pytest.raises(UnreachableError, match="has been away for 120 s"):
        machine.tick(120.0)


def test_the_time_for_which_the_machine_itself_stood_still_does_not_count() -> None:
    machine = an_enrolment()
    machine.start(100.0)
    assert not machine.seeking, "it had no place yet"
    assert machine.tick(1000.0) == [ENROLL], "898 s after it was due"
    let_pass(machine, 1058.0)
    assert machine.due == 1058.0, "60 s after its start, and 898 s more"
    machine.accept(a_grant(), 1001.0)
    machine.heard(1001.0)
    assert machine.tick(5001.0) == [Heartbeat()], "3998 s after it was due"
    assert machine.seconds_left(5001.0) == 118.0
    machine.heard(5002.0)
    machine.refuse(refused("unknown_peer"), 5002.0)
    assert machine.tick(6004.0) == [Enroll(count=3, lease="L", host="host")]
    let_pass(machine, 6122.0)
    with pytest.raises(UnreachableError, match="has been away for 120 s"):
        machine.tick(6122.0)


def test_a_coordinator_that_answers_but_never_takes_the_machine_back_is_given_up_too() -> None:
    machine = an_enrolment()
    machine.start(0.0)
    machine.accept(a_grant(), 0.0)
    machine.refuse(refused("unknown_peer"), 1.0)
    while (now := machine.due) < 121.0:
        machine.heard(now)
        machine.tick(now)
    with pytest.raises(UnreachableError):
        machine.tick(121.0)


@pytest.mark.parametrize("grant", [a_grant(run="another"), a_grant(lease="another")])
def test_another_run_at_the_same_address_is_an_error(grant: Granted) -> None:
    machine = an_enrolment()
    machine.start(0.0)
    machine.accept(a_grant(), 0.0)
    with pytest.raises(RefusedError, match="these devices belong to run"):
        machine.accept(grant, 5.0)


def test_a_coordinator_that_forgot_the_lease_is_an_error_which_does_not_say_that_it_is_of_another_run() -> None:
    machine = an_enrolment()
    machine.start(0.0)
    machine.accept(a_grant(), 0.0)
    machine.refuse(refused("unknown_peer"), 1.0)
    with pytest.raises(RefusedError, match="or has given their places to others meanwhile; start them again"):
        machine.refuse(refused("lease_unknown"), 1.0)


def test_a_machine_that_is_not_let_in_tries_on_new_connections_and_says_why_in_the_end() -> None:
    machine = an_enrolment()
    machine.start(0.0)
    machine.bar("its key is not approved", final=True)
    machine.bar("its key is not approved", final=False)
    assert machine.tick(1.0) == []
    assert machine.tick(2.0) == [Connect(), ENROLL]
    assert machine.tick(4.0) == [ENROLL], "the new connection may come about"
    machine.bar("its key is not approved", final=False)
    assert machine.tick(6.0) == [ENROLL]
    let_pass(machine, 60.0)
    with pytest.raises(RefusedError, match=r"^No way in within 60 s: its key is not approved\.$"):
        machine.tick(60.0)


def test_a_machine_that_waits_for_a_place_tries_on_a_new_connection_if_it_is_not_let_in_again() -> None:
    machine = an_enrolment()
    machine.start(0.0)
    machine.heard(1.0)
    assert machine.refuse(refused("fleet_full"), 1.0) == []
    machine.bar("its key could not be checked", final=True)
    assert machine.tick(10.0) == [Connect(), ENROLL]
    assert machine.tick(20.0) == [ENROLL], "the new connection may come about"


def test_a_machine_that_is_not_let_in_again_says_why_in_the_end() -> None:
    machine = an_enrolment()
    machine.start(0.0)
    machine.accept(a_grant(), 0.0)
    let_pass(machine, 20.0)
    machine.bar("its key was withdrawn", final=False)
    let_pass(machine, 120.0)
    with pytest.raises(RefusedError, match=r"^No way in within 120 s: its key was withdrawn\.$"):
        machine.tick(120.0)


def test_a_machine_that_was_let_in_at_last_forgets_why_it_was_not() -> None:
    machine = an_enrolment()
    machine.start(0.0)
    machine.bar("its key is not approved", final=False)
    machine.heard(3.0)
    let_pass(machine, 60.0)
    with pytest.raises(UnreachableError, match="No coordinator answered"):
        machine.tick(60.0)
