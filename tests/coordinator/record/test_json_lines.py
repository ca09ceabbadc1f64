"""Values are written as JSON lines and read back."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from fedemu.coordinator.record.json_lines import object_in, plain, read_lines, to_line
from fedemu.protocol.errors import ConfigurationError


def test_values_that_json_lacks_become_null_or_plain() -> None:
    values = {
        "nan": math.nan,
        "inf": [-math.inf, {"deep": np.float32("nan")}],
        "numpy": np.int64(3),
        "array": np.array([1.0, np.nan]),
        "path": Path("a/b"),
        "set": {*"zyxwvu"},
    }
    assert json.loads(to_line(values)) == {
        "nan": None,
        "inf": [None, {"deep": None}],
        "numpy": 3,
        "array": [1.0, None],
        "path": "a/b",
        "set": [*"uvwxyz"],
    }


def test_plain_keeps_booleans_and_turns_keys_into_text() -> None:
    assert plain({1: True, "x": None}) == {"1": True, "x": None}
    assert plain(np.bool_(True)) is True


def test_a_value_that_has_a_line_break_stays_on_its_line(tmp_path: Path) -> None:
    text = "one\ntwo\u2028three"
    log = tmp_path / "events.jsonl"
    log.write_bytes(to_line({"detail": text}) + to_line({"detail": "four"}))
    assert read_lines(log) == [{"detail": text}, {"detail": "four"}]


def test_a_log_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "events.jsonl") == []


@pytest.mark.usefixtures("uncollected")
def test_lists_in_lists_that_no_decoder_follows_are_a_damaged_line(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_bytes(line := b"[" * 100_000 + b"\n")
    with pytest.raises(ConfigurationError, match=r"line 1 of .*events\.jsonl cannot be read"):
        read_lines(log)
    assert object_in(line) is None


def test_a_text_holds_an_object_or_none() -> None:
    assert object_in(b'{"a": 1}\n') == {"a": 1}
    assert object_in("{}") == {}
    assert [object_in(text) for text in ("", "[1]", "null", '{"a": ', b"\xff")] == [None] * 5
