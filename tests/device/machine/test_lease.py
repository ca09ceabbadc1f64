"""Leases on disk: found again by the next life, never taken twice, and not kept forever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedemu.device.machine.lease import KEPT, LIFE_BITS, claim_lease, create_lease, find_leases
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.messages import BlobRef, Granted

BLOB = BlobRef(key="experiment", digest="a" * 64, size=1)


def a_grant(lease: str = "L", run: str = "digits") -> Granted:
    return Granted(
        lease=lease,
        run=run,
        ranges=((0, 3),),
        experiment=BLOB,
        partition=BLOB,
        data="b" * 64,
        heartbeat_seconds=2.0,
        patience=5,
    )


def test_each_life_has_incarnations_above_those_of_the_former_one(tmp_path: Path) -> None:
    first = claim_lease([], tmp_path, a_grant(), 3)
    assert first.first_incarnation == 1 << LIFE_BITS
    first.close()
    found = find_leases(tmp_path, 3)
    assert [lease.record.lease for lease in found] == ["L"]
    second = claim_lease(found, tmp_path, a_grant(), 3)
    assert second.folder == first.folder
    assert second.first_incarnation == 2 << LIFE_BITS
    second.close()


def test_a_lease_that_a_living_supervisor_holds_is_not_found(tmp_path: Path) -> None:
    held = claim_lease([], tmp_path, a_grant(), 3)
    assert find_leases(tmp_path, 3) == []
    with pytest.raises(ConfigurationError, match="Another supervisor works in"):
        create_lease(tmp_path, a_grant(), 3)
    held.close()


def test_leases_of_another_number_of_devices_are_left_alone(tmp_path: Path) -> None:
    claim_lease([], tmp_path, a_grant(), 3).close()
    assert find_leases(tmp_path, 4) == []


def test_only_the_granted_lease_stays_locked(tmp_path: Path) -> None:
    claim_lease([], tmp_path, a_grant("one"), 3).close()
    claim_lease([], tmp_path, a_grant("two"), 3).close()
    own = claim_lease(find_leases(tmp_path, 3), tmp_path, a_grant("two"), 3)
    assert [lease.record.lease for lease in find_leases(tmp_path, 3)] == ["one"]
    own.close()


def test_a_lease_file_that_was_damaged_counts_as_none(tmp_path: Path) -> None:
    lease = claim_lease([], tmp_path, a_grant(), 3)
    lease.close()
    (lease.folder / "lease.json").write_text('{"lease": "L"')
    assert find_leases(tmp_path, 3) == []


def test_old_leases_are_removed_with_all_they_hold(tmp_path: Path) -> None:
    for age in range(KEPT + 3):
        lease = claim_lease([], tmp_path, a_grant(f"lease {age}", run=f"run {age}"), 3)
        (lease.devices / "0").mkdir(parents=True)
        os.utime(lease.folder / "lease.json", (age, age))
        lease.close()
    claim_lease([], tmp_path, a_grant("the newest"), 3).close()
    left = {lease.record.lease for lease in find_leases(tmp_path, 3)}
    assert len(left) == KEPT
    assert "lease 0" not in left
    assert not (tmp_path / "run_0").exists()


def test_a_run_may_have_any_name(tmp_path: Path) -> None:
    lease = claim_lease([], tmp_path, a_grant(run="../../ö b/c"), 3)
    assert tmp_path in lease.folder.parents
    lease.close()


def test_a_state_folder_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(ConfigurationError, match="choose another"):
        claim_lease([], tmp_path / "state", a_grant(), 3)
