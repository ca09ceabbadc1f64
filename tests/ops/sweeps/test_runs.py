"""Runs of a sweep: side by side, kept when they are done, gone on with after a kill, and compared."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from fedemu.ops.assembly.named_code import record, with_digests
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import load_experiment, read_frozen, write_frozen
from fedemu.ops.experiment.traces import with_traces
from fedemu.ops.stress.warm import WarmStart
from fedemu.ops.sweeps import sweep as sweep_module
from fedemu.ops.sweeps.plan import Planned, load_sweep, planned
from fedemu.ops.sweeps.runs import Failed, Progress, command_of, has_nothing_left, play, require_same
from fedemu.ops.sweeps.sweep import loaded, prepare, require_own_ports, run_sweep, tell_changed_code
from fedemu.ops.sweeps.table import others_in_table, write_table
from fedemu.protocol.errors import ConfigurationError

pytestmark = pytest.mark.timeout(600)

SMALL = """
[[parts]]
name = "small"
experiments = ["digits-small", "digits-small+fedntd"]
rounds = 2
set = ["fleet.devices=6", "fleet.per_round=3"]
"""


def sweep(folder: Path, *more: str) -> list[str]:
    path = folder / "sweep.toml"
    path.write_text(SMALL, encoding="utf-8")
    return ["sweep", str(path), "--out", str(folder / "runs"), *more]


def digest(directory: Path) -> str:
    return str(json.loads((directory / "summary.json").read_text())["model_digest"])


def test_runs_side_by_side_are_the_runs_alone_and_a_killed_sweep_goes_on(tmp_path: Path, warm: WarmStart) -> None:
    alone, log = tmp_path / "alone", tmp_path / "log"
    words = ["run", "digits-small", "--transport", "memory", "--rounds", "2", "--devices", "6"]
    words += ["--set", "fleet.per_round=3", "--set", "runtime.report=false", "--out", str(alone)]
    assert warm.start(words, log, os.environ).wait(400) == 0, log.read_text()

    plain = os.environ | {"FEDEMU_RUNTIME__REPORT": "false"}
    killed = warm.start(sweep(tmp_path, "--at-once", "2"), log, plain)
    first = tmp_path / "runs" / "small" / "digits-small" / "seed-1"
    deadline = time.monotonic() + 400
    while not (first / "config.toml").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.kill()
    killed.wait(400)

    again = warm.start(sweep(tmp_path, "--at-once", "2"), log, plain)
    assert again.wait(400) == 0, log.read_text()
    assert "2 runs" in log.read_text()
    assert (tmp_path / "runs" / "compare" / "compare.html").exists()
    assert digest(first) == digest(alone)

    folders = [run.folder for run in planned(load_sweep(str(tmp_path / "sweep.toml")))]
    assert all(has_nothing_left(tmp_path / "runs" / folder) for folder in folders)
    experiment = read_frozen(first)
    assert has_nothing_left(first, experiment)
    assert not has_nothing_left(first, experiment.model_copy(update={"rounds": experiment.rounds + 1}))
    table = (tmp_path / "runs" / "sweep.csv").read_text().splitlines()
    assert [line.split(",")[:4] for line in table[1:]] == [
        ["small", "digits-small", "1", "completed"],
        ["small", "digits-small+fedntd", "1", "completed"],
    ]


def test_runs_of_an_earlier_sweep_are_counted_while_they_are_there(tmp_path: Path) -> None:
    old, new = ([Planned("part", name, seed, ()) for seed in (1, 2)] for name in ("old", "new"))
    assert others_in_table(tmp_path, old) == 0
    write_table(tmp_path, old)
    (tmp_path / old[0].folder).mkdir(parents=True)
    assert others_in_table(tmp_path, old) == 0
    assert others_in_table(tmp_path, new) == 1
    (tmp_path / "sweep.csv").write_bytes("part;größe\r\n".encode("cp1252"))
    assert others_in_table(tmp_path, new) == 0


def test_seeds_of_an_earlier_sweep_are_left_out_of_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [Planned("", "digits-small", seed, ()) for seed in (1, 2, 3)]
    for run in runs:
        directory = tmp_path / run.folder
        directory.mkdir(parents=True)
        write_frozen(Experiment(rounds=1, seed=run.seed), directory)
        (directory / "metrics.jsonl").write_text('{"round":1,"accuracy":0.5}\n')
        (directory / "summary.json").write_text(json.dumps({"outcome": "completed", "rounds": 1}))
    write_table(tmp_path, runs)
    assert run_sweep(tmp_path, runs[:2], {}, 1, "again") == 0
    assert "1 run of another sweep, or of another --only, in" in capsys.readouterr().err
    [row] = json.loads((tmp_path / "compare" / "compare.json").read_text())["rows"]
    assert [run["seed"] for run in row["runs"]] == [1, 2]


def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [Planned("part", name, 1, ()) for name in ("bad", "silent", "good")]

    def command(directory: Path, planned: Planned) -> list[str]:
        directory.mkdir(parents=True)
        (directory / "metrics.jsonl").touch()
        if planned.experiment == "silent":
            return [sys.executable, "-c", "raise SystemExit(5)"]
        if planned.experiment == "bad":
            said = b"caf\xe9\nfedemu: no quorum\nfedemu: warning: slow\n"
            return [sys.executable, "-c", f"import sys; sys.stdout.buffer.write({said!r}); raise SystemExit(3)"]
        (directory / "summary.json").write_text('{"outcome": "completed", "final_accuracy": 0.75}')
        return [sys.executable, "-c", ""]

    assert run_sweep(tmp_path, runs, {}, 1, "again", command=command) == 3
    said = capsys.readouterr().err
    for line in (
        r"1 of 3: part/bad/seed-1 in .*: failed: no quorum \(all its lines are in .*seed-1\.log\)",
        r"2 of 3: part/silent/seed-1 in .*: failed: exit code 5 \(",
        r"3 of 3: part/good/seed-1 in .*: completed, accuracy 75\.0 %$",
    ):
        assert re.search(line, said, re.MULTILINE)


def test_a_machine_that_starts_no_further_process_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", MagicMock(side_effect=BlockingIOError(errno.EAGAIN, "")))
    runs = [Planned("part", "digits-small", 1, ())]
    with pytest.raises(ConfigurationError, match="no process can be started on this machine: the limit of processes"):
        play(tmp_path, runs, Progress(runs, 1), lambda *_: ["true"])


def test_runs_beside_each_other_see_a_gpu_each(tmp_path: Path) -> None:
    runs = [Planned("part", "digits-small", seed, ()) for seed in (1, 2, 3)]
    said = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    gpus = ["4", "GPU-7"]
    assert play(tmp_path, runs, Progress(runs, 3), lambda *_: [sys.executable, "-c", said], gpus) == []
    assert [(tmp_path / f"{run.folder}.log").read_text().strip() for run in runs] == [*gpus, "4"]


@pytest.mark.parametrize(("device_type", "seen"), [("auto", ["0", "1"]), ("cpu", [])])
def test_a_sweep_plays_its_runs_on_the_gpus_of_this_machine_unless_they_compute_on_the_processor(
    device_type: str, seen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def played(folder: Path, left: list[Planned], progress: Progress, command: None, gpus: list[str]) -> list[Failed]:
        assert (command, gpus) == (None, seen)
        return []

    monkeypatch.setattr(sweep_module, "usable_gpus", lambda kind: [] if kind == "cpu" else ["0", "1"])
    monkeypatch.setattr(sweep_module, "play", played)
    runs = [Planned("part", "digits-small", 1, (f"runtime.device_type={device_type}",))]
    assert run_sweep(tmp_path, runs, loaded(runs), 2, "again") == 0


def test_a_run_on_a_gpu_has_processes_of_its_own_because_no_server_job_could_be_forked_beside_the_gpu(
    tmp_path: Path,
) -> None:
    run = Planned("part", "digits-small", 1, ("runtime.per_process=7",))
    for on_gpu, transport, per_process in ((True, "zmq", 7), (False, "memory", 7)):
        words = command_of(tmp_path, run, on_gpu)
        settings = [word for option, word in pairwise(words) if option == "--set"]
        _, runtime = load_experiment("digits-small", settings, {})
        assert (runtime.transport, runtime.per_process) == (transport, per_process)


def test_a_folder_in_which_no_run_has_begun_is_removed_when_its_run_starts_and_not_before(tmp_path: Path) -> None:
    """Before, the folder of the sweep is not held, and it may be that of another sweep's run."""
    run = Planned("part", "digits-small", 1, ())
    claimed = tmp_path / run.folder
    claimed.mkdir(parents=True)
    for name in (".lock", "traces.json", "config.toml.partial"):
        (claimed / name).touch()
    prepare(tmp_path, loaded([run]))
    assert claimed.is_dir()
    there = []

    def command(directory: Path, planned: Planned) -> list[str]:
        there.append(directory.exists())
        return [sys.executable, "-c", ""]

    progress, began = Progress([run], 1), time.monotonic()
    assert play(tmp_path, [run], progress, command) == []
    assert there == [False]
    [(_, seconds)] = progress.took
    assert 0 < seconds < time.monotonic() - began


def test_an_option_that_a_method_lacks_is_told_with_its_runs_before_the_first_begins(tmp_path: Path) -> None:
    good, wrong = (
        Planned("good", "digits-small", 1, ()),
        Planned("wrong", "digits-small", 1, ("algorithm.options.mu=1",)),
    )
    said = r"^wrong/digits-small: 'fedavg' has no option algorithm\.options\.mu; it has no options$"
    with pytest.raises(ConfigurationError, match=said):
        prepare(tmp_path, loaded([good, wrong]))


def test_a_folder_with_the_run_of_another_experiment_is_refused_unless_only_rounds_are_added(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("device,start,end\na,0,100\n")
    planned = Experiment.parse({"rounds": 3, "availability": {"kind": "trace", "file": str(trace)}})
    frozen = with_traces(planned, [tmp_path])
    (tmp_path / "run").mkdir()
    require_same(tmp_path / "run", frozen)
    write_frozen(frozen, tmp_path / "run")
    require_same(tmp_path / "run", frozen.model_copy(update={"rounds": 4}))
    trace.write_text("device,start,end\na,0,50\n")
    for other, said in (
        (frozen.model_copy(update={"rounds": 2}), "there rounds is 3, and here 2"),
        (frozen.model_copy(update={"seed": 7}), "there seed is 1, and here 7"),
        (with_traces(planned, [tmp_path]), "its trace files had another content"),
    ):
        with pytest.raises(ConfigurationError, match=f"/run is the run of another experiment: {said}; choose another"):
            require_same(tmp_path / "run", other)


def test_code_that_was_changed_since_runs_began_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def loss(logits, batch, facts): ...\n")
    runs = [Planned(part, "digits-small", 1, ("algorithm.loss=mine.py:loss",)) for part in ("one", "two", "three")]
    experiments = loaded(runs)
    for run in runs[:2]:
        (tmp_path / run.folder).mkdir(parents=True)
        record(tmp_path / run.folder, with_digests(experiments[run.folder][0]).code, print)
    tell_changed_code(tmp_path, experiments)
    assert capsys.readouterr().err == ""
    Path("mine.py").write_text("def loss(logits, batch, facts): return 0.0\n")
    tell_changed_code(tmp_path, experiments)
    assert capsys.readouterr().err.startswith(
        f"fedemu: warning: mine.py is not what it was for 2 runs in this folder (such as {tmp_path / runs[0].folder}): "
    )


def test_a_run_that_goes_on_gets_the_rounds_that_its_file_has_now(tmp_path: Path) -> None:
    source = tmp_path / "mine.toml"
    source.write_text("rounds = 5\n")
    run = Planned("", str(source), 1, ())
    directory = tmp_path / "runs" / run.folder
    directory.mkdir(parents=True)
    write_frozen(Experiment(rounds=2), directory)
    (directory / "summary.json").write_text(json.dumps({"outcome": "completed", "rounds": 2}))
    commands = []

    def command(directory: Path, planned: Planned) -> list[str]:
        commands.append(command_of(directory, planned))
        return [sys.executable, "-c", ""]

    assert run_sweep(tmp_path / "runs", [run], loaded([run]), 1, "again", command=command) == 0
    [words] = commands
    assert words[words.index("--resume") + 1] == str(directory)
    assert "rounds=5" in words


@pytest.mark.parametrize(("outcome", "over"), [("completed", True), ("diverged", True), ("interrupted", False)])
def test_a_run_is_over_if_it_is_completed_or_diverged(tmp_path: Path, outcome: str, over: bool) -> None:
    assert not has_nothing_left(tmp_path)
    write_frozen(Experiment(rounds=3), tmp_path)
    rounds = 2 if outcome == "diverged" else 3
    (tmp_path / "summary.json").write_text(json.dumps({"outcome": outcome, "rounds": rounds}))
    assert has_nothing_left(tmp_path) == over
    (tmp_path / "summary.json").write_text("{")
    assert not has_nothing_left(tmp_path)


def test_runs_at_the_same_time_cannot_serve_their_metrics_on_one_port(tmp_path: Path) -> None:
    runs = [Planned("part", "digits-small", seed, ("runtime.metrics_port=9100",)) for seed in (1, 2)]
    said = r"runtime\.metrics_port = 9100 serves the metrics of one run, and 2 are to run at a time; choose --at-once 1"
    with pytest.raises(ConfigurationError, match=said):
        run_sweep(tmp_path, runs, loaded(runs), 3, "again")
    require_own_ports(loaded(runs), runs, at_once=1)
    require_own_ports(loaded(runs), runs[:1], at_once=2)


def test_the_time_left_is_that_of_runs_of_the_same_part_or_of_all() -> None:
    runs = [Planned(part, "digits", seed, ()) for seed, part in enumerate("aaabbc")]
    progress = Progress(runs, at_once=2)
    progress.took = [(runs[0], 10.0), (runs[3], 40.0)]
    assert progress.seconds_left() == (2 * 10.0 + 40.0 + 25.0) / 2
    progress.later = 4
    assert progress.seconds_left() == (2 * 10.0 + 40.0 + 25.0 + 4 * 25.0) / 2


def test_the_time_left_is_as_the_plan_says_in_the_measure_of_this_machine() -> None:
    runs = [Planned("a", "digits", seed, (), seconds=seconds) for seed, seconds in enumerate([10, 20, 30, 60])]
    progress = Progress(runs, at_once=3)
    progress.took = [(runs[0], 5.0)]
    assert progress.seconds_left() == 0.5 * (20 + 30 + 60) / 3
    progress.took = [(runs[0], 5.0), (runs[1], 10.0), (runs[2], 15.0)]
    assert progress.seconds_left() == 0.5 * 60, "the last one has this machine for itself"
    progress.took.append((runs[3], 30.0))
    assert progress.seconds_left() == 0
    unknown = Planned("a", "digits", 9, ())
    assert Progress([*runs, unknown], 1, took=progress.took[:3]).seconds_left() == 2 * 10.0, "if it says it of all"


def test_an_interrupt_stops_the_runs_and_says_how_to_go_on(tmp_path: Path, warm: WarmStart) -> None:
    words = sweep(tmp_path, "--at-once", "2")
    endless = SMALL.replace("rounds = 2", "rounds = 1_000_000")
    (tmp_path / "sweep.toml").write_text(endless, encoding="utf-8")
    log = tmp_path / "log"
    begun = warm.start(words, log, os.environ)
    first = tmp_path / "runs" / "small" / "digits-small" / "seed-1"
    deadline = time.monotonic() + 400
    while not [*first.glob("checkpoint/record-*.json")]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    begun.send_signal(signal.SIGINT)
    assert begun.wait(400) == 4
    assert json.loads((first / "summary.json").read_text())["outcome"] == "interrupted"
    assert log.read_text().endswith(f"--out {tmp_path / 'runs'} --at-once 2\n")
