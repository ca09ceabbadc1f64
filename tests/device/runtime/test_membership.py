"""A device's membership: when it says Hello again, when its heartbeats are due, and which refusals it answers."""

from __future__ import annotations

import math

import pytest

from fedemu.device.runtime.actions import Action, Connect, Send
from fedemu.device.runtime.membership import Membership
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import Heartbeat, Hello, Refused, Welcome


def a_member(device: int = 7, now: float = 0.0) -> Membership:
    """A device that was welcomed after its first Hello."""
    member = joining(device)
    member.heard(now)
    assert member.welcomed(a_welcome(device), now)
    return member


def joining(device: int = 7) -> Membership:
    """A device that has said its first Hello at the time 0."""
    member = Membership(DeviceId(device), 1, "lease", heartbeat_seconds=2.0, patience=5)
    member.stay_away(0.0, 0.0)
    assert member.tick(0.0) == [Connect(), hello(1, device)]
    return member


def a_welcome(device: int = 7) -> Welcome:
    return Welcome(
        device=device, clock="virtual", horizon=9.0, heartbeat_seconds=2.0, patience=5, durable_round=0, elapsed=0.0
    )


def hello(incarnation: int, device: int = 7) -> Action:
    return Send(Hello(device=device, incarnation=incarnation, lease="lease"))


def refused(reason: str) -> Refused:
    return Refused(reason=reason, detail="")


def test_an_unanswered_hello_is_said_ever_later_and_soon_again_after_a_welcome() -> None:
    member = joining()
    waits = []
    for incarnation in range(2, 6):
        now = member.due
        waits.append(now)
        assert member.tick(now) == [Connect(), hello(incarnation)]
    assert waits == [10.0, 30.0, 70.0, 110.0]
    member.welcomed(a_welcome(), 111.0)
    member.heard(111.0)
    assert member.tick(121.0) == [Connect(), hello(6)]
    assert member.due == 131.0


def test_a_device_whose_hello_is_unanswered_connects_anew_when_its_machine_reaches_the_coordinator() -> None:
    member = joining()
    for incarnation in (2, 3, 4):
        assert member.tick(member.due) == [Connect(), hello(incarnation)]
    assert member.due == 110.0
    member.reachable(73.0)
    assert member.due == pytest.approx(73.0 + 2.0 * (7 * 0.6180339887 % 1.0)), "spread over two seconds"
    assert member.tick(73.6) == []
    assert member.tick(75.0) == [Connect(), hello(5)]
    assert member.due == 115.0, "once, if this Hello is lost, too"


def test_a_device_whose_hello_is_on_its_way_does_not_say_another_one_when_its_machine_comes_back() -> None:
    member = joining()
    member.reachable(1.9)
    assert member.due == 10.0
    member = a_member()
    member.said(9.0)
    member.reachable(9.5)
    assert member.due == 10.0, "a member has nothing to look for"


def test_heartbeats_of_devices_that_came_together_are_spread_over_one_interval() -> None:
    due = sorted(a_member(device, 100.0).due - 100.0 for device in range(100))
    assert due[0] == 0.0
    gaps = [later - earlier for earlier, later in zip(due, [*due[1:], 2.0], strict=True)]
    assert min(gaps) > 0.0
    assert max(gaps) < 0.05, "evenly they would be 0.02 s apart"
    member = a_member(0, 100.0)
    assert member.tick(100.0) == [Send(Heartbeat())]
    assert member.due == 102.0


def test_a_device_that_is_refused_before_its_welcome_connects_anew_when_the_coordinator_falls_silent() -> None:
    member = joining()
    assert member.refused(refused("unknown_peer"), 1.0) == []
    assert member.due == 1.25
    member.welcomed(a_welcome(), 1.1)
    member.said(10.0)
    assert member.tick(member.due) == [Connect(), hello(2)], "its connection is dead"


@pytest.mark.parametrize(("reason", "answer"), [("unknown_peer", [hello(2)]), ("lease_unknown", []), ("malformed", [])])
def test_a_member_says_hello_only_to_a_coordinator_that_does_not_know_it(reason: str, answer: list[Action]) -> None:
    assert a_member().refused(refused(reason), 1.0) == answer


def test_a_refusal_for_another_reason_is_not_answered_by_a_hello_before_the_coordinator_was_silent() -> None:
    member = joining()
    assert member.refused(refused("malformed"), 1.0) == []
    assert member.due == 10.0


def test_a_device_that_has_waited_for_days_bears_a_refusal() -> None:
    member = joining()
    while member.due < 200_000.0:
        member.tick(member.due)
    now = member.due
    member.tick(now)
    for reason in ("unknown_peer", "lease_unknown"):
        assert member.refused(refused(reason), now) == []
        assert member.due == now + 40.0


def test_a_hello_that_was_lost_with_a_connection_is_said_again_soon_and_then_ever_later() -> None:
    member = joining()
    member.lost(1.0)
    member.lost(1.2)
    assert member.due == 1.25, "a connection that breaks again and again puts it off no further"
    assert member.tick(1.25) == [hello(2)]
    member.lost(1.5)
    assert member.due == 2.0
    member.welcomed(a_welcome(), 1.6)
    due = member.due
    member.lost(1.7)
    assert member.due == due, "a member hears from its coordinator on the next connection"


def test_a_silence_is_over_once() -> None:
    member = a_member()
    member.fall_silent(50.0, 1.0, until=9.0)
    assert (member.due, member.heard(2.0)) == (51.0, False)
    assert member.reached(8.0, 2.0) == []
    assert member.reached(9.0, 2.0) == [Connect(), hello(2)]
    member.welcomed(a_welcome(), 3.0)
    assert member.reached(10.0, 3.0) == []


def test_a_short_silence_lasts_until_the_coordinator_must_have_noticed_it() -> None:
    member = a_member()
    member.fall_silent(1.0, 1.0, until=math.inf)
    assert member.due == 13.0, "5 heartbeats of 2 s, and one more for its timer"
