"""The journal of leases survives a coordinator that was killed while it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedemu.coordinator.fleet.journal import LeaseJournal
from fedemu.protocol.errors import ConfigurationError, FedemuError


def test_a_journal_gives_back_what_was_written_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "new" / "leases.jsonl"
    journal = LeaseJournal(path)
    assert list(journal.entries()) == []
    journal.write({"grant": "a", "ranges": ((0, 2),)})
    with path.open("ab") as file:
        file.write(b'{"grant": "b", "ran')
    assert list(journal.entries()) == [{"grant": "a", "ranges": [[0, 2]]}]
    journal.write({"release": "a"})
    assert list(journal.entries()) == [{"grant": "a", "ranges": [[0, 2]]}, {"release": "a"}]


@pytest.mark.parametrize("place", range(1, 40, 3))
def test_a_flipped_bit_in_a_line_is_found(tmp_path: Path, place: int) -> None:
    path = tmp_path / "leases.jsonl"
    LeaseJournal(path).write({"grant": "abc", "ranges": ((0, 2),), "host": "h"})
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"Line 1 of .*leases\.jsonl is damaged"):
        list(LeaseJournal(path).entries())


@pytest.mark.usefixtures("uncollected")
def test_lists_in_lists_that_no_decoder_follows_are_a_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "leases.jsonl"
    path.write_bytes(b"[" * 100_000 + b"\n")
    with pytest.raises(ConfigurationError, match=r"Line 1 of .*leases\.jsonl is damaged"):
        list(LeaseJournal(path).entries())


@pytest.mark.parametrize(("length", "line"), [(0, 1), (-1, 2), (-5, 2)])
def test_a_cut_in_what_a_checkpoint_knows_of_is_found_and_changes_nothing(
    tmp_path: Path, length: int, line: int
) -> None:
    path = tmp_path / "leases.jsonl"
    for token in "ab":
        LeaseJournal(path).write({"grant": token, "ranges": ((0, 2),), "host": "h"})
    cut = path.read_bytes()[:length]
    path.write_bytes(cut)
    with pytest.raises(ConfigurationError, match=rf"Line {line} of .*leases\.jsonl is damaged"):
        list(LeaseJournal(path).entries(least=2))
    assert path.read_bytes() == cut
    path.unlink()
    assert list(LeaseJournal(path).entries(least=2)) == []


def test_a_line_that_stands_for_many_changes_takes_the_place_of_all_before_it(tmp_path: Path) -> None:
    journal = LeaseJournal(tmp_path / "leases.jsonl")
    for token in "abc":
        journal.write({"release": token})
    journal.replace({"changes": 3, "leases": []})
    journal.write({"release": "d"})
    assert list(journal.entries(least=4)) == [{"changes": 3, "leases": []}, {"release": "d"}]
    with pytest.raises(ConfigurationError, match=r"Line 3 of .* is damaged"):
        list(journal.entries(least=5))


def test_a_line_of_an_earlier_version_has_no_checksum(tmp_path: Path) -> None:
    path = tmp_path / "leases.jsonl"
    path.write_bytes(b'{"release": "a"}\n')
    assert list(LeaseJournal(path).entries()) == [{"release": "a"}]


def test_a_line_that_a_full_disk_takes_in_part_leaves_the_lines_around_it_whole(
    tmp_path: Path, files_end_at: Any
) -> None:
    path = tmp_path / "leases.jsonl"
    journal = LeaseJournal(path)
    journal.write({"release": "a"})
    full = pytest.raises(FedemuError, match=r"leases\.jsonl cannot be written: the disk is full")
    with files_end_at(path.stat().st_size + 10), full:
        journal.write({"release": "b"})
    journal.write({"release": "c"})
    assert list(journal.entries()) == [{"release": "a"}, {"release": "c"}]
