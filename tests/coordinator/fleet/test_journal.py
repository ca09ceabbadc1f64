"""The journal of leases survives a coordinator that was killed while it wrote."""

from __future__ import annotations

from pathlib import Path

from fedemu.coordinator.fleet.journal import LeaseJournal


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
