"""What is found in the output of a command."""

from __future__ import annotations

from pathlib import Path

from fedemu.ops.terminal import complaint_in, last_words


def test_the_last_words_are_the_last_line_that_says_something(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("first\nfedemu: no room for 300 devices\n\n")
    assert last_words(tmp_path / "out") == "fedemu: no room for 300 devices"
    assert last_words(tmp_path / "absent") == ""


def test_the_last_words_are_a_whole_account_if_there_is_one(tmp_path: Path) -> None:
    account = "fedemu: ValueError: no, in mine.py line 3\n    3  raise ValueError('no')\n    the traceback is there"
    (tmp_path / "out").write_text(f"fedemu: an earlier one\n{account}\n13.6 MB came from below\n")
    assert last_words(tmp_path / "out") == account


def test_a_warning_is_no_complaint_and_ends_the_account_of_one(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("fedemu: no quorum\nfedemu: warning: slow\n  it goes on\n")
    assert last_words(tmp_path / "out") == "fedemu: no quorum"
    assert complaint_in(["fedemu: warning: slow"]) == ""
