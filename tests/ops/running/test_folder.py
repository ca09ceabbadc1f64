"""Claiming a run directory, giving it back, and what is said of a run at its end."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import read_run
from fedemu.coordinator.record.run_directory import RunDirectory
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import read_frozen
from fedemu.ops.results.results import Results
from fedemu.ops.running.folder import claim, give_back, reopen
from fedemu.ops.running.together import reachable
from fedemu.ops.running.words import conclude
from fedemu.protocol.errors import ConfigurationError

EXPERIMENT = Experiment(name="tiny", rounds=3)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def write_row(directory: Path, round: int) -> None:
    with RunDirectory(directory) as run:
        run.metrics(Row(round=round, accuracy=0.5, accepted=5))


def write_summary(directory: Path, **more: Any) -> None:
    summary = {
        "name": "tiny",
        "outcome": "completed",
        "rounds": 3,
        "final_accuracy": 0.875,
        "best_accuracy": 0.9,
        "perturbed": False,
        "totals": {"selected": 12, "accepted": 9, "cancelled": 2, "dropped": 1},
        "virtual_time": 7200.0,
        "wall_time": 4.25,
        "model_digest": "ab" * 32,
    }
    (directory / "summary.json").write_text(json.dumps(summary | more))


def test_a_claimed_directory_holds_the_experiment_and_can_be_resumed() -> None:
    directory = claim(EXPERIMENT, Path("deep/new"))
    assert read_frozen(directory) == EXPERIMENT
    with RunDirectory(directory) as run:
        assert run.rows() == ()


def test_runs_without_a_name_are_numbered() -> None:
    assert [claim(EXPERIMENT, None) for _ in range(2)] == [Path("runs/tiny-1"), Path("runs/tiny-2")]


def test_a_run_directory_is_claimed_only_once() -> None:
    claim(EXPERIMENT, Path("mine"))
    with pytest.raises(ConfigurationError, match="mine exists and is not empty; choose another --out, or continue"):
        claim(EXPERIMENT, Path("mine"))


def test_a_claim_without_a_round_is_given_back() -> None:
    directory = claim(EXPERIMENT, None)
    (directory / "logs").mkdir()
    assert give_back(directory)
    assert not Path("runs").exists()


def test_a_claim_beside_another_run_is_given_back_alone() -> None:
    kept, directory = claim(EXPERIMENT, None), claim(EXPERIMENT, None)
    assert give_back(directory)
    assert list(Path("runs").iterdir()) == [kept]


def test_a_run_with_a_round_is_kept() -> None:
    directory = claim(EXPERIMENT, None)
    write_row(directory, 1)
    assert not give_back(directory)
    assert len(read_run(directory).rows) == 1


def test_a_run_may_grow_when_it_is_reopened_and_the_frozen_file_grows_with_it() -> None:
    directory = claim(EXPERIMENT, None)
    experiment, _ = reopen(directory, ["rounds=5"], {})
    assert experiment.rounds == 5
    assert read_frozen(directory).rounds == 5


def test_a_run_can_not_become_another_one() -> None:
    directory = claim(EXPERIMENT, None)
    with pytest.raises(ConfigurationError, match=r"local\.lr can't change"):
        reopen(directory, ["local.lr=0.5"], {})
    assert read_frozen(directory) == EXPERIMENT


def test_a_completed_run_is_told_in_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    directory = claim(EXPERIMENT, None)
    write_summary(directory)
    assert conclude(directory, 0, "run", new=True, print_summary=False) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "tiny: completed, 3 rounds in 4.2 s (2.0 h of the experiment's time)",
        "  accuracy  0.8750  (best 0.9000)",
        "  devices   12 asked: 9 accepted, 2 cancelled, 1 dropped",
        "  model     runs/tiny-1/model.safetensors  sha256 abababababababab",
    ]


def test_periods_and_perplexity_are_told_at_the_end_of_a_run() -> None:
    directory = claim(EXPERIMENT, None)
    with RunDirectory(directory) as run:
        run.metrics(Row(round=1, accuracy=0.5, perplexity=53.517))
        run.metrics(Row(round=2))
    matrix = [[0.8, 0.2, 0.1], [0.5, 0.6, 0.1]]
    measures = {
        "average_accuracy": 0.55,
        "average_incremental_accuracy": 0.675,
        "average_forgetting": 0.3,
        "backward_transfer": None,
    }
    write_summary(directory, periods={"rounds": [2, 3], "accuracy": matrix, **measures})
    results = Results.read(directory)
    assert results.perplexity == 53.517
    assert results.to_text().splitlines()[1:3] == [
        "  accuracy  0.8750  (best 0.9000)  perplexity 53.52",
        "  periods   2 of 3, average accuracy 0.5500, average incremental accuracy 0.6750, forgetting 0.3000",
    ]


def test_why_a_run_diverged_is_told_and_nothing_where_a_resumed_one_went_on() -> None:
    directory = claim(EXPERIMENT, None)
    with RunDirectory(directory) as run:
        run.event("diverged", 1.0, 2.0, detail="3 replies of round 7 were not finite")
    write_summary(directory, outcome="diverged")
    assert Results.read(directory).to_text().splitlines()[1] == "  cause     3 replies of round 7 were not finite"
    write_summary(directory, outcome="completed")
    assert Results.read(directory).cause == ""


def test_a_program_gets_the_summary_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    directory = claim(EXPERIMENT, None)
    write_summary(directory, final_accuracy=None)
    conclude(directory, 0, "run", new=True, print_summary=True)
    said = json.loads(capsys.readouterr().out)
    assert said["directory"] == "runs/tiny-1"
    assert said["totals"]["accepted"] == 9


def test_the_last_line_of_an_unfinished_run_is_the_command_that_resumes_it(capsys: pytest.CaptureFixture[str]) -> None:
    directory = claim(EXPERIMENT, Path("my run"))
    write_row(directory, 1)
    assert conclude(directory, 4, "run", new=True, print_summary=True) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == "fedemu run --resume 'my run'"
    assert "after round 1" in captured.err


def test_a_complete_run_that_was_interrupted_lacks_only_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    directory = claim(EXPERIMENT, None)
    write_summary(directory)
    assert conclude(directory, 4, "run", new=True, print_summary=False) == 4
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("tiny: completed")
    assert said[-1] == "fedemu report runs/tiny-1"


def test_a_run_that_could_not_be_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    directory = claim(EXPERIMENT, None)
    assert conclude(directory, 2, "run", new=True, print_summary=False) == 2
    assert not directory.exists()
    assert capsys.readouterr().err == ""


def test_a_resumed_run_is_never_removed() -> None:
    directory = claim(EXPERIMENT, None)
    assert conclude(directory, 2, "run", new=False, print_summary=False) == 2
    assert directory.exists()


def test_results_give_what_a_notebook_wants() -> None:
    directory = claim(EXPERIMENT, None)
    write_row(directory, 1)
    write_summary(directory)
    results = Results.read(directory)
    assert results.accuracy == 0.875
    assert [row.round for row in results.rows] == [1]
    assert results.model == directory / "model.safetensors"


@pytest.mark.parametrize(
    ("bind", "connect"),
    [
        ("tcp://0.0.0.0:5577", "tcp://127.0.0.1:5577"),
        ("tcp://*:5577", "tcp://127.0.0.1:5577"),
        ("tcp://[::]:5577", "tcp://[::1]:5577"),
        ("tcp://10.0.0.7:5577", "tcp://10.0.0.7:5577"),
    ],
)
def test_devices_of_this_machine_reach_a_wildcard_address_by_loopback(bind: str, connect: str) -> None:
    assert reachable(bind) == connect
