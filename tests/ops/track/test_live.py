"""Trackers that follow a run in processes of their own: a run is not harmed by one that fails or hangs."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from fedemu.coordinator.record.row import Row
from fedemu.ops.experiment.runtime import Runtime, Track
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.running.launch import child_command
from fedemu.ops.track import follow
from fedemu.ops.track.live import followers
from fedemu.protocol.errors import ConfigurationError

TRACKERS = """
import json, threading
from pathlib import Path


class Good:
    def begin(self, run):
        self.file = Path(run.out)
        self.file.touch()

    def row(self, row, numbers):
        with self.file.open("a") as file:
            file.write(f"{row.round}\\n")

    def flush(self): pass
    def ended(self, end): pass
    def close(self): pass


class Failing(Good):
    def begin(self, run):
        raise OSError("no such server")


class Hanging(Good):
    def begin(self, run):
        threading.Event().wait()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.toml").write_text('name = "tiny"\n')
    (tmp_path / "trackers.py").write_text(TRACKERS)
    return directory


def test_a_resumed_run_is_told_to_those_who_followed_it_before(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    track = Track(to=(f"{tmp_path / 'trackers.py'}:Good",), out="seen", patience=90)
    for round, (settings, working) in enumerate(((track, tmp_path), (Track(), run)), 1):
        monkeypatch.chdir(working)  # the place stays the same
        with followers(run, settings, child_command, said.append) as (follower,):
            with (run / "metrics.jsonl").open("ab") as rows:
                rows.write(b'{"round": %d}\n' % round)
            follower.round_finished(Row(round=round))
    assert ((tmp_path / "seen").read_text(), said) == ("1\n2\n", [])
    (run / "track" / "trackers.json").write_text('{"to": ["nobody"]}')
    with followers(run, Track(), child_command, said.append) as nobody:
        assert nobody == []
    assert "do not go on" in said[0]


def test_a_tracker_follows_the_rounds_to_the_last(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    out = tmp_path / "seen"
    track = Track(to=(f"{tmp_path / 'trackers.py'}:Good",), out=str(out), patience=90)
    with followers(run, track, child_command, said.append) as (follower,):
        for round in (1, 2, 3):
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"round": round, "accuracy": 0.5}) + "\n")
            follower.round_finished(Row(round))
    assert said == []
    assert out.read_text().split() == ["1", "2", "3"]


def test_rounds_that_came_while_a_tracker_was_busy_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exporting, given = MagicMock(), list[tuple[object, ...]]()
    monkeypatch.setattr(follow, "Export", lambda *settings, wait: given.append(settings) or exporting)
    readable, writable = os.pipe()
    os.write(writable, b'{"out": "", "project": "fedemu"}\n' + b"\n" * 5000)
    os.close(writable)
    with os.fdopen(readable) as waiting:
        monkeypatch.setattr("sys.stdin", waiting)
        assert follow.main(["run", "mlflow"]) == 0
    assert given == [(Path("run"), "mlflow", "", "fedemu")]
    assert [call[0] for call in exporting.method_calls] == ["more", "end", "close"]


def test_one_that_fails_and_one_that_hangs_are_told_once_and_ended(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    names = tuple(f"{tmp_path / 'trackers.py'}:{name}" for name in ("Failing", "Hanging"))
    with followers(run, Track(to=names, patience=5), child_command, said.append) as (follower,):
        for round in range(1, 2000):  # more lines than a pipe holds are no reason to wait
            follower.round_finished(Row(round))
    failing, hanging = sorted(said)
    assert "Failing failed (OSError: no such server, " in failing
    assert "trackers.py:" in failing.partition(");")[0]
    logs = "".join(log.read_text() for log in (run / "logs").glob("track-*.log"))
    assert "Traceback (most recent call last)" in logs
    assert f"the run is not harmed, and `fedemu export {run} --to {names[0]}` tries again" in failing
    assert "Hanging failed (it was not done 5 s after the run, and was ended)" in hanging


def test_a_system_that_starts_no_process_is_told_in_words(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    refused = MagicMock(side_effect=OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
    monkeypatch.setattr("fedemu.ops.track.live.subprocess.Popen", refused)
    with followers(run, Track(to=("tensorboard",)), child_command, said.append):
        pass
    why = "the limit of processes is reached; raise it (ulimit -u, or pids.max of the container)"
    assert said[0].startswith(f"tracking to tensorboard failed ({why}); the run is not harmed")


def test_the_command_that_tries_again_writes_to_the_same_place(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    name, out = f"{tmp_path / 'trackers.py'}:Failing", str(tmp_path / "my board")
    with followers(run, Track(to=(name,), out=out, project="mine", patience=90), child_command, said.append):
        pass
    (sentence,) = said
    assert f"`fedemu export {run} --to {name} --out '{out}' --project mine` tries again" in sentence


def test_a_password_in_the_address_is_told_to_the_tracker_alone(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    words: list[str] = []

    def command(*named: str) -> list[str]:
        words.extend(named)
        return child_command(*named)

    name = f"{tmp_path / 'trackers.py'}:Failing"
    track = Track(to=(name,), out="https://alice:s3cret@mlflow.example", patience=90)
    before = os.umask(0o022)
    try:
        with followers(run, track, command, said.append):
            kept = run / "track" / "trackers.json"
            assert kept.stat().st_mode & 0o777 == 0o600
            assert json.loads(kept.read_text())["out"] == track.out
    finally:
        os.umask(before)
    assert words == ["fedemu-track", "fedemu.ops.track.follow", str(run), name]
    (sentence,) = said
    assert f"`fedemu export {run} --to {name} --out https://alice:...@mlflow.example` tries again" in sentence


def test_who_is_told_is_no_part_of_the_experiment() -> None:
    plain, _ = load_experiment("digits", [], {})
    told, runtime = load_experiment("digits", ["track.out=here"], {"FEDEMU_TRACK__TO": "tensorboard"})
    assert told.digest == plain.digest
    assert runtime == Runtime(track=Track(to=("tensorboard",), out="here"))
    _, runtime = load_experiment({"track": {"to": ["mlflow", "wandb"]}}, [], {})
    assert runtime.track.to == ("mlflow", "wandb")
    with pytest.raises(ConfigurationError, match=r"track.too is no setting; did you mean track.to\?"):
        load_experiment("digits", ["track.too=mlflow"], {})
    for overrides, environment in ((["runtime.track.to=mlflow"], {}), ([], {"FEDEMU_RUNTIME__TRACK__TO": "mlflow"})):
        with pytest.raises(ConfigurationError, match=r"runtime\.track is no setting; .* so write track\.to$"):
            load_experiment("digits", overrides, environment)
    with pytest.raises(ConfigurationError, match=r"track\.patience"):
        load_experiment("digits", ["track.patience=-1"], {})
