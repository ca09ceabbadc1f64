"""Leases on disk: found again by the next life, never taken twice, and not kept forever."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from fedemu.device.machine.lease import KEPT, LIFE_BITS, LeaseRecord, LeaseSearch, create_lease
from fedemu.protocol.errors import ConfigurationError, FedemuError
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


def found(state: Path, count: int = 3) -> list[str]:
    """The tokens of all leases that a supervisor of ``count`` devices would try."""
    return list(LeaseSearch(state, count))


def test_each_life_has_incarnations_above_those_of_the_former_one(tmp_path: Path) -> None:
    first = LeaseSearch(tmp_path, 3).claim(a_grant())
    assert first.first_incarnation == 1 << LIFE_BITS
    first.close()
    with open(os.devnull) as other:  # it gets the number that the lock had
        first.close()
        os.fstat(other.fileno())
    search = LeaseSearch(tmp_path, 3)
    assert next(iter(search)) == "L"
    second = search.claim(a_grant())
    assert second.folder == first.folder
    assert second.first_incarnation == 2 << LIFE_BITS
    second.close()


def test_a_lease_that_is_granted_without_having_been_tried_goes_on_with_its_lives(tmp_path: Path) -> None:
    for life in (1, 2, 3):
        lease = LeaseSearch(tmp_path, 3).claim(a_grant())
        assert lease.record.life == life
        lease.close()


def test_a_lease_has_as_many_lives_as_incarnations_of_31_bits_can_count(tmp_path: Path) -> None:
    lease = LeaseSearch(tmp_path, 3).claim(a_grant())
    lease.close()
    last = LeaseRecord("L", "digits", 3, 2046)
    (lease.folder / "lease.json").write_text(json.dumps(asdict(last)))
    again = LeaseSearch(tmp_path, 3).claim(a_grant())
    assert again.first_incarnation == 2**31 - 2**LIFE_BITS
    again.close()
    with pytest.raises(ConfigurationError, match=r"was taken up 2048 times, which is too often; remove the folder\.$"):
        LeaseSearch(tmp_path, 3).claim(a_grant())


def test_a_lease_that_a_living_supervisor_holds_is_not_found(
    tmp_path: Path, descriptors: Callable[[], set[str]]
) -> None:
    held = LeaseSearch(tmp_path, 3).claim(a_grant())
    before = descriptors()
    assert found(tmp_path) == []
    with pytest.raises(ConfigurationError, match="Another supervisor works in"):
        create_lease(tmp_path, a_grant(), 3)
    assert not descriptors() - before, "a machine without a place looks every ten seconds"
    held.close()


def test_a_file_system_without_locks_is_not_taken_for_another_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LeaseSearch(tmp_path, 3).claim(a_grant()).close()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for attempt in (lambda: found(tmp_path), lambda: create_lease(tmp_path, a_grant(), 3)):
        with pytest.raises(ConfigurationError, match=r"gives no locks \(Function not implemented\).* another one\.$"):
            attempt()


def test_leases_of_another_number_of_devices_are_left_alone(tmp_path: Path) -> None:
    LeaseSearch(tmp_path, 3).claim(a_grant()).close()
    assert found(tmp_path, 4) == []
    assert found(tmp_path, 3) == ["L"], "the other search has locked it for a moment only"


def test_supervisors_that_start_together_try_different_leases(tmp_path: Path) -> None:
    for age, token in enumerate(("one", "two")):
        lease = LeaseSearch(tmp_path, 3).claim(a_grant(token))
        os.utime(lease.folder / "lease.json", (age, age))
        lease.close()
    first, second = LeaseSearch(tmp_path, 3), LeaseSearch(tmp_path, 3)
    tried = iter(first)
    assert (next(tried), next(iter(second))) == ("two", "one")
    second.close()
    assert next(tried) == "one"
    assert found(tmp_path) == ["two"]
    own = first.claim(a_grant("two"))
    assert found(tmp_path) == ["one"]
    own.close()


def test_a_lease_whose_supervisor_has_ended_meanwhile_is_found_by_the_same_search(tmp_path: Path) -> None:
    held = LeaseSearch(tmp_path, 3).claim(a_grant())
    search = LeaseSearch(tmp_path, 3)
    assert [*search] == [*search] == []
    held.close()
    assert next(iter(search)) == "L"
    own = search.claim(a_grant())
    assert own.folder == held.folder
    own.close()


def test_a_search_leaves_nothing_locked(tmp_path: Path) -> None:
    LeaseSearch(tmp_path, 3).claim(a_grant()).close()
    search = LeaseSearch(tmp_path, 3)
    assert next(iter(search)) == "L"
    assert found(tmp_path) == []
    search.close()
    assert found(tmp_path) == ["L"] == found(tmp_path)


@pytest.mark.parametrize("content", ['{"lease": "L"', '{"lease": "L"}', "[]", "[" * 100_000])
@pytest.mark.usefixtures("uncollected")
def test_a_lease_file_that_was_damaged_counts_as_none(tmp_path: Path, content: str) -> None:
    lease = LeaseSearch(tmp_path, 3).claim(a_grant())
    lease.close()
    (lease.folder / "lease.json").write_text(content)
    assert found(tmp_path) == []


def test_a_lease_that_another_supervisor_is_just_removing_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = [tmp_path / "run" / "gone" / "lease.json"] * (KEPT + 1)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(gone))
    assert found(tmp_path) == []
    LeaseSearch(tmp_path, 3).claim(a_grant()).close()


def test_old_leases_are_removed_with_all_they_hold(tmp_path: Path, descriptors: Callable[[], set[str]]) -> None:
    before = descriptors()
    for age in range(KEPT + 3):
        lease = LeaseSearch(tmp_path, 3).claim(a_grant(f"lease {age}", run=f"run {age}"))
        (lease.devices / "0").mkdir(parents=True)
        os.utime(lease.folder / "lease.json", (age, age))
        lease.close()
    LeaseSearch(tmp_path, 3).claim(a_grant("the newest")).close()
    left = found(tmp_path)
    assert len(left) == KEPT
    assert "lease 0" not in left
    assert not (tmp_path / "run_0").exists()
    assert not descriptors() - before


def test_many_supervisors_of_a_run_that_goes_on_find_all_of_their_leases_one_after_another(tmp_path: Path) -> None:
    tokens = [f"lease {number}" for number in range(KEPT + 3)]
    for lease in [LeaseSearch(tmp_path, 3).claim(a_grant(token)) for token in tokens]:
        lease.close()
    assert sorted(found(tmp_path)) == sorted(tokens)
    for token in tokens:
        search = LeaseSearch(tmp_path, 3)
        assert token in search
        search.claim(a_grant(token)).close()
    assert sorted(found(tmp_path)) == sorted(tokens)


def test_a_run_may_have_any_name(tmp_path: Path) -> None:
    for run, folder in (("../../ö b/c", "_..___b_c"), ("..", "run"), ("digits-1", "digits-1"), (300 * "x", 64 * "x")):
        lease = LeaseSearch(tmp_path, 3).claim(a_grant(run=run))
        assert lease.folder.parent == tmp_path / folder
        lease.close()


def test_a_state_folder_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(ConfigurationError, match="choose another"):
        LeaseSearch(tmp_path / "state", 3).claim(a_grant())


def test_a_full_disk_is_no_fault_of_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, **_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(FedemuError, match=r"state folder .*the disk is full") as told:
        create_lease(tmp_path / "state", a_grant(), 3)
    assert told.value.exit_code == 5
