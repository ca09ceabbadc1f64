"""Records of rounds: sealed by a checksum, and never taken for whole when they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedemu.coordinator.record.records import (
    DamagedError,
    newest_record,
    read_record,
    record_name,
    recorded_rounds,
    write_record,
)


def test_the_newest_record_that_can_be_read_counts(tmp_path: Path) -> None:
    for round in (2, 10, 9):
        write_record(tmp_path, round, {"round": round})
    assert recorded_rounds(tmp_path) == [10, 9, 2]
    assert newest_record(tmp_path) == {"round": 10}
    (tmp_path / record_name(10)).write_bytes(b"{")
    (tmp_path / record_name(9)).unlink()
    (tmp_path / record_name(9)).mkdir()
    assert recorded_rounds(tmp_path) == [10, 9, 2]
    assert newest_record(tmp_path) == {"round": 2}


def test_without_a_folder_there_is_no_record(tmp_path: Path) -> None:
    assert recorded_rounds(tmp_path / "missing") == []
    assert newest_record(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "it is no JSON any more"),
        (b"[" * 100_000, "it is no JSON any more"),
        (b"[1]", "it holds no record"),
        (b'{"format": 2}', "its checksum is missing"),
        (b'{"format": 2}\nsha256 \xff\n', "its checksum is wrong"),
    ],
)
@pytest.mark.usefixtures("uncollected")
def test_a_record_that_is_not_whole_is_damaged(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / record_name(1)
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=f"{path.name} is damaged: {fault}"):
        read_record(tmp_path, 1)


def test_a_record_of_format_1_has_no_checksum(tmp_path: Path) -> None:
    (tmp_path / record_name(1)).write_bytes(b'{"format": 1}')
    assert read_record(tmp_path, 1) == {"format": 1}
