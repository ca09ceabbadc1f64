"""A run is read back from its directory, whole or not at all."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from fedemu.coordinator.record import run as record
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import read_run
from fedemu.protocol.errors import ConfigurationError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text('name = "digits"\n')
    (tmp_path / "metrics.jsonl").write_text('{"round":1}\n')
    return tmp_path


def test_a_run_is_read_finished_or_not(run: Path) -> None:
    unfinished = read_run(run)
    assert (unfinished.config, unfinished.rows) == ('name = "digits"\n', (Row(round=1),))
    assert (unfinished.events, unfinished.diagnosis, unfinished.summary) == ([], [], {})
    (run / "summary.json").write_text(json.dumps({"rounds": 1}))
    assert read_run(run).summary == {"rounds": 1}


def test_a_completed_run_whose_settings_ask_for_more_rounds_is_interrupted(run: Path) -> None:
    assert read_run(run).outcome == "unfinished"
    (run / "summary.json").write_text(json.dumps({"outcome": "completed", "rounds": 1}))
    for rounds, outcome in ((1, "completed"), (3, "interrupted")):
        (run / "config.toml").write_text(f'name = "digits"\nrounds = {rounds}\n\n[data]\n')
        assert read_run(run).outcome == outcome
    (run / "config.toml").write_text('name = "digits\n')
    assert read_run(run).outcome == "completed", "nothing is known of more rounds"


def test_a_run_is_read_without_its_experiment_and_without_its_rows(run: Path) -> None:
    (run / "config.toml").rename(run / "elsewhere")
    assert (read_run(run).config, read_run(run).rows) == ("", (Row(round=1),))
    (run / "elsewhere").rename(run / "config.toml")
    (run / "metrics.jsonl").unlink()
    assert (read_run(run).config, read_run(run).rows) == ('name = "digits"\n', ())


def test_a_run_that_cannot_be_read_is_one_sentence_that_names_its_folder(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    (run / "events.jsonl").write_text("{}\n")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refuse)
        with pytest.raises(ConfigurationError, match=f"^The run in {run} cannot be read: .*Input/output error"):
            read_run(run)
    (run / "config.toml").write_bytes(b'name = "caf\xe9"')
    with pytest.raises(ConfigurationError, match=f"^The run in {run} cannot be read: 'utf-8' codec"):
        read_run(run)


@pytest.mark.parametrize("read", ["read_rows", "read_lines"])
def test_a_run_that_ends_while_it_is_read_is_unfinished_or_has_all_its_rows(
    run: Path, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = getattr(record, read)

    def ending(path: Path) -> Any:
        found = reading(path)
        if not (run / "summary.json").exists():
            with open(run / "metrics.jsonl", "a") as file:
                file.write('{"round": 2}\n')
            (run / "summary.json").write_text('{"outcome": "completed", "rounds": 2}')
        return found

    monkeypatch.setattr(record, read, ending)
    found = read_run(run)
    assert (found.outcome, found.rows) == ("unfinished", (Row(round=1),))
    assert (read_run(run).outcome, read_run(run).rows) == ("completed", (Row(round=1), Row(round=2)))


def test_a_last_line_that_is_being_written_does_not_count(run: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        with open(run / name, "a") as file:
            file.write('{"round": 2, "accur')
    assert (read_run(run).rows, read_run(run).events) == ((Row(round=1),), [])


@pytest.mark.parametrize("above", ["", "digits,local.lr=0.1", "rates/digits,local.lr=0.1"])
def test_a_folder_without_a_run_is_not_read(tmp_path: Path, above: str) -> None:
    with pytest.raises(ConfigurationError, match="holds no run"):
        read_run(tmp_path)
    for seed in ("seed-10", "seed-2"):
        (tmp_path / above / seed).mkdir(parents=True)
        (tmp_path / above / seed / "config.toml").touch()
    with pytest.raises(ConfigurationError) as refused:
        read_run(tmp_path)
    inner = tmp_path / above / "seed-10"
    assert str(refused.value) == f"{tmp_path} is a folder of runs and no run itself; name one of them, such as {inner}."


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "diagnosis.jsonl"])
@pytest.mark.parametrize("line", ["nonsense", "[1]", "5", "null", '{"round": 2, "accu'])
def test_a_damaged_log_is_one_sentence_that_names_the_line(run: Path, name: str, line: str) -> None:
    (run / name).write_text('{"round": 1}\n' + line + "\n")
    with pytest.raises(ConfigurationError, match=rf"^line 2 of .*/{name} cannot be read: "):
        read_run(run)


def test_a_row_with_words_in_place_of_a_number_is_one_sentence_that_names_the_line(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"round": 1}\n{"round": 2, "accuracy": "good"}\n')
    with pytest.raises(ConfigurationError, match=r"^line 2 of .*/metrics\.jsonl cannot be read: accuracy is 'good'"):
        read_run(run)


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_damaged_summary_is_one_sentence_that_names_the_file(run: Path, text: str) -> None:
    (run / "summary.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"^.*/summary\.json cannot be read: "):
        read_run(run)
