"""Rows are written in the form that runs have always had, and rows of older runs can be read."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest

from fedemu.coordinator.record.json_lines import to_line
from fedemu.coordinator.record.row import COLUMNS, Row, RowLog, read_rows
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.messages import OUTCOMES

PAGE = (Path(__file__).parents[3] / "docs" / "run_directory.md").read_text(encoding="utf-8")
LINE = (
    b'{"round":2,"task":0,"virtual_time":4.1464727282790115,"wall_time":2.088403616999983,"test_samples":360,'
    b'"accuracy":0.2027777777777777,"loss":40.13578655893314,"perplexity":null,"class_accuracy":[0.0,null,1.0],"seen_accuracy":1.0,'
    b'"seen_loss":0.10967903008441175,"period_accuracy":[1.0,0.0],"period_loss":[0.10967903008441175,null],'
    b'"untrained_period_accuracy":[0.125,0.25],"validation_accuracy":null,"period_since":null,'
    b'"consistency":0.5,"round_forgetting":0.0,"local_forgetting":null,"aggregation_forgetting":null,'
    b'"local_alignment":null,"global_alignment":0.75,"joined":9,"online":7,"selected":7,"accepted":5,'
    b'"dropped":1,"crashed":0,"late":0,"cancelled":1,"failed":0,"rejected":0,"attempts":1,"bytes_down":142128,"bytes_up":98960,'
    b'"device_metrics":{"loss":0.12879557685321627},"remarks":{"replay":{"periods":[4,0]}},'
    b'"round_seconds":0.05019551700002012,"server_seconds":0.0,"coordinator_seconds":0.0032811340000193923,'
    b'"device_seconds":null,"wire_bytes_down":22721,"wire_bytes_up":102081}\n'
)
"""A line of a run. Other tools rely on the order of its columns and the form of its numbers."""


def test_a_line_is_written_as_it_was_read_to_the_byte() -> None:
    assert to_line(Row.read(json.loads(LINE)).to_json()) == LINE


def test_the_columns_are_those_of_the_page() -> None:
    section = PAGE.partition("## metrics.jsonl\n")[2].partition("\n##")[0]
    named = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    assert {column for names in named for column in re.findall(r"`(\w+)`", names)} == set(COLUMNS)


def test_every_outcome_is_a_column_and_one_that_was_not_counted_is_zero() -> None:
    assert set(OUTCOMES) <= set(COLUMNS)
    assert Row(round=1, late=2, rejected=1).outcomes == dict.fromkeys(OUTCOMES, 0) | {"late": 2, "rejected": 1}


def test_the_objective_of_the_kept_samples_is_by_sample_and_unknown_where_it_was_not_measured() -> None:
    said = [{"objective": 6.0, "samples": 4}, {"objective": 0.0, "samples": 0}, {"samples": 4}]
    rows = [Row(round=1, remarks={"replay": replay}) for replay in said]
    assert [row.kept_objective for row in (*rows, Row(round=1))] == [1.5, None, None, None]


def test_remarks_of_another_form_are_none_about_a_topic() -> None:
    said = {"replay": {"samples": 4}, "generator": 0.5, "coordination": [1.0]}
    row = Row(round=1, remarks=said)
    assert row.about("replay") == {"samples": 4}
    assert [row.about(topic) for topic in ("generator", "coordination", "other")] == [{}, {}, {}]
    assert row.about("replay", "period", "samples") == {}
    assert Row(round=1, remarks={"replay": 0.5}).kept_objective is None


def test_an_older_row_lacks_columns_and_a_newer_one_has_more() -> None:
    row = Row.read({"round": 3, "accuracy": 1, "class_accuracy": [0.5, None], "invented": "later"})
    assert row == Row(round=3, accuracy=1.0, class_accuracy=(0.5, None))
    assert (row.loss, row.selected, row.device_metrics, row.remarks) == (None, None, {}, {})


def test_what_is_not_finite_was_not_measured_so_a_row_in_memory_is_the_row_read_back() -> None:
    row = Row(
        round=1,
        loss=math.inf,
        class_accuracy=(math.nan, 0.5),
        online=np.int64(3),  # type: ignore[arg-type]
        device_metrics={"loss": math.nan},
        remarks={"objective": np.array([1.0, np.inf])},
    )
    assert (row.loss, row.class_accuracy, row.device_metrics) == (None, (None, 0.5), {"loss": None})
    assert Row.read(json.loads(to_line(row.to_json()))) == row


def test_a_row_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Row(round=1).accuracy = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({}, "round is None"),
        ({"round": 1, "loss": "low"}, "loss is 'low'"),
        ({"round": 1, "class_accuracy": 0.5}, "class_accuracy is 0.5"),
        ({"round": 1, "remarks": [1]}, r"remarks is \[1\]"),
    ],
)
def test_what_a_column_cannot_hold_is_refused_by_its_name(line: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Row.read(line)


def test_a_line_that_does_not_tell_its_round_is_no_row_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text('{}\n{"loss":1.0}\n{"round":2}\n')
    assert read_rows(tmp_path) == (Row(round=2),)
    log.write_text('{"round":1}\n{"round":"two"}\n')
    with pytest.raises(ConfigurationError, match=r"^line 2 of .*metrics\.jsonl cannot be read: round is 'two'"):
        read_rows(tmp_path)


def test_who_follows_a_run_reads_each_row_once(tmp_path: Path) -> None:
    path, log = tmp_path / "metrics.jsonl", RowLog(tmp_path)
    assert log.more() == ()
    path.write_text('{"round":1}\n\n{"round":2}\n' + "\n" * 64 + '{"rou')
    assert log.more() == (Row(round=1), Row(round=2))
    assert log.more() == ()
    with path.open("r+b") as file:
        file.write(b"not again")  # what was read is not read again
        file.seek(0, 2)
        file.write(b'nd":3}\n{}\n{"round":"four"}\n')
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"^line 70 of .*metrics\.jsonl cannot be read: round is 'four'"):
            log.more()


def test_who_follows_a_run_reads_its_rows_anew_after_they_were_cut_off(tmp_path: Path) -> None:
    path, log = tmp_path / "metrics.jsonl", RowLog(tmp_path)
    path.write_text('{"round":1}\n{"round":2}\n{"round":3}\n')
    log.more()
    path.write_text('{"round":1}\n{"round":2,"loss":1.0}\n')
    assert log.more() == (Row(round=1), Row(round=2, loss=1.0))
    path.write_text('{"round":1}\n{"round":"two"}\n')
    with pytest.raises(ConfigurationError, match=r"^line 2 of "):
        log.more()


def test_rows_are_read_without_torch_and_numpy() -> None:
    code = "import sys, fedemu.coordinator.record.row; print(*({'torch', 'numpy'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == ""
