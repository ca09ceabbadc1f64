"""Versions of a device's own state: written whole, found again after a restart, deleted when nothing names them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fedemu.device.memory.store import OwnStore, read_own, write_own
from fedemu.protocol.errors import BlobError
from fedemu.protocol.ids import AskId


def fill(store: OwnStore, *versions: AskId) -> None:
    for version in versions:
        write_own(Path(store.path(version)), {"w": np.full(2, version.round, np.float32)})
        store.written(version)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    store = OwnStore(tmp_path / "7")
    fill(store, AskId(3, 0, 0))
    assert read_own(Path(store.path("3.0.0")))["w"].tolist() == [3.0, 3.0]


def test_a_new_life_finds_the_versions_of_the_former_ones(tmp_path: Path) -> None:
    fill(OwnStore(tmp_path), AskId(1, 0, 0), AskId(2, 1, 3))
    assert OwnStore(tmp_path).versions == {AskId(1, 0, 0), AskId(2, 1, 3)}


def test_a_write_that_was_cut_off_is_no_version_and_is_cleaned_up(tmp_path: Path) -> None:
    (tmp_path / "own-1.0.0.77.partial").write_bytes(b"half")
    others = {"own-strange.safetensors", "old-1.0.0.safetensors", "own-1.0.0.safetensorx"}
    for name in others:
        (tmp_path / name).write_bytes(b"")
    assert OwnStore(tmp_path).versions == frozenset()
    assert {path.name for path in tmp_path.iterdir()} == others


def test_a_version_that_a_trainer_is_writing_survives_the_next_life_of_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def meanwhile(source: str, target: Path) -> None:
        OwnStore(tmp_path)
        replace(source, target)

    monkeypatch.setattr(os, "replace", meanwhile)
    fill(OwnStore(tmp_path), AskId(1, 0, 0))
    assert OwnStore(tmp_path).versions == {AskId(1, 0, 0)}


def test_a_version_is_replaced_whole(tmp_path: Path) -> None:
    path = Path(OwnStore(tmp_path).path("1.0.0"))
    write_own(path, {"w": np.zeros(3)})
    mapped = read_own(path)["w"]
    write_own(path, {"w": np.ones(3)})
    assert mapped.tolist() == [0.0, 0.0, 0.0]
    assert read_own(path)["w"].tolist() == [1.0, 1.0, 1.0]
    assert list(tmp_path.iterdir()) == [path]


def test_reading_a_version_that_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(BlobError, match=r"own-1\.0\.0"):
        read_own(Path(OwnStore(tmp_path).path("1.0.0")))


def test_no_version_is_deleted_while_the_current_one_is_not_durable(tmp_path: Path) -> None:
    store = OwnStore(tmp_path)
    fill(store, AskId(1, 0, 0), AskId(2, 0, 0))
    store.supersede(AskId(2, 0, 0), durable_round=1)
    assert store.versions == {AskId(1, 0, 0), AskId(2, 0, 0)}


def test_all_other_versions_up_to_the_durable_round_are_deleted(tmp_path: Path) -> None:
    store = OwnStore(tmp_path)
    fill(store, AskId(1, 0, 0), AskId(2, 0, 0), AskId(3, 0, 0), AskId(4, 0, 0))
    store.supersede(AskId(2, 0, 0), durable_round=3)
    assert store.versions == {AskId(2, 0, 0), AskId(4, 0, 0)}
    assert OwnStore(tmp_path).versions == store.versions


def test_a_device_that_takes_part_in_every_round_keeps_what_the_checkpoint_before_the_last_one_names(
    tmp_path: Path,
) -> None:
    store = OwnStore(tmp_path)
    for round in range(1, 8):
        # Round by round: a version that counts, and one that was not accepted.
        store.supersede(AskId(round - 1, 0, 0) if round > 1 else None, durable_round=round - 2)
        fill(store, AskId(round, 0, 0), AskId(round, 0, 1))
        # The next round begins from the version before, and the coordinator may go back to the end of the one before.
        kept = {AskId(each, 0, last) for each in (round - 1, round) for last in (0, 1)} | {AskId(round - 2, 0, 0)}
        assert store.versions == {version for version in kept if version.round > 0}


def test_a_coordinator_that_went_back_finds_the_earlier_version(tmp_path: Path) -> None:
    store = OwnStore(tmp_path)
    fill(store, AskId(3, 0, 0), AskId(5, 0, 0))
    store.supersede(AskId(3, 0, 0), durable_round=3)
    store.supersede(AskId(5, 0, 0), durable_round=4)
    store.supersede(AskId(3, 0, 0), durable_round=4)
    assert store.versions == {AskId(3, 0, 0), AskId(5, 0, 0)}


def test_a_coordinator_that_went_back_to_before_the_first_version_never_names_it_again(tmp_path: Path) -> None:
    store = OwnStore(tmp_path)
    fill(store, AskId(3, 0, 0))
    store.supersede(AskId(3, 0, 0), durable_round=3)
    store.supersede(None, durable_round=2)
    assert store.versions == {AskId(3, 0, 0)}
    store.supersede(None, durable_round=3)
    assert store.versions == frozenset()


@pytest.mark.parametrize("place", [0.0, 0.2, 0.5, 0.9, 0.999])
def test_one_flipped_bit_is_found_when_a_version_is_read(tmp_path: Path, place: float) -> None:
    path = Path(OwnStore(tmp_path).path("1.0.0"))
    write_own(path, {"w": np.arange(100.0, dtype=np.float32), "n": np.array([3], dtype=np.int64)})
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.chmod(0o600)  # only root can change it as it is
    path.write_bytes(content)
    with pytest.raises(BlobError, match=r"own-1\.0\.0"):
        read_own(path)


def test_a_device_without_any_accepted_version_keeps_none_that_is_durable(tmp_path: Path) -> None:
    store = OwnStore(tmp_path)
    fill(store, AskId(1, 0, 0), AskId(5, 0, 0))
    store.supersede(None, durable_round=4)
    assert store.versions == {AskId(5, 0, 0)}


def test_a_version_whose_file_is_gone_is_dropped_like_any_other(tmp_path: Path) -> None:
    store = OwnStore(tmp_path)
    fill(store, AskId(1, 0, 0))
    Path(store.path("1.0.0")).unlink()
    store.supersede(None, durable_round=4)
    assert store.versions == frozenset()
