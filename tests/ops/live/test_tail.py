"""A log is followed as it grows, and known again after a resumed run has cut it."""

from pathlib import Path

from fedemu.ops.live.tail import Look, Tail


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


def test_lines_of_another_form_and_lines_that_nobody_could_read_are_left_out_and_counted(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"a":1}\n{"a":"one"}\n' + "[" * 100_000 + '\n\n{"a":2}\n')
    assert Tail(log, lambda line: isinstance(line["a"], int)).look() == Look([{"a": 1}, {"a": 2}], False, unread=2)


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
