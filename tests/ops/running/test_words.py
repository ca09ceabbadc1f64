"""The lines that a run shows to people when it ends."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from fedemu.coordinator.record.records import write_record
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import load_experiment, write_frozen
from fedemu.ops.running.folder import claim
from fedemu.ops.running.words import at_address, conclude, liveness_line, processes
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host import paths

Write = Callable[..., None]
EXPERIMENT = Experiment(name="tiny", rounds=3)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_completed_run_is_told_in_a_few_lines(capsys: pytest.CaptureFixture[str], write_summary: Write) -> None:
    directory = claim(EXPERIMENT, None)
    write_summary(directory)
    assert conclude(directory, 0, "run", new=True, print_summary=False) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "tiny: completed, 3 rounds in 4.2 s (2.0 h of the experiment's time)",
        "  accuracy  87.5 %  (best 90.0 %)",
        "  devices   12 asked: 9 accepted, 2 cancelled, 1 dropped",
        "  model     runs/tiny-1/model.safetensors  sha256 abababababababab",
    ]


def test_a_program_gets_the_summary_on_stdout(capsys: pytest.CaptureFixture[str], write_summary: Write) -> None:
    directory = claim(EXPERIMENT, None)
    write_summary(directory, final_accuracy=None)
    conclude(directory, 0, "run", new=True, print_summary=True)
    said = json.loads(capsys.readouterr().out)
    assert said["directory"] == "runs/tiny-1"
    assert said["totals"]["accepted"] == 9


def test_the_last_line_of_an_unfinished_run_is_the_command_that_resumes_it(
    capsys: pytest.CaptureFixture[str], write_row: Write
) -> None:
    directory = claim(EXPERIMENT, Path("my run"))
    write_row(directory, 1)
    write_record(directory / "checkpoint", 1, {"format": 2})
    assert conclude(directory, 4, "run", new=True, print_summary=True) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == "fedemu run --resume 'my run'"
    assert "after round 1" in captured.err


def test_a_complete_run_that_was_interrupted_lacks_only_its_report(
    capsys: pytest.CaptureFixture[str], write_summary: Write
) -> None:
    directory = claim(EXPERIMENT, None)
    write_summary(directory)
    assert conclude(directory, 4, "run", new=True, print_summary=False) == 4
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("tiny: completed")
    assert said[-1] == "fedemu report runs/tiny-1"
    write_frozen(EXPERIMENT.model_copy(update={"rounds": 9}), directory)
    assert conclude(directory, 4, "run", new=False, print_summary=False) == 4
    assert capsys.readouterr().err.splitlines()[-1] == "fedemu run --resume runs/tiny-1", "it has to get more rounds"


def test_a_run_that_could_not_begin_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    directory = claim(EXPERIMENT, None)
    assert conclude(directory, 2, "run", new=True, print_summary=False) == 2
    assert not directory.exists()
    assert capsys.readouterr().err == ""


def test_a_run_that_stopped_in_its_first_round_is_not_said_to_have_results(capsys: pytest.CaptureFixture[str]) -> None:
    directory = claim(EXPERIMENT, Path("mine"))
    assert conclude(directory, 4, "run", new=True, print_summary=False) == 4
    assert capsys.readouterr().err.splitlines() == [
        "stopped before the end of the first round; continue it with",
        "fedemu run --resume mine",
    ]


@pytest.mark.parametrize(
    ("code", "way"),
    [
        (2, "once that is mended, continue it with"),
        (3, "continue it with"),
        (4, "continue it with"),
        (5, "once that is mended, continue it with"),
    ],
)
def test_a_run_that_stopped_after_a_round_is_kept_and_the_way_on_is_told(
    code: int, way: str, capsys: pytest.CaptureFixture[str], write_row: Write
) -> None:
    directory = claim(EXPERIMENT, None)
    write_row(directory, 1)
    write_record(directory / "checkpoint", 1, {"format": 2})
    write_row(directory, 2)  # the disk was full when its checkpoint was due, so it is played once more
    assert conclude(directory, code, "run", new=True, print_summary=False) == code
    assert capsys.readouterr().err.splitlines() == [
        f"stopped after round 1; its results so far are in runs/tiny-1; {way}",
        "fedemu run --resume runs/tiny-1",
    ]


def test_an_error_that_hinders_the_last_lines_too_keeps_its_code_and_is_not_told_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], write_row: Write
) -> None:
    directory = claim(EXPERIMENT, None)
    write_row(directory, 1)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: _refuse(errno.EMFILE))
    assert conclude(directory, 5, "run", new=True, print_summary=False) == 5
    assert capsys.readouterr().err.splitlines() == [
        "stopped; its results so far are in runs/tiny-1, and cannot be read now; once that is mended, continue it with",
        "fedemu run --resume runs/tiny-1",
    ]
    with pytest.raises(ConfigurationError, match="Too many open files"):
        conclude(directory, 0, "run", new=True, print_summary=False)


def test_a_run_whose_folder_lets_nobody_in_any_more_keeps_its_code_and_is_not_said_to_be_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], write_row: Write
) -> None:
    directory = claim(EXPERIMENT, None)
    write_row(directory, 1)
    monkeypatch.setattr(paths, "_mode", lambda path: _refuse(errno.EACCES))
    assert conclude(directory, 5, "run", new=True, print_summary=False) == 5
    assert capsys.readouterr().err.splitlines() == [
        "stopped; its results so far are in runs/tiny-1, and cannot be read now; once that is mended, continue it with",
        "fedemu run --resume runs/tiny-1",
    ]


@pytest.mark.parametrize("command", ["run", "coordinator --bind tcp://127.0.0.1:6000"])
def test_a_run_whose_folder_was_moved_is_not_said_to_be_there(
    command: str, capsys: pytest.CaptureFixture[str], write_row: Write
) -> None:
    directory = claim(EXPERIMENT, None)
    write_row(directory, 1)
    directory.rename("elsewhere")
    assert conclude(directory, 5, command, new=True, print_summary=False) == 5
    assert capsys.readouterr().err.splitlines() == [
        "stopped, because runs/tiny-1 was moved or removed; if it was moved, continue it there with",
        f"fedemu {command} --resume DIR",
    ]


def _refuse(number: int) -> NoReturn:
    raise OSError(number, os.strerror(number))


def test_a_resumed_run_is_never_removed() -> None:
    directory = claim(EXPERIMENT, None)
    assert conclude(directory, 2, "run", new=False, print_summary=False) == 2
    assert directory.exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "one process each"),
        (["runtime.per_process=7"], "7 devices per process"),
        (["fleet.wake=on-demand"], "asleep until they are asked, then up to 50 in a process"),
        (["fleet.wake=on-demand", "runtime.per_process=7"], "asleep until they are asked, then up to 7 in a process"),
    ],
)
def test_people_are_told_how_devices_live(settings: list[str], said: str) -> None:
    assert processes(*load_experiment("digits-small", settings, {})) == said


def test_a_fleet_too_large_for_usual_signs_of_life_says_how_often_they_come() -> None:
    large = ["fleet.devices=50000", "fleet.per_round=1000"]
    assert liveness_line(load_experiment("digits", ["fleet.devices=1000"], {})[0]) == ""
    assert liveness_line(load_experiment("digits", large, {})[0]) == (
        "  liveness     a sign of life every 1 min 40 s from each of so many devices; one is gone after 8 min 20 s of "
        "silence (liveness.most_per_second)\n"
    )
    assert liveness_line(load_experiment("digits", [*large, "liveness.most_per_second=25000"], {})[0]) == ""
    assert liveness_line(load_experiment("digits", [*large[:1], "fleet.wake=on-demand"], {})[0]) == ""


def test_a_run_in_one_process_goes_on_in_one_process() -> None:
    settings = ["runtime.transport=memory", "runtime.bind=tcp://127.0.0.1:5600", "runtime.metrics_port=9464"]
    _, memory = load_experiment("digits-small", settings, {})
    assert at_address("run", memory) == "run --transport memory --metrics-port 9464"
    assert at_address("coordinator", memory) == "coordinator --bind tcp://127.0.0.1:5600 --metrics-port 9464"
