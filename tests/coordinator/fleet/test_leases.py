"""Leases: which indices machines get, keep, lose and get back, and what the journal keeps of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedemu.coordinator.fleet.columns import Mask
from fedemu.coordinator.fleet.leases import Lease, Leases, UnfitChangeError, compress
from fedemu.protocol.errors import RefusedError
from fedemu.protocol.ids import DeviceId

A, B, C, D = b"a", b"b", b"c", b"d"


def tokens() -> Callable[[], str]:
    numbers = iter(range(100))
    return lambda: f"lease-{next(numbers)}"


def leases(devices: int = 10, **more: Any) -> Leases:
    return Leases(devices, hold=60.0, new_token=tokens(), **more)


def used(lease: Lease) -> Lease:
    """A lease of which a device has come."""
    lease.fresh = False
    return lease


def chosen(mask: Mask) -> list[int]:
    return np.flatnonzero(mask).tolist()  # type: ignore[no-any-return]


def refused(reason: str) -> Any:
    return pytest.raises(RefusedError, check=lambda error: error.reason == reason)


def test_the_lowest_free_indices_are_granted() -> None:
    grants = leases()
    assert [
        lease.ranges for peer, count in ((A, 3), (B, 4)) if (lease := grants.enroll(peer, count, None, "", 0.0))
    ] == [
        ((0, 3),),
        ((3, 7),),
    ]
    last = grants.enroll(C, 5, None, "", 0.0)
    assert last is not None
    assert last.ranges == ((7, 10),)


def test_devices_beyond_the_fleet_are_refused() -> None:
    grants = leases(2)
    grants.enroll(A, 2, None, "", 0.0)
    with refused("fleet_full"):
        grants.enroll(B, 1, None, "", 0.0)


def test_asking_twice_on_one_connection_gives_one_lease() -> None:
    grants = leases()
    assert grants.enroll(A, 3, None, "", 0.0) is grants.enroll(A, 3, None, "", 1.0)
    assert grants.granted == 3


def test_a_live_lease_is_not_given_to_another() -> None:
    grants = leases()
    lease = grants.enroll(A, 3, None, "a-host", 0.0)
    assert lease is not None
    with pytest.raises(RefusedError, match=r"held by a live supervisor on a-host\.") as told:
        grants.enroll(B, 3, lease.token, "", 1.0)
    assert told.value.reason == "lease_taken"
    assert grants.enroll(A, 3, lease.token, "", 1.0) is lease


def test_a_supervisor_that_comes_back_for_another_lease_leaves_its_own() -> None:
    grants = leases()
    first, second = (grants.enroll(peer, 3, None, "", 0.0) for peer in (A, B))
    grants.leave(B, 1.0)
    assert grants.enroll(A, 3, second.token, "", 2.0) is second
    assert (grants.holder(DeviceId(0)), grants.holder(DeviceId(3)), grants.peers) == (None, A, [A])
    assert grants.enroll(C, 3, first.token, "", 3.0) is first


def test_machines_that_are_away_or_hold_devices_are_named_in_order() -> None:
    grants = leases()
    for peer, host in ((A, "beta"), (B, "alpha"), (C, ""), (D, "gamma")):
        grants.enroll(peer, 2, None, host, 0.0)
    for peer in (A, B, C):
        grants.leave(peer, 1.0)
    assert grants.away == ("alpha", "beta")
    assert grants.hosts_of(map(DeviceId, (0, 1, 2, 5, 9))) == ("alpha", "beta")


def test_a_supervisor_that_returns_with_its_lease_gets_it_back() -> None:
    journal: list[Any] = []
    grants = leases(journal=journal.append)
    lease = grants.enroll(A, 3, None, "", 0.0)
    assert lease is not None
    grants.leave(A, 1.0)
    assert grants.enroll(B, 3, lease.token, "", 100.0) is lease
    assert len(journal) == 1, "nothing of the lease has changed"
    assert grants.peers_of([DeviceId(0), DeviceId(2), DeviceId(9)]) == {B: None}


def test_a_lease_of_which_no_device_has_come_is_over_with_the_goodbye_of_its_supervisor() -> None:
    journal: list[Any] = []
    grants = leases(6, journal=journal.append)
    fresh, kept = grants.enroll(A, 3, None, "", 0.0), used(grants.enroll(B, 3, None, "", 0.0))
    for peer in (A, B, C):
        grants.renounce(peer)
        assert grants.of_peer(peer) is (kept if peer == B else None)
        grants.leave(peer, 1.0)
    again = Leases(6, hold=60.0)
    again.replay(journal, left=2.0)
    assert again.granted == 3, "a coordinator that starts anew knows it, too"
    assert again.enroll(C, 3, None, "", 2.0).ranges == fresh.ranges
    assert again.enroll(B, 3, kept.token, "", 2.0).ranges == kept.ranges


def test_an_unknown_lease_is_refused() -> None:
    with refused("lease_unknown"):
        leases().enroll(A, 3, "of another run", "", 0.0)


def test_an_abandoned_lease_is_given_away_only_when_indices_run_out_and_its_hold_is_over() -> None:
    connected: set[int] = set()
    grants = leases(4, present=connected.__contains__)
    first = used(grants.enroll(A, 4, None, "", 0.0))
    grants.leave(A, 10.0)
    with pytest.raises(RefusedError, match="but machines that are away lose theirs within 1 s"):
        grants.enroll(B, 2, None, "", 70.0)
    connected.add(3)
    with refused("fleet_full"):
        grants.enroll(B, 2, None, "", 70.1)
    connected.clear()
    second = used(grants.enroll(B, 2, None, "", 70.1))
    assert second.ranges == ((0, 2),)
    assert not grants.holds(first.token, 0)
    grants.leave(B, 80.0)
    third = grants.enroll(C, 2, None, "", 200.0)
    assert (third.ranges, grants.enroll(B, 2, second.token, "", 201.0)) == (((2, 4),), second)


def test_a_machine_that_fits_into_abandoned_places_does_not_wait_for_those_of_others_who_are_away() -> None:
    grants = leases(6)
    for peer, left in ((A, 0.0), (B, 50.0), (C, 30.0)):
        used(grants.enroll(peer, 2, None, "", 0.0))
        grants.leave(peer, left)
    with pytest.raises(RefusedError, match="lose theirs within 49 s"):
        grants.enroll(D, 3, None, "", 61.0)
    assert grants.enroll(D, 2, None, "", 61.0).ranges == ((0, 2),)
    grants = leases(4)
    for peer, left in ((A, 0.0), (B, 50.0)):
        used(grants.enroll(peer, 2, None, "", 0.0))
        grants.leave(peer, left)
    assert grants.enroll(D, 2, None, "", 61.0).ranges == ((0, 2),)


@pytest.mark.parametrize("killed", [False, True])
def test_a_lease_whose_machine_left_before_any_of_its_devices_came_goes_to_the_next_at_once(killed: bool) -> None:
    """The machine may have been ended before it had written the lease into its state folder: then it asks as anew."""
    written: list[Any] = []
    grants = leases(4, journal=written.append)
    first = grants.enroll(A, 2, None, "", 0.0)
    used(grants.enroll(B, 2, None, "", 0.0))
    grants.hung_up(B)
    with refused("fleet_full"):
        grants.enroll(C, 2, None, "", 1.0)
    if killed:
        grants.hung_up(A)
    else:
        grants.leave(A, 1.0)
    assert grants.enroll(C, 2, None, "", 1.1).ranges == ((0, 2),)
    assert {"release": first.token} in written
    with refused("lease_unknown"):
        grants.enroll(A, 2, first.token, "", 2.0)
    again = Leases(4, hold=60.0)
    again.replay(written, left=0.0)
    with pytest.raises(RefusedError, match="lose theirs within 59 s"):
        again.enroll(D, 2, None, "", 1.0)


def test_a_lease_belongs_to_the_key_that_got_it() -> None:
    grants = leases()
    lease = grants.enroll(A, 3, None, "", 0.0, "key")
    assert (grants.holds(lease.token, 0, "key"), grants.holds(lease.token, 0, "another")) == (True, False)
    assert (grants.held_by("key"), grants.held_by("another")) == (3, 0)
    grants.leave(A, 1.0)
    with pytest.raises(RefusedError, match="This lease belongs to another machine's key"):
        grants.enroll(B, 3, lease.token, "", 2.0, "another")
    assert grants.enroll(C, 3, lease.token, "", 2.0, "key") is lease


def test_a_lease_that_was_granted_without_keys_belongs_to_the_first_key_that_comes_back_for_it() -> None:
    written: list[Any] = [{"grant": "old", "ranges": [[0, 3]], "host": ""}]
    grants = leases(journal=written.append)
    grants.replay(written, left=0.0)
    for peer, key in ((A, "key"), (B, ""), (C, "key")):
        grants.enroll(peer, 3, "old", "", 0.0, key)
        assert not grants.holds("old", 0, "another")
        assert (grants.held_by("key"), grants.held_by("")) == (3, 0)
        grants.leave(peer, 1.0)
    again = leases()
    again.replay(written, left=0.0)
    assert (again.held_by("key"), again.changes) == (3, grants.changes) == (3, 2)
    with refused("lease_unknown"):
        again.enroll(C, 3, "old", "", 2.0, "another")


def test_a_journal_brings_the_leases_back() -> None:
    journal: list[Any] = []
    grants = leases(6, journal=lambda entry: journal.append(json.loads(json.dumps(entry))))
    for peer, count in ((A, 2), (B, 3), (C, 1)):
        grants.enroll(peer, count, None, "host", 0.0, "key")
    grants.leave(B, 0.0)
    grants.enroll(D, 2, None, "host", 61.0)
    again = Leases(6, hold=60.0)
    again.replay(journal, left=0.0)
    assert again.holds("lease-0", 1)
    holds = [again.holds(*held) for held in (("lease-1", 2), ("lease-3", 2), ("lease-3", 3), ("lease-2", 5, "key"))]
    assert holds == [False, True, True, True]
    with refused("lease_unknown"):
        again.enroll(C, 1, "lease-2", "", 0.0, "another")
    back = again.enroll(C, 1, "lease-2", "", 0.0, "key")
    assert back is not None
    assert back.ranges == ((5, 6),)
    assert chosen(again.held()) == [5]
    fresh = again.enroll(A, 1, None, "", 0.0)
    assert fresh is not None
    assert fresh.ranges == ((4, 5),)
    assert again.enroll(D, 4, None, "", 61.0).ranges == ((0, 4),), "those that were away were so since the replay"
    assert chosen(again.held()) == list(range(6))


@pytest.mark.parametrize("seed", range(3))
def test_the_journal_of_strangers_who_come_and_go_stays_short_and_a_kill_at_any_moment_loses_no_lease(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.coordinator.fleet.leases.SPARE_LINES", 5)
    lines: list[Any] = []

    def renew(entry: Any) -> None:
        lines[:] = [entry]

    grants = Leases(8, hold=60.0, journal=lines.append, renew=renew)
    draws, standing, granted_by = np.random.default_rng(seed), dict[str, Any](), np.full(8, -1)
    owner = used(grants.enroll(A, 2, None, "host", 0.0))
    standing[owner.token], granted_by[:2] = owner.ranges, 0
    for moment in range(200):
        stranger, before = b"%d" % draws.integers(4), grants.changes
        if (lease := grants.of_peer(stranger)) is not None:
            grants.renounce(stranger)
            del standing[lease.token]
        elif grants.granted < 8:
            lease = grants.enroll(stranger, int(draws.integers(1, 4)), None, "host", float(moment), "key")
            standing[lease.token] = lease.ranges
            granted_by[list(lease)] = before
        assert len(lines) <= 5 + 2 * len(standing)
        again = Leases(8, hold=60.0)
        again.replay(json.loads(json.dumps(lines)), left=0.0)
        assert {token: found.ranges for token in standing if (found := again.of_token(token))} == standing
        totals = (again.granted, again.changes, again.held_by("key"))
        assert totals == (grants.granted, grants.changes, grants.held_by("key"))
        for changes in (0, 1, before, before + 1):
            assert again.granted_since(changes) == compress(np.flatnonzero(granted_by >= changes))
    assert grants.changes > 100


def test_after_a_journal_that_was_removed_no_new_lease_looks_like_one_of_before() -> None:
    lines: list[Any] = []

    def renew(entry: Any) -> None:
        lines[:] = [entry]

    known = 5
    grants = Leases(8, hold=60.0, journal=lines.append, renew=renew)
    grants.go_on_from(known)
    grants.enroll(A, 3, None, "", 0.0)
    again = Leases(8, hold=60.0, journal=lines.append, renew=renew)
    again.replay(json.loads(json.dumps(lines)), left=0.0)
    assert (again.changes, again.granted_since(known)) == (known + 1, ((0, 3),))
    again.go_on_from(known)
    assert len(lines) == 2, "a journal that knows them all stays as it is"


GRANT = {"grant": "a", "ranges": [[0, 3]], "host": ""}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"release": "b"},
        {"release": ["a"]},
        {"owned": "a"},
        {"owned": "b", "key": ""},
        {"grant": "b", "ranges": [[3, 4]]},
        {"grant": "b", "ranges": [3], "host": ""},
        {"grant": "b", "ranges": [], "host": ""},
        {"grant": "b", "ranges": [[2, 4]], "host": ""},
        {"grant": "b", "ranges": [[4, 5], [3, 4]], "host": ""},
        {"grant": "b", "ranges": [[3, 11]], "host": ""},
        {"grant": "a", "ranges": [[3, 4]], "host": ""},
        {"changes": 4, "leases": [], "granted": []},
    ],
)
def test_a_change_that_does_not_fit_those_before_it_is_named(change: Any) -> None:
    with pytest.raises(UnfitChangeError, check=lambda error: error.number == 2):
        leases().replay([GRANT, change], left=0.0)


@pytest.mark.parametrize("changes", [-1, 2**80, "4"])
def test_a_number_of_changes_that_cannot_be_is_named(changes: Any) -> None:
    with pytest.raises(UnfitChangeError, check=lambda error: error.number == 1):
        leases().replay([{"changes": changes, "leases": [GRANT], "granted": [[0, 3, 0]]}], left=0.0)


def test_indices_are_compressed_to_ranges() -> None:
    assert compress(np.array([0, 1, 2, 5, 7, 8])) == ((0, 3), (5, 6), (7, 9))
