"""A log is read on from where it was."""

from __future__ import annotations

import os
from pathlib import Path

from fedemu.coordinator.record.growing import GrowingLog


def test_a_look_reads_whole_new_lines_until_they_are_taken_as_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = GrowingLog(path)
    assert log.look() == (b"", False)
    path.write_bytes(b"one\ntwo\nthr")
    for _ in range(2):
        assert log.look() == (b"one\ntwo\n", False)
    assert log.look(most=5) == (b"one\n", False)
    log.read(b"one\n")
    log.read(b"two\n")
    with path.open("ab") as file:
        file.write(b"ee\n")
    assert log.look() == (b"three\n", False)


def test_a_line_that_is_longer_than_what_is_wanted_comes_alone_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = GrowingLog(path)
    path.write_bytes(b"one\nlonger\ntwo\nlonge")
    told = []
    for _ in range(4):
        lines, _ = log.look(most=5)
        log.read(lines)
        told.append((lines, log.is_cut))
    assert told == [(b"one\n", True), (b"longer\n", True), (b"two\n", True), (b"", True)]
    with path.open("ab") as file:
        file.write(b"st\n")
    assert (log.look(most=5), log.is_cut) == ((b"longest\n", False), True)
    log.read(b"longest\n")
    assert (log.look(most=5), log.is_cut) == ((b"", False), False)


def test_a_log_that_was_cut_and_written_on_or_removed_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = GrowingLog(path)
    first = b"a\n" * 40
    path.write_bytes(first)
    log.read(log.look()[0])
    assert log.look() == (b"", False)
    path.write_bytes(first[:-4] + b"b\nc\nd\n")
    assert log.look() == (first[:-4] + b"b\nc\nd\n", True)
    log.read(first[:4])
    log.read(first[4:6])
    assert log.look() == (first[6:-4] + b"b\nc\nd\n", False)
    path.unlink()
    assert [log.look(), log.look()] == [(b"", True), (b"", False)]


def test_a_pipe_in_the_place_of_a_log_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log.jsonl")
    assert GrowingLog(tmp_path / "log.jsonl").look() == (b"", False)
