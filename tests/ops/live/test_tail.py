"""A log is followed as it grows, and known again after a resumed run has cut it."""

import json
from itertools import islice
from pathlib import Path

import pytest

from fedemu.ops.live import tail
from fedemu.ops.live.tail import Look, Tail, backwards


def test_only_whole_new_lines_are_told(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    tail = Tail(log)
    assert tail.look() == Look([], False)
    log.write_text('{"a":1}\n{"a":2}\n{"a":')
    assert tail.look() == Look([{"a": 1}, {"a": 2}], False)
    assert tail.look() == Look([], False)
    with log.open("a") as file:
        file.write('3}\nno json\n[4]\n{"a":5}\n')
    assert tail.look() == Look([{"a": 3}, {"a": 5}], False, unread=2)


@pytest.mark.usefixtures("uncollected")
def test_lines_of_another_form_and_lines_that_nobody_could_read_are_left_out_and_counted(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"a":1}\n{"a":"one"}\n' + "[" * 100_000 + '\n\n{"a":2}\n')
    assert Tail(log, lambda line: isinstance(line["a"], int)).look() == Look([{"a": 1}, {"a": 2}], False, unread=2)


def test_a_long_log_is_read_in_parts_and_a_look_tells_whether_there_is_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "MOST_BYTES", 17)
    log = tmp_path / "log.jsonl"
    follower = Tail(log)
    log.write_text('{"a":1}\n{"a":2}\n{"a":"a longer line"}\n{"a":4}\n')
    assert [follower.look() for _ in range(4)] == [
        Look([{"a": 1}, {"a": 2}], False, full=True),
        Look([{"a": "a longer line"}], False, full=True),
        Look([{"a": 4}], False),
        Look([], False),
    ]
    with log.open("a") as file:
        file.write('{"a":"a line that is being writt')
    assert follower.look() == Look([], False), "there is nothing to read before it is whole"


def test_a_log_that_was_cut_and_grew_again_begins_anew(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    tail = Tail(log)
    log.write_text('{"a":1}\n{"a":2}\n')
    tail.look()
    log.write_text('{"a":1}\n{"b":2}\n{"b":3}\n')
    assert tail.look() == Look([{"a": 1}, {"b": 2}, {"b": 3}], True)
    log.write_text('{"a":1}\n')
    assert tail.look() == Look([{"a": 1}], True)
    log.unlink()
    assert tail.look() == Look([], True)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 20, 1000])
@pytest.mark.parametrize("begun", ["", '{"a":', '{"a":9}'])
def test_a_log_is_read_from_its_end_and_a_line_that_is_not_whole_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, begun: str
) -> None:
    monkeypatch.setattr(tail, "BLOCK_BYTES", block)
    log = tmp_path / "log.jsonl"
    assert [*backwards(log, lambda line: True)] == []
    log.write_text(begun)
    assert [*backwards(log, lambda line: True)] == []
    log.write_text('{"a":1}\n\nno json\n[4]\n{"a":"two"}\n{"a":3}\n' + begun)
    assert [*backwards(log, lambda line: isinstance(line["a"], int))] == [{"a": 3}, {"a": 1}]


def test_of_a_log_that_is_read_from_its_end_no_more_is_read_than_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, read = tmp_path / "log.jsonl", list[bytes]()
    log.write_bytes(b"".join(b'{"a":%d}\n' % number for number in range(10_000)))
    monkeypatch.setattr(tail, "object_in", lambda line: read.append(line) or json.loads(line))
    assert [line["a"] for line in islice(backwards(log, lambda line: line["a"] % 2 == 0), 3)] == [9998, 9996, 9994]
    assert len(read) == 6
