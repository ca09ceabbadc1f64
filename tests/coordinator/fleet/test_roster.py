"""The roster: sessions, incarnations, who may be asked, shared connections, and what a checkpoint keeps of devices."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from fedemu.coordinator.fleet.admission import Admission, Quotas
from fedemu.coordinator.fleet.columns import Columns, Mask, state_of
from fedemu.coordinator.fleet.online_times import DAY, OnlineTimes
from fedemu.coordinator.fleet.planned_times import PlannedTimes
from fedemu.coordinator.fleet.roster import Roster
from fedemu.coordinator.settings import Settings
from fedemu.protocol.errors import RefusedError
from fedemu.protocol.ids import AskId, DeviceId, Digest
from fedemu.protocol.messages import BlobRef, Hello

A, B, C, D = b"a", b"b", b"c", b"d"


def roster(devices: int = 4, clock: str = "virtual", resumed: bool = False) -> tuple[Roster, str]:
    """A roster whose indices are all leased to one supervisor, and the token of the lease."""
    settings = Settings(run="test", seed=1, rounds=1, devices=devices, per_round=1, clock=clock)  # type: ignore[arg-type]
    roster = Roster(settings, resumed=resumed)
    lease = roster.enroll(A, devices, None, "", 0.0)
    assert lease is not None
    return roster, lease.token


def chosen(mask: Mask) -> list[int]:
    return np.flatnonzero(mask).tolist()  # type: ignore[no-any-return]


def hello(device: int, lease: str, incarnation: int = 1) -> Hello:
    return Hello(device=device, incarnation=incarnation, lease=lease)


def refused(reason: str) -> Any:
    return pytest.raises(RefusedError, check=lambda error: error.reason == reason)


def test_an_edge_that_was_a_device_too_stays_an_edge_until_it_falls_silent() -> None:
    fleet, lease = roster()
    fleet.station(B, 0.0)
    fleet.hello(B, hello(0, lease), 0.0)
    fleet.hello(C, hello(0, lease, 2), 1.0)
    assert fleet.heard(B, 1.0)
    assert (B, None) in fleet.expire(100.0)
    assert fleet.stations == {}


def test_a_device_that_says_hello_again_still_counts_among_the_connections_of_its_key() -> None:
    settings = Settings(run="test", seed=1, rounds=1, devices=4, per_round=1)
    full = Roster(settings, admission=Admission(4, Quotas(connections=2)))
    lease = full.enroll(A, 4, None, "", 0.0, "key")
    assert lease is not None
    full.hello(B, hello(0, lease.token), 0.0, "key")
    full.hello(B, hello(0, lease.token, 2), 0.0, "key")
    with refused("quota"):
        full.hello(C, hello(1, lease.token), 0.0, "key")


def test_a_machine_enrols_in_as_many_steps_however_many_others_there_are(calls_in: Any) -> None:
    steps = []
    for machines in (20, 200):
        settings = Settings(run="test", seed=1, rounds=1, devices=machines + 1, per_round=1)
        fleet = Roster(settings)
        for machine in range(machines):
            fleet.enroll(str(machine).encode(), 1, None, "", 0.0, "key")
        steps.append(calls_in(partial(fleet.enroll, A, 1, None, "", 0.0, "key")))
    assert steps[0] == steps[1]


def test_the_own_states_of_one_device_are_forgotten_in_as_many_steps_however_many_devices_have_one() -> None:
    steps = []
    for devices in (20, 200):
        columns = Columns(devices)
        columns.states = {DeviceId(device): AskId(1, 0, 0) for device in range(devices)}
        asked = Counted(columns.states)
        columns.states = asked
        assert columns.forget_states(3, 4) == 1
        steps.append(asked.looked_at)
        assert DeviceId(3) not in columns.states
    assert steps == [1, 1]


class Counted(dict[DeviceId, AskId]):
    """Own states that count how many of them somebody has looked at."""

    looked_at = 0

    def __contains__(self, device: object) -> bool:
        self.looked_at += 1
        return super().__contains__(device)

    def __iter__(self) -> Iterator[DeviceId]:
        for device in super().__iter__():
            self.looked_at += 1
            yield device


def test_a_supervisor_whose_connection_is_gone_comes_back_for_its_lease_at_once() -> None:
    made, token = roster()
    made.leases.hung_up(B)
    made.leases.hung_up(A)
    assert made.knows(A), "its session lasts, unless somebody comes for the lease"
    assert made.enroll(B, 2, token, "", 1.0).token == token
    assert (made.knows(A), made.knows(B), made.leases.peers) == (False, True, [B])
    with refused("lease_taken"):
        made.enroll(C, 2, token, "", 2.0)
    made.hello(B, hello(0, token), 3.0)
    made.leases.hung_up(B)
    made.enroll(C, 2, token, "", 4.0)
    assert made.knows(B), "it is a device, too"


def test_a_device_with_a_stolen_lease_and_another_key_takes_nothing() -> None:
    settings = Settings(run="test", seed=1, rounds=1, devices=2, per_round=1)
    fleet = Roster(settings)
    lease = fleet.enroll(A, 2, None, "", 0.0, "key")
    fleet.hello(B, hello(0, lease.token, 5), 0.0, "key")
    with refused("lease_unknown"):
        fleet.hello(C, hello(0, lease.token, 6), 0.0, "another")
    assert fleet.connected == {0: B}


def test_a_device_needs_the_lease_that_holds_its_index() -> None:
    fleet, _ = roster()
    with refused("lease_unknown"):
        fleet.hello(B, hello(0, "another"), 0.0)
    with refused("lease_unknown"):
        fleet.hello(B, hello(4, "another"), 0.0)


def test_a_newer_incarnation_replaces_an_older_one_and_not_the_other_way_round() -> None:
    fleet, lease = roster()
    assert fleet.hello(B, hello(0, lease, 5), 0.0) == (0, None, True)
    assert fleet.hello(C, hello(0, lease, 6), 0.0) == (0, B, True)
    assert fleet.connected == {0: C}
    with refused("superseded"):
        fleet.hello(B, hello(0, lease, 5), 0.0)
    assert fleet.device_of(B) is None


def test_a_second_copy_of_a_hello_changes_nothing() -> None:
    fleet, lease = roster()
    fleet.hello(B, hello(0, lease, 5), 0.0)
    assert fleet.hello(B, hello(0, lease, 5), 0.0) == (0, None, False)
    assert fleet.hello(B, hello(0, lease, 4), 0.0) == (0, None, False)
    assert fleet.columns.incarnation[0] == 5


def test_a_connection_is_one_device_at_a_time() -> None:
    fleet, lease = roster()
    fleet.hello(B, hello(0, lease), 0.0)
    fleet.hello(B, hello(1, lease), 0.0)
    assert (fleet.connected, fleet.device_of(B)) == ({1: B}, 1)
    assert fleet.leave(B, 1.0) == 1
    assert fleet.connected == {}


def test_once_a_session_is_over_any_incarnation_may_come() -> None:
    fleet, lease = roster()
    fleet.hello(B, hello(0, lease, 5), 0.0)
    assert fleet.leave(B, 1.0) == 0
    assert fleet.connected == {}
    fleet.hello(C, hello(0, lease, 1), 2.0)
    assert fleet.connected == {0: C}


def test_only_its_own_supervisor_can_tell_of_a_devices_death_and_only_of_the_life_that_is_connected() -> None:
    settings = Settings(run="test", seed=1, rounds=1, devices=4, per_round=1)
    fleet = Roster(settings)
    lease = fleet.enroll(A, 3, None, "", 0.0).token
    fleet.enroll(D, 1, None, "", 0.0)
    fleet.hello(B, hello(0, lease, 5), 0.0)
    assert fleet.died(0, 5, C) is None
    assert fleet.died(0, 5, D) is None
    assert fleet.died(0, 4, A) is None
    assert fleet.died(9, 5, A) is None
    assert fleet.died(0, 5, A) == 0
    assert fleet.connected == {}
    assert fleet.died(0, 5, A) is None


def test_a_device_that_is_silent_for_too_long_is_gone() -> None:
    fleet, lease = roster()
    fleet.hello(B, hello(0, lease), 0.0)
    assert fleet.heard(B, 5.0)
    assert fleet.expire(10.0) == [(A, None)]
    assert fleet.leases.peers == []
    assert fleet.expire(14.9) == []
    assert fleet.expire(15.0) == [(B, 0)]
    assert not fleet.heard(B, 15.0)


def test_one_connection_may_enrol_and_be_a_device() -> None:
    settings = Settings(run="test", seed=1, rounds=1, devices=1, per_round=1)
    fleet = Roster(settings)
    lease = fleet.enroll(A, 1, None, "", 0.0)
    assert lease is not None
    fleet.hello(A, hello(0, lease.token), 0.0)
    assert fleet.peers == [A]
    assert fleet.died(0, 1, A) == 0
    assert fleet.heard(A, 1.0)


def test_eligible_are_those_on_line_and_not_away_whether_connected_or_not() -> None:
    fleet, _ = roster(4)
    fleet.announced.announce(0, OnlineTimes(DAY, [(0.0, 50.0)]))
    fleet.announced.announce(1, OnlineTimes(DAY, [(40.0, 90.0)]))
    fleet.announced.announce(2, OnlineTimes(DAY, [(0.0, 90.0)]))
    fleet.columns.away[2] = 45.0
    assert fleet.missing() == [3]
    assert [chosen(fleet.eligible(time)) for time in (0.0, 40.0, 45.0, 50.0, 90.0)] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [1, 2],
        [],
    ]
    assert chosen(fleet.online(0.0)) == [0, 2]
    assert fleet.next_arrival(-5.0) == 0.0
    assert fleet.next_arrival(5.0, [DeviceId(1), DeviceId(2)]) == 40.0
    assert fleet.next_arrival(5.0, [DeviceId(2)]) == 45.0
    assert fleet.next_arrival(90.0) is None
    fleet.columns.away[2] = math.inf
    assert fleet.next_arrival(5.0, [DeviceId(2)]) is None


def test_a_lost_device_is_not_asked_before_it_says_hello() -> None:
    fleet, lease = roster(2)
    for device in range(2):
        fleet.announced.announce(device, OnlineTimes(50.0, [(0.0, math.inf)]))
    fleet.columns.lost[0] = True
    assert (chosen(fleet.eligible(0.0)), chosen(fleet.online(0.0))) == ([1], [0, 1])
    assert fleet.next_arrival(0.0, [DeviceId(0)]) is None
    assert (fleet.lacking(60.0), fleet.used_up(60.0), fleet.used_up(40.0)) == ([1], [1], [])
    fleet.enroll(A, 2, lease, "", 0.0)
    assert chosen(fleet.eligible(0.0)) == [1], "its machine is back, and not the device"
    fleet.hello(B, hello(0, lease), 0.0)
    assert chosen(fleet.eligible(0.0)) == [0, 1]


def test_a_lost_device_that_sleeps_may_be_asked_when_its_machine_is_back() -> None:
    fleet = Roster(
        Settings(run="test", seed=1, rounds=1, devices=4, per_round=1), planned=PlannedTimes(4, intervals=None)
    )
    leases = [fleet.enroll(peer, 2, None, "", 0.0).token for peer in (A, B)]
    fleet.columns.lost[:] = True
    fleet.leave(B, 1.0)
    assert fleet.joined == 4, "a machine that is away leaves no trace in a row"
    assert fleet.reachable() == 2
    fleet.enroll(C, 2, leases[1], "", 2.0)
    assert chosen(fleet.eligible(0.0)) == [2, 3]
    assert fleet.lacking(1e9) == [], "it is planned when they are on-line"


def test_under_the_wall_clock_on_line_means_connected() -> None:
    fleet, lease = roster(3, "wall")
    fleet.hello(B, hello(2, lease), 0.0)
    fleet.hello(C, hello(0, lease), 0.0)
    assert chosen(fleet.eligible(0.0)) == [0, 2]
    assert fleet.missing() == [1]
    fleet.leave(B, 1.0)
    assert (chosen(fleet.eligible(0.0)), fleet.missing()) == ([0], [1])


def test_after_a_restart_under_the_wall_clock_a_supervisor_stands_for_its_devices() -> None:
    fleet, _ = roster(3, "wall", resumed=True)
    assert fleet.missing() == []
    fleet.leave(A, 1.0)
    assert fleet.missing() == [0, 1, 2]


def blob(key: str, letter: str, size: int) -> BlobRef:
    return BlobRef(key=key, digest=letter * 64, size=size)


def test_a_device_is_charged_once_for_the_same_blob_under_one_key() -> None:
    columns = Columns(4)
    first = [blob("model", "a", 100), blob("generator", "b", 7)]
    second = [blob("model", "c", 100), blob("generator", "b", 7)]
    device = DeviceId(1)
    assert columns.download_bytes(device, first) == 107
    columns.charge(device, first)
    assert [columns.download_bytes(device, shared) for shared in (first, second)] == [0, 100]
    columns.charge(device, second)
    assert columns.download_bytes(device, first) == 100


def test_the_records_of_devices_survive_json() -> None:
    columns = Columns(4)
    columns.away[:2] = math.inf, 0.1 + 0.2
    columns.states[DeviceId(2)] = AskId(3, 1, 0)
    for device in (0, 3):
        columns.charge(DeviceId(device), [blob("model", "a", 1), blob("control", "b", 1)])
    columns.charge(DeviceId(3), [blob("model", "c", 1)])
    record = json.loads(json.dumps(columns.to_record()))
    again = Columns(4)
    again.restore(record)
    assert again.away.tolist() == [math.inf, 0.1 + 0.2, 0.0, 0.0]
    assert again.states == {2: AskId(3, 1, 0)}
    assert again.charged[DeviceId(3)] == {"model": Digest("c" * 64), "control": Digest("b" * 64)}
    assert again.to_record() == columns.to_record()
    assert [state_of(record, device) for device in range(4)] == [None, None, "3.1.0", None]


def test_a_checkpoint_has_nothing_of_devices_that_were_never_asked() -> None:
    few, many = Columns(4), Columns(100_000)
    for columns in (few, many):
        columns.away[2] = 7.5
        columns.charge(DeviceId(3), [blob("model", "a", 1)])
    assert json.dumps(many.to_record()) == json.dumps(few.to_record())


def test_the_records_of_an_earlier_version_are_read() -> None:
    record = {"away": [0.0, 5.0], "states": ["2.0.1", None], "charged": [{"model": 0}, {}], "digests": ["a" * 64]}
    columns = Columns(2)
    columns.restore(record)
    assert columns.away.tolist() == [0.0, 5.0]
    assert columns.states == {0: AskId(2, 0, 1)}
    assert columns.charged == {0: {"model": "a" * 64}}
    assert [state_of(record, device) for device in range(3)] == ["2.0.1", None, None]


def shared(*channels: bytes, connection: bytes = A) -> tuple[Roster, str]:
    """A roster whose only supervisor is on ``connection``, and shares it with ``channels``."""
    members, lease = roster()
    members.connection_of = lambda peer: connection if peer in channels else peer
    return members, lease


def test_a_shared_connection_speaks_for_the_devices_of_its_own_leases_and_for_no_others() -> None:
    members, lease = shared(b"channel 1", connection=B)
    with refused("lease_unknown"):
        members.hello(b"channel 1", hello(0, lease), 0.0)
    members, lease = shared(b"channel 1", connection=A)
    assert members.hello(b"channel 1", hello(0, lease), 0.0).device == 0


def test_a_device_without_a_supervisor_comes_back_on_the_shared_connection_on_which_it_enrolled() -> None:
    channels = {b"first": A, b"second": A, b"elsewhere": B, b"third": B}
    members = Roster(Settings(run="test", seed=1, rounds=1, devices=2, per_round=1))
    members.connection_of = lambda peer: channels.get(peer, peer)
    lease = members.enroll(b"first", 1, None, "", 0.0).token
    members.hello(b"first", hello(0, lease), 0.0)
    members.leave(b"first", 1.0)
    with refused("lease_unknown"):
        members.hello(b"elsewhere", hello(0, lease, 2), 1.0)
    assert members.hello(b"second", hello(0, lease, 2), 1.0).device == 0
    members.leave(b"second", 2.0)
    members.enroll(b"third", 1, lease, "", 2.0)  # the edge has a new connection
    assert members.hello(b"third", hello(0, lease, 3), 2.0).device == 0


def test_channels_live_as_long_as_their_connection() -> None:
    members, lease = shared(b"channel 1", b"channel 2")
    for number, channel in enumerate((b"channel 1", b"channel 2")):
        members.hello(channel, hello(number, lease), 0.0)
    assert members.heard(A, 8.0)
    assert members.expire(12.0) == [], "a channel says nothing itself"
    assert members.expire(18.5) == [(b"channel 1", DeviceId(0)), (b"channel 2", DeviceId(1)), (A, None)]
    assert not members.knows(b"channel 1")
    assert not members.connected


def test_a_channel_that_is_closed_leaves_the_others_alone() -> None:
    members, lease = shared(b"channel 1", b"channel 2")
    for number, channel in enumerate((b"channel 1", b"channel 2")):
        members.hello(channel, hello(number, lease), 0.0)
    assert members.leave_all(b"channel 1", 1.0) == [(b"channel 1", DeviceId(0))]
    assert list(members.connected) == [1]
    assert members.heard(b"channel 2", 1.0)
    assert members.leave_all(A, 2.0) == [(b"channel 2", DeviceId(1)), (A, None)]


def test_a_connection_is_watched_as_long_as_a_channel_of_it_has_a_session() -> None:
    members = Roster(Settings(run="test", seed=1, rounds=1, devices=4, per_round=1))
    members.connection_of = lambda peer: B if peer == b"channel" else peer
    lease = members.enroll(A, 2, None, "", 0.0)
    members.hello(B, hello(0, lease.token), 0.0)
    members.enroll(b"channel", 2, None, "", 0.0)
    members.hello(C, hello(0, lease.token, 2), 0.0)
    assert members.heard(b"channel", 1.0)
    assert (b"channel", None) in members.expire(100.0)
    assert members.leases.peers == []


def test_an_edge_has_a_place_as_long_as_somebody_behind_it_has_one() -> None:
    members, lease = shared(b"channel", connection=B)
    members.leave(A, 0.0)
    members.station(B, 0.0)
    assert not members.has_place(B)
    members.enroll(b"channel", 2, lease, "", 0.0)
    assert members.has_place(B)
    members.leave(b"channel", 1.0)
    assert not members.has_place(B)
    members.keepers.add(B)
    assert members.has_place(B)
    members.leave(B, 2.0)
    assert (members.has_place(B), members.keepers) == (False, set())
