"""Quotas of keys, and what one connection may send and get: exact numbers, and what an honest machine never meets."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedemu.coordinator.fleet.admission import (
    MOST_METERS,
    REPEATS,
    SPARE_BYTES,
    STRANGERS_BURST,
    STRANGERS_RATE,
    STRANGERS_UNIT,
    Admission,
    Quotas,
)
from fedemu.coordinator.fleet.roster import Roster
from fedemu.coordinator.settings import Settings
from fedemu.protocol.errors import RefusedError
from fedemu.protocol.messages import Hello

KEY, OTHER = "K" * 40, "O" * 40
MIB = 2**20


def refused(reason: str, text: str) -> Any:
    return pytest.raises(RefusedError, match=text, check=lambda error: error.reason == reason)


def sent(admission: Admission, peer: bytes, count: int, now: float, size: int = 50, known: bool = True) -> int:
    """How many of ``count`` messages are taken."""
    return sum(admission.may_send(peer, size, known, now) for _ in range(count))


def test_a_connection_may_send_a_burst_and_then_so_many_a_second() -> None:
    admission = Admission(10, Quotas(messages_per_second=100.0))
    assert sent(admission, b"a", 2000, 0.0) == 1040
    assert sent(admission, b"a", 2000, 1.0) == 100
    assert sent(admission, b"b", 1, 1.0) == 1, "every connection has a measure of its own"
    admission.forget(b"a")
    assert sent(admission, b"a", 2000, 1.0) == 1040


def test_a_stranger_may_send_little() -> None:
    admission = Admission(10)
    assert sent(admission, b"a", 1000, 0.0, known=False) == STRANGERS_BURST
    assert sent(admission, b"a", 1000, 2.0, known=False) == 2 * STRANGERS_RATE
    assert sent(admission, b"a", 1000, 2.0) == 1000, "with a session it may send more"


def test_long_messages_of_a_stranger_count_as_several() -> None:
    admission = Admission(10)
    assert sent(admission, b"a", 1000, 0.0, size=MIB, known=False) == 2
    assert sent(admission, b"b", 1000, 0.0, size=2 * STRANGERS_UNIT, known=False) == STRANGERS_BURST // 2
    assert sent(admission, b"c", 1000, 0.0, size=STRANGERS_UNIT, known=False) == STRANGERS_BURST
    assert sent(admission, b"c", 1000, 1.0, size=MIB, known=False) == 0, "a long one has to wait longer"


def test_a_connection_may_send_its_reply_a_few_times_and_some_bytes_more() -> None:
    admission = Admission(10)
    assert sent(admission, b"a", 1000, 0.0, size=MIB) == SPARE_BYTES // MIB
    admission.asked(up=10 * MIB, down=0)
    assert sent(admission, b"a", 1000, 0.0, size=10 * MIB) == REPEATS
    for _ in range(5):
        admission.asked(up=10 * MIB, down=0)
    most = (SPARE_BYTES + REPEATS * 10 * MIB) // MIB
    assert sent(admission, b"a", 1000, 0.0, size=MIB) == most, "what was not sent does not pile up"
    assert sent(admission, b"a", 1000, 3.0, size=MIB) == 3


def test_a_connection_may_get_each_blob_a_few_times_and_some_bytes_more() -> None:
    admission = Admission(10)
    admission.asked(up=0, down=100 * MIB)
    asked = (MIB, 16 * MIB)  # of which 1 MiB is sent
    got = sum(admission.may_get(b"a", asked[number % 2], 0.0) for number in range(10_000))
    assert got == (SPARE_BYTES + REPEATS * 100 * MIB) // MIB
    assert sent(admission, b"a", 1, 0.0) == 1


def test_an_honest_machine_with_a_thousand_devices_meets_no_limit() -> None:
    """It enrols, fetches a model of 100 MiB in each of 50 rounds, sees all its devices die, and each device replies."""
    admission = Admission(1000)
    admission.asked(0, 300 * MIB)
    now = 0.0
    assert all(admission.may_get(b"machine", MIB, now) for _ in range(300))
    for _ in range(50):
        admission.asked(100 * MIB, 100 * MIB)
        now += 0.2
        assert all(admission.may_get(b"machine", MIB, now) for _ in range(100))
        assert sent(admission, b"machine", 100 + 3, now) == 103
        assert sent(admission, b"device", 2, now, size=100 * MIB) == 2
        assert sent(admission, b"device", 4, now) == 4
    assert sent(admission, b"machine", 1000, now) == 1000


def test_the_meters_of_connections_are_bounded() -> None:
    admission = Admission(1)
    for peer in range(MOST_METERS + 10):
        admission.may_send(peer.to_bytes(4, "big"), 10, False, 0.0)
    assert len(admission._meters) == MOST_METERS


def a_roster(quotas: Quotas, devices: int = 6) -> Roster:
    settings = Settings(run="test", seed=1, rounds=1, devices=devices, per_round=1)
    return Roster(settings, admission=Admission(devices, quotas))


def test_a_key_gets_as_many_devices_as_its_quota_and_then_a_sentence() -> None:
    roster = a_roster(Quotas(devices=4))
    assert len(roster.enroll(b"a", 3, None, "", 0.0, KEY)) == 3
    assert len(roster.enroll(b"b", 3, None, "", 0.0, KEY)) == 1
    with refused("quota", "This machine's key holds 4 devices, and may not have more; start fewer, or raise runtime"):
        roster.enroll(b"c", 1, None, "", 0.0, KEY)
    assert not roster.knows(b"c")
    assert len(roster.enroll(b"d", 3, None, "", 0.0, OTHER)) == 2


def test_devices_whose_machine_is_away_for_long_or_was_revoked_do_not_count_in_the_quota_of_its_key() -> None:
    roster = a_roster(Quotas(devices=4), devices=10)
    roster.enroll(b"a", 4, None, "", 0.0, KEY).fresh = False  # one of its devices has come
    other = roster.enroll(b"o", 2, None, "", 0.0, OTHER)
    roster.leave_all(b"a", 1.0)
    roster.leave_all(b"o", 1.0)
    with refused("fleet_full", "holds 4 devices, and may not have more, but some of them are away, .* within 59 s"):
        roster.enroll(b"b", 4, None, "", 2.0, KEY)
    assert len(roster.enroll(b"c", 4, None, "", 2.0 + roster.leases.hold, KEY)) == 4
    roster.leave_all(b"c", -math.inf)
    assert len(roster.enroll(b"d", 4, None, "", 3.0 + roster.leases.hold, KEY)) == 4
    assert roster.enroll(b"o", 2, other.token, "", 200.0, OTHER) is other, "nobody has needed its places"
    roster = a_roster(Quotas(devices=4))
    away = roster.enroll(b"a", 2, None, "", 0.0, KEY)
    roster.leave_all(b"a", 1.0)
    assert len(roster.enroll(b"b", 2, None, "", 2.0 + roster.leases.hold, KEY)) == 2
    assert roster.enroll(b"c", 2, away.token, "", 200.0, KEY) is away, "nobody has needed its places"


def test_a_machine_that_lost_its_lease_waits_for_its_places_and_one_whose_key_is_busy_elsewhere_does_not() -> None:
    roster = a_roster(Quotas(), devices=4)
    for peer, count in ((b"a", 3), (b"b", 1)):
        roster.enroll(peer, count, None, "", 0.0, KEY).fresh = False
    with refused("quota", "holds 4 devices"):
        roster.enroll(b"c", 3, None, "", 1.0, KEY)
    roster.leases.hung_up(b"a")  # nobody knows yet that it has not only lost its connection
    with refused("fleet_full", "within 60 s"):
        roster.enroll(b"c", 3, None, "", 1.0, KEY)
    roster.leave_all(b"a", 11.0)
    with refused("fleet_full", "within 40 s"):
        roster.enroll(b"c", 3, None, "", 31.0, KEY)
    assert len(roster.enroll(b"c", 3, None, "", 12.0 + roster.leases.hold, KEY)) == 3
    with refused("quota", "holds 4 devices"):
        roster.enroll(b"d", 1, None, "", 100.0, KEY)


def test_a_lease_whose_devices_stay_without_their_machine_is_not_waited_for() -> None:
    roster = a_roster(Quotas(), devices=1)
    lease = roster.enroll(b"a", 1, None, "", 0.0, KEY)
    roster.hello(b"device", Hello(device=0, incarnation=1, lease=lease.token), 0.0, KEY)
    roster.leave(b"a", 1.0)
    with refused("fleet_full", "within 1 s"):
        roster.enroll(b"b", 1, None, "", 1.0 + roster.leases.hold, KEY)
    with refused("quota", "holds 1 devices"):
        roster.enroll(b"b", 1, None, "", 2.0 + roster.leases.hold, KEY)


def test_a_key_has_as_many_sessions_as_its_quota_and_places_get_free_when_they_end() -> None:
    roster = a_roster(Quotas(connections=2))
    lease = roster.enroll(b"a", 6, None, "", 0.0, KEY)
    roster.hello(b"b", Hello(device=0, incarnation=1, lease=lease.token), 0.0, KEY)
    hello = Hello(device=1, incarnation=1, lease=lease.token)
    with refused("quota", "This machine's key has 2 connections, and may not have more"):
        roster.hello(b"c", hello, 0.0, KEY)
    roster.leave(b"b", 1.0)
    roster.hello(b"c", hello, 1.0, KEY)
    assert [peer for peer, _ in roster.expire(100.0)] == [b"a", b"c"]
    roster.hello(b"d", hello, 100.0, KEY)
    again = Hello(device=1, incarnation=2, lease=lease.token)
    roster.hello(b"e", again, 100.0, KEY)
    roster.hello(b"e", again, 100.0, KEY)
    assert roster.admission._connections == {KEY: 1}, "a session that was replaced is over, and a copy is none"


def test_a_machine_that_is_refused_keeps_the_session_that_it_had_and_gets_none() -> None:
    roster = a_roster(Quotas(devices=6, connections=2))
    lease = roster.enroll(b"a", 6, None, "", 0.0, KEY)
    for sessions in (1, 2):
        with refused("quota", "This machine's key holds 6 devices"):
            roster.enroll(b"b", 1, None, "", 0.0, KEY)
        assert roster.admission._connections == {KEY: sessions}
        roster.hello(b"b", Hello(device=0, incarnation=1, lease=lease.token), 0.0, KEY)
    with refused("quota", "This machine's key has 2 connections"):
        roster.station(b"c", 0.0, KEY)


def test_without_keys_there_are_no_quotas() -> None:
    roster = a_roster(Quotas(devices=1, connections=1))
    assert len(roster.enroll(b"a", 3, None, "", 0.0)) == 3
    assert len(roster.enroll(b"b", 3, None, "", 0.0)) == 3


def test_a_new_connection_of_the_same_device_counts_on() -> None:
    admission = Admission(10, Quotas(messages_per_second=100.0))
    admission.recognise(b"a", 3, 0.0)
    assert sent(admission, b"a", 2000, 0.0) == 1040
    admission.forget(b"a")
    assert sent(admission, b"b", 2000, 0.0) == 1040, "nobody knows yet whose it is"
    admission.recognise(b"b", 3, 1.0)
    assert sent(admission, b"b", 2000, 1.0) == 100
    admission.recognise(b"c", 4, 1.0)
    assert sent(admission, b"c", 2000, 1.0) == 1040, "it belongs to another device"


def test_a_machine_and_a_device_that_come_back_count_on() -> None:
    roster = a_roster(Quotas(messages_per_second=100.0))
    lease = roster.enroll(b"a", 6, None, "", 0.0)
    roster.hello(b"b", Hello(device=0, incarnation=1, lease=lease.token), 0.0)
    for peer in (b"a", b"b"):
        assert sent(roster.admission, peer, 2000, 0.0) > 1000
        roster.leave(peer, 0.0)
    roster.enroll(b"c", 6, lease.token, "", 1.0)
    roster.hello(b"d", Hello(device=0, incarnation=2, lease=lease.token), 1.0)
    assert [sent(roster.admission, peer, 2000, 1.0) for peer in (b"c", b"d")] == [100, 100]


def test_what_an_owner_has_used_up_is_forgotten_when_it_is_little() -> None:
    admission = Admission(10)
    for device in range(10):
        admission.recognise(bytes([device]), device, 0.0)
        sent(admission, bytes([device]), 20, 0.0)
        admission.forget(bytes([device]))
    assert not admission._owners


def test_a_message_may_count_as_several() -> None:
    admission = Admission(10, Quotas(messages_per_second=100.0))
    assert sum(admission.may_send(b"a", 10, True, 0.0, messages=65.0) for _ in range(100)) == 1040 // 65
