"""The runs of a folder in short: their states, also of damaged ones."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedemu.coordinator.record.holder import UNNAMED
from fedemu.ops.experiment import Experiment
from fedemu.ops.results import listing
from fedemu.ops.results.listing import find, listed

DIGEST = "ab" * 32


def run(directory: Path, rounds: int = 0, outcome: str | None = None, of_rounds: int = 5) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(Experiment(name="x", seed=7, rounds=of_rounds).to_toml())
    rows = [{"round": number + 1, "accuracy": 0.5, "wall_time": 2.0} for number in range(rounds)]
    if rows:
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if outcome is not None:
        summary = {"outcome": outcome, "rounds": rounds, "final_accuracy": 0.75, "wall_time": 3.0}
        (directory / "summary.json").write_text(json.dumps(summary | {"model_digest": DIGEST, "ended": "2026-01-02T"}))
    return directory


def test_the_state_of_every_kind_of_run(tmp_path: Path) -> None:
    assert listed(run(tmp_path / "a", 5, "completed")).state == "completed"
    assert listed(run(tmp_path / "b", 2, "diverged")).state == "diverged"
    assert listed(run(tmp_path / "c", 2, "quorum")).state == "quorum"
    assert listed(run(tmp_path / "d", 5, "completed", of_rounds=9)).state == "interrupted"
    assert listed(run(tmp_path / "e", 2)).state == "unfinished"
    assert listed(run(tmp_path / "f")).state == "not begun"
    (tmp_path / "f" / "metrics.jsonl").touch()
    assert listed(tmp_path / "f").state == "not begun"
    (tmp_path / "f" / "checkpoint").mkdir()
    assert listed(tmp_path / "f").state == "unfinished"


def test_a_run_that_is_over_is_listed_with_what_its_summary_says(tmp_path: Path) -> None:
    found = listed(run(tmp_path / "a", 5, "completed")).table()
    assert found.pop("size") > 0
    assert found == {
        "directory": str(tmp_path / "a"),
        "name": "x",
        "method": "fedavg",
        "seed": 7,
        "state": "completed",
        "rounds": 5,
        "of_rounds": 5,
        "accuracy": 0.75,
        "seconds": 3.0,
        "ended": "2026-01-02T",
        "digest": DIGEST,
    }


def test_a_run_that_has_gone_on_since_its_summary_is_listed_with_its_last_row(tmp_path: Path) -> None:
    directory = run(tmp_path / "a", 3, "interrupted")
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "accuracy": 0.875, "wall_time": 4.0}\n')
    found = listed(directory)
    assert (found.rounds, found.accuracy, found.seconds, found.ended, found.digest) == (4, 0.875, 4.0, None, None)


def test_the_method_is_named_with_its_loss_its_terms_and_its_replay(tmp_path: Path) -> None:
    directory = run(tmp_path / "a")
    settings = {
        "algorithm": {"name": "fedavg", "loss": "wsm", "terms": {"lwf": {"temperature": 3.0}, "mine.py:held": {}}},
        "stream": {"kind": "classes"},
        "replay": {"strategy": "gss_greedy", "capacity": 5},
    }
    (directory / "config.toml").write_text(Experiment.parse(settings).to_toml())
    assert listed(directory).method == "fedavg + wsm + lwf + mine.py:held, replay gss_greedy"


def test_a_run_with_a_coordinator_at_work_is_running(tmp_path: Path) -> None:
    directory = run(tmp_path / "a", 2)
    (directory / ".lock").touch()
    assert listed(directory).state == "unfinished"
    code = (
        "import fcntl, sys\n"
        "lock = open(sys.argv[1], 'ab')\n"
        "fcntl.lockf(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(directory / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        found = listed(directory)
        holder.communicate("")
    assert (found.state, found.rounds, found.accuracy) == ("running", 2, 0.5)


def test_a_run_whose_coordinator_has_no_number_here_is_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "holder_of", lambda path: UNNAMED)
    directory = run(tmp_path / "a", 2)
    assert listed(directory).state == "running"
    (directory / "summary.json").write_text('{"outcome')
    assert listed(directory).state == "running", "whatever its files look like meanwhile"


def test_the_size_is_that_of_the_files_beside_one_that_vanishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = run(tmp_path / "a", 2)
    (directory / "checkpoint").mkdir()
    (directory / "checkpoint" / "round-2").write_bytes(bytes(5))
    size = listed(directory).size
    assert size == sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) > 5
    (directory / "a.partial").write_text("gone")

    def scandir(folder: str) -> contextlib.nullcontext[list[os.DirEntry[str]]]:
        entries = sorted(there(folder), key=lambda entry: entry.name)
        (directory / "a.partial").unlink(missing_ok=True)
        return contextlib.nullcontext(entries)

    there = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    assert listed(directory).size == size


def test_damaged_runs_are_listed_as_damaged(tmp_path: Path) -> None:
    for number, (name, content) in enumerate(
        [
            ("summary.json", b'{"outcome'),
            ("summary.json", b"[1]"),
            ("summary.json", b"\xff\xfe"),
            ("config.toml", b"\x00\xff"),
            ("config.toml", b""),
            ("metrics.jsonl", b"no row\n"),
            ("metrics.jsonl", b'{"round": []}\n[[[\n'),
        ]
    ):
        directory = run(tmp_path / str(number), 5, "completed")
        (directory / name).write_bytes(content)
        assert listed(directory).state == "damaged", (name, content)
    (run(tmp_path / "folder") / "summary.json").mkdir()
    for name in ("config.toml", "metrics.jsonl", "summary.json"):
        (place := run(tmp_path / f"pipe-{name}", 5, "completed") / name).unlink(missing_ok=True)
        os.mkfifo(place)
        os.mkfifo(place.with_name(".lock"))
        assert listed(place.parent).state == "damaged"
    assert listed(tmp_path / "folder").state == "damaged"
    huge = run(tmp_path / "huge", 5, "completed")
    (huge / "summary.json").write_text(f'{{"rounds": 5, "final_accuracy": NaN, "wall_time": {10**400}}}')
    assert (listed(huge).accuracy, listed(huge).seconds) == (None, None)
    odd = run(tmp_path / "odd", 5, "completed")
    (odd / "summary.json").write_text('{"outcome": 3, "rounds": "many", "final_accuracy": "high", "model_digest": 1}')
    assert (listed(odd).state, listed(odd).digest) == ("unfinished", None)


@pytest.mark.parametrize("torn", [b"", b'{"round": 6, "per_class": [' + b"0, " * 2**16])
def test_a_last_row_of_any_length_is_read(torn: bytes, tmp_path: Path) -> None:
    directory = run(tmp_path / "a", 4)
    row = {"round": 5, "accuracy": 0.25, "wall_time": 9.0, "per_class": [0.5] * 2**16}
    with (directory / "metrics.jsonl").open("ab") as file:
        file.write(json.dumps(row).encode() + b"\n" + torn)
    found = listed(directory)
    assert (found.state, found.rounds, found.accuracy, found.seconds) == ("unfinished", 5, 0.25, 9.0)
    alone = run(tmp_path / "b", of_rounds=5)
    (alone / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert listed(alone).accuracy == 0.25


def test_the_end_of_many_rows_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_TAIL", 100)
    found = listed(run(tmp_path / "a", 20, of_rounds=30))
    assert (found.state, found.rounds, found.accuracy, found.seconds) == ("unfinished", 20, 0.5, 2.0)


def test_the_accuracy_of_the_latest_row_that_has_one_counts(tmp_path: Path) -> None:
    directory = run(tmp_path / "a", of_rounds=5)
    for rows, accuracy in (("", 0.5), ('{"round": 2, "accuracy": 0.75}\n{"round": 2, "accuracy": null}\n', 0.75)):
        (directory / "metrics.jsonl").write_text(f'{{"round": 1, "accuracy": 0.5}}\n{rows}{{"round": 3}}\n')
        assert (listed(directory).rounds, listed(directory).accuracy) == (3, accuracy)


def test_runs_are_found_six_levels_down_in_counting_order_and_not_inside_runs(tmp_path: Path) -> None:
    names = ("b/seed-10", "b/seed-2", "b/try10", "b/try2", "a", "a/inside", "c/d/e/f/g/h", "d/e/f/g/h/i/j", ".hidden/k")
    for name in names:
        run(tmp_path / name)
    (tmp_path / "loop").symlink_to(tmp_path)
    found = [str(path.relative_to(tmp_path)) for path in find(tmp_path)]
    assert found == ["a", "b/seed-2", "b/seed-10", "b/try2", "b/try10", "c/d/e/f/g/h"]
    assert list(find(tmp_path / "a")) == [tmp_path / "a"]
