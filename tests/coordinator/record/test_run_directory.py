"""The files of a run directory: logs, rewinding, the end of a run, and what is never overwritten."""

import errno
import fcntl
import json
import math
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedemu.algorithms.trees import model_digest
from fedemu.coordinator.record import run_directory
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import read_run
from fedemu.coordinator.record.run_directory import RunDirectory, claim_folder
from fedemu.coordinator.record.summary import summarize
from fedemu.protocol.errors import ConfigurationError, FedemuError


@pytest.fixture
def run(tmp_path: Path):
    with opened(tmp_path / "run") as directory:
        yield directory


def opened(path: Path, **more) -> RunDirectory:
    """The directory of a new run."""
    claim_folder(path)
    (path / "config.toml").write_text('name = "digits"\n')
    return RunDirectory(path, **more)


def lines(path: Path) -> list[dict]:
    def refuse(token: str):
        raise AssertionError(f"{token} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_rows_and_events_are_json_lines_at_once(run: RunDirectory):
    row = Row(round=1, accuracy=0.1 + 0.2, class_accuracy=(0.5, 1.0))
    run.metrics(row)
    run.event("join", 0.0, 0.25, device=7, host="räksmörgås")
    (written,) = lines(run.path / "metrics.jsonl")
    assert written == {**row.to_json(), "class_accuracy": [0.5, 1.0]}
    assert lines(run.path / "events.jsonl") == [
        {"event": "join", "virtual_time": 0.0, "wall_time": 0.25, "device": 7, "host": "räksmörgås"}
    ]
    assert run.rows() == (row,)


def test_what_the_data_say_of_the_model_is_kept_and_written_anew_only_if_it_differs(run: RunDirectory):
    path = run.path / "data.json"
    run.about_data({})
    assert not path.exists()
    about = {"input_shape": (1, 8, 8), "mean": np.array([4.5]), "class_names": ("rose", "tulip")}
    run.about_data(about)
    assert json.loads(path.read_bytes()) == {"input_shape": [1, 8, 8], "mean": [4.5], "class_names": ["rose", "tulip"]}
    assert read_run(run.path).class_names == ("rose", "tulip")
    before = path.stat().st_ino
    run.about_data(about)
    assert path.stat().st_ino == before
    run.about_data({"class_names": ["daisy"]})
    assert read_run(run.path).class_names == ("daisy",)


def test_an_event_may_have_a_field_called_name(run: RunDirectory):
    run.event("refused", 1.0, 2.0, name="x")
    assert read_run(run.path).events[0]["name"] == "x"


def test_rewinding_forgets_what_was_written_after_the_cursor(run: RunDirectory):
    run.metrics(Row(round=1))
    cursor = json.loads(json.dumps(run.cursor()))
    run.metrics(Row(round=2))
    run.event("join", 0.0, 0.0)
    run.rewind(cursor)
    run.metrics(Row(round=22))
    assert [row.round for row in run.rows()] == [1, 22]
    assert read_run(run.path).events == []


def test_rewinding_to_nothing_starts_anew_and_an_earlier_end_stays_until_rounds_follow(run: RunDirectory):
    run.metrics(Row(round=1))
    run.finish(summary(run), {"w": torch.ones(1)})
    run.rewind({})
    assert run.rows() == ()
    assert (run.path / "summary.json").exists()
    assert (run.path / "model.safetensors").exists()
    run.go_on()
    assert not (run.path / "summary.json").exists()
    assert not (run.path / "model.safetensors").exists()


@pytest.mark.parametrize("harm", ["removed", "replaced", "moved with its folder"])
def test_a_log_that_somebody_takes_away_meanwhile_ends_the_run_before_more_is_lost(run: RunDirectory, harm: str):
    log = run.path / "metrics.jsonl"
    run.metrics(Row(round=1))
    run.flush()
    if harm == "moved with its folder":
        run.path.rename(run.path.with_name("elsewhere"))
    else:
        text = log.read_bytes()
        log.unlink()
        if harm == "replaced":  # as editors do
            log.write_bytes(text)
            run.flush()
    run.metrics(Row(round=2))
    with pytest.raises(FedemuError, match=r"metrics\.jsonl was removed or replaced while the run went on"):
        run.flush()


def test_a_folder_that_lets_nobody_in_any_more_is_named_as_a_disk_that_refuses(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(run_directory, "is_file", refuse)  # a ticket for the file system may have run out
    with pytest.raises(FedemuError, match=r"metrics\.jsonl cannot be written: Permission denied") as told, run:
        run.flush()
    assert told.value.exit_code == 5
    with run_directory.alone_in(run.path):  # the lock was given up
        pass


def test_a_log_that_lost_what_the_checkpoint_knows_of_is_not_rewound(run: RunDirectory):
    run.metrics(Row(round=1))
    cursor = run.cursor()
    size = cursor["metrics"]["bytes"]
    words = rf"metrics.jsonl has {size} bytes where the checkpoint knows of {size + 1}"
    with pytest.raises(ConfigurationError, match=words):
        run.rewind(cursor | {"metrics": {"bytes": size + 1, "sha256": ""}})
    assert run.rows() == (Row(round=1),)


def test_rows_that_were_changed_are_not_gone_on_with(tmp_path: Path):
    with opened(tmp_path) as first:
        first.metrics(Row(round=1, accuracy=0.5))
        cursor = first.cursor()
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(log.read_bytes().replace(b"0.5", b"0.6"))
    with RunDirectory(tmp_path) as second, pytest.raises(ConfigurationError, match=r"metrics\.jsonl was changed"):
        second.rewind(cursor)
    log.unlink()
    with RunDirectory(tmp_path) as third, pytest.raises(ConfigurationError, match=r"metrics\.jsonl has 0 bytes where"):
        third.rewind(cursor)
    assert not log.exists(), "a refused run leaves the folder as it was"


def test_events_that_were_changed_are_told_and_the_log_goes_on(tmp_path: Path):
    with opened(tmp_path) as first:
        for device in (3, 4):
            first.event("join", 1.0, 2.0, device=device)
        cursor = first.cursor()
    log = tmp_path / "events.jsonl"
    harmed = log.read_bytes().replace(b":3}", b";3}")
    log.write_bytes(harmed)
    with RunDirectory(tmp_path) as second:
        [sentence] = second.rewind(cursor)
        assert "events.jsonl was changed or is damaged" in sentence
        second.event("join", 3.0, 4.0, device=5)
        cursor = second.cursor()
    assert [event["device"] for event in read_run(tmp_path).events] == [4, 5]
    assert (tmp_path / "events.damaged.jsonl").read_bytes() == harmed
    with RunDirectory(tmp_path) as third:
        assert third.rewind(cursor) == []
        assert third.rewind({"metrics": 0, "events": 0}) == []  # the cursor of an earlier version has no checksums


def test_a_log_that_is_found_damaged_again_is_kept_beside_what_was_kept_before(tmp_path: Path):
    """A run that is killed before its next checkpoint is resumed from the same cursor, and finds what it has mended."""
    with opened(tmp_path) as first:
        for device in (3, 4):
            first.event("join", 1.0, 2.0, device=device)
        cursor = first.cursor()
    log = tmp_path / "events.jsonl"
    harmed = log.read_bytes().replace(b":3}", b";3}")
    log.write_bytes(harmed)
    for name in ("events.damaged.jsonl", "events.damaged-2.jsonl"):
        with RunDirectory(tmp_path) as next_life:
            [sentence] = next_life.rewind(cursor)
        assert sentence.endswith(f"it is kept as {name}")
    assert (tmp_path / "events.damaged.jsonl").read_bytes() == harmed
    assert (tmp_path / "events.damaged-2.jsonl").read_bytes() == log.read_bytes()


def test_events_that_were_cut_are_told_and_the_log_goes_on(tmp_path: Path):
    with opened(tmp_path) as first:
        for device in (3, 4):
            first.event("join", 1.0, 2.0, device=device)
        cursor = first.cursor()
    os.truncate(tmp_path / "events.jsonl", cursor["events"]["bytes"] - 5)
    with RunDirectory(tmp_path) as second:
        [sentence] = second.rewind(cursor)
        assert "where the checkpoint knows of" in sentence
    assert [event["device"] for event in read_run(tmp_path).events] == [3]


def test_a_line_of_which_a_full_disk_took_only_a_part_is_taken_back(run: RunDirectory, files_end_at):
    run.event("join", 1.0, 2.0, device=3)
    cursor = run.cursor()
    with files_end_at(cursor["events"]["bytes"] + 10), pytest.raises(FedemuError, match=r"events\.jsonl .* is full"):
        run.event("join", 1.0, 2.0, device=4)
    assert run.cursor() == cursor
    run.event("join", 1.0, 2.0, device=5)
    assert run.rewind(cursor | {"events": run.cursor()["events"]}) == []
    assert [event["device"] for event in read_run(run.path).events] == [3, 5]


def test_a_damaged_log_stays_as_it_is_if_a_full_disk_does_not_take_what_is_left_of_it(
    tmp_path: Path, monkeypatch, files_end_at
):
    with opened(tmp_path) as first:
        for device in range(3, 9):
            first.event("join", 1.0, 2.0, device=device)
        cursor = first.cursor()
    log = tmp_path / "events.jsonl"
    harmed = log.read_bytes().replace(b":3}", b";3}")
    log.write_bytes(harmed)
    with RunDirectory(tmp_path) as second, files_end_at(len(harmed)), monkeypatch.context() as patch:
        write = run_directory.write_whole

        def last_room(path: Path, content: bytes) -> None:
            write(path, content)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

        patch.setattr(run_directory, "write_whole", last_room)
        with pytest.raises(FedemuError, match=r"events\.jsonl cannot be written"):
            second.rewind(cursor)
    assert (tmp_path / "events.damaged.jsonl").read_bytes() == log.read_bytes() == harmed
    with RunDirectory(tmp_path) as third:
        assert len(third.rewind(cursor)) == 1
    assert [event["device"] for event in read_run(tmp_path).events] == [4, 5, 6, 7, 8]


def test_a_resumed_run_goes_on_where_its_cursor_is(tmp_path: Path):
    with opened(tmp_path) as first:
        first.metrics(Row(round=1))
        cursor = first.cursor()
        first.metrics(Row(round=2))
    with RunDirectory(tmp_path) as second:
        second.rewind(cursor)
        second.metrics(Row(round=2, attempts=2))
    assert read_run(tmp_path).rows == (Row(round=1), Row(round=2, attempts=2))


def test_only_a_diagnosed_run_has_a_log_of_diagnoses(run: RunDirectory, tmp_path: Path):
    assert not (run.path / "diagnosis.jsonl").exists()
    assert read_run(run.path).diagnosis == []
    with opened(tmp_path / "diagnosed", diagnosed=True) as other:
        assert read_run(other.path).diagnosis == []
        other.diagnosis({"round": 1, "gradient_diversity": math.inf})
    assert read_run(other.path).diagnosis == [{"round": 1, "gradient_diversity": None}]


def test_diagnoses_after_the_cursor_are_forgotten_too(tmp_path: Path):
    with opened(tmp_path, diagnosed=True) as first:
        first.diagnosis({"round": 1})
        cursor = first.cursor()
        first.diagnosis({"round": 2})
    with RunDirectory(tmp_path, diagnosed=True) as second:
        second.rewind(cursor)
        second.diagnosis({"round": 2, "again": True})
    assert read_run(tmp_path).diagnosis == [{"round": 1}, {"round": 2, "again": True}]


def summary(run: RunDirectory, **facts):
    digests = {"model_digest": "ab" * 32, "data_digest": "cd" * 32}
    return summarize(run.rows(), **{"name": "digits", "outcome": "completed", "seed": 1, **digests, **facts})


def test_finish_writes_the_model_and_a_summary(run: RunDirectory):
    run.metrics(Row(round=1, accuracy=0.5, class_accuracy=(math.nan, 0.5), accepted=3, virtual_time=9.0))
    variables = {"w": torch.arange(6.0).reshape(2, 3).t(), "tied": torch.ones(2), "n": torch.tensor(3)}
    variables["also"] = variables["tied"]
    run.finish(summary(run), variables)
    (written,) = lines_of_one(run.path / "summary.json")
    assert (written["final_accuracy"], written["forgetting"], written["perturbed"]) == (0.5, None, False)
    assert written["totals"]["accepted"] == 3
    assert set(written["versions"]) == {"python", "torch", "numpy", "pyzmq", "fedemu"}
    model = load_file(run.path / "model.safetensors")
    assert model.keys() == variables.keys()
    assert all(torch.equal(model[name], variables[name]) for name in model)
    assert not [path for path in run.path.iterdir() if "partial" in path.name]


def lines_of_one(path: Path) -> list[dict]:
    return [json.loads(path.read_text(), parse_constant=lambda token: pytest.fail(token))]


def test_an_existing_run_is_never_overwritten(run: RunDirectory):
    with pytest.raises(ConfigurationError, match=r"is not empty; choose another .*, or continue its run \(--resume "):
        claim_folder(run.path)


def test_a_folder_with_something_else_is_never_overwritten(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigurationError, match=r"not empty; choose another folder \(--out\)\.$"):
        claim_folder(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_whose_name_is_no_utf_8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"/caf\\udce9' is no UTF-8; choose another --out"):
        claim_folder(tmp_path / os.fsdecode(b"caf\xe9"))
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    with pytest.raises(ConfigurationError, match=r"in this locale, .*; set LC_ALL=C\.UTF-8, or choose another --out"):
        claim_folder(tmp_path / os.fsdecode(b"caf\xe9"))
    assert not any(tmp_path.iterdir())
    claim_folder(tmp_path / "café au lait")


def test_an_empty_folder_will_do(tmp_path: Path):
    claim_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_file_is_no_run_directory(tmp_path: Path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigurationError, match="is not a folder"):
        claim_folder(tmp_path / "run")
    with pytest.raises(ConfigurationError, match=r"cannot be written: .*choose another --out"):
        claim_folder(tmp_path / "run" / "below")


@pytest.mark.parametrize(
    ("name", "make", "kind"),
    [
        ("checkpoint", Path.touch, "folder"),
        ("logs", Path.touch, "folder"),
        ("metrics.jsonl", Path.mkdir, "file"),
        ("events.jsonl", os.mkfifo, "file"),
        (".lock", os.mkfifo, "file"),
        ("checkpoint/leases.jsonl", os.mkfifo, "file"),
        ("logs/coordinator.log", os.mkfifo, "file"),
    ],
)
def test_what_is_no_file_or_no_folder_is_named_and_not_waited_for(tmp_path: Path, name: str, make, kind: str):
    (tmp_path / "config.toml").write_text("")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    make(tmp_path / name)
    with pytest.raises(ConfigurationError, match=rf"/{name} is no {kind}; move it away, or go on in a copy"):
        RunDirectory(tmp_path)


def test_a_run_whose_folder_cannot_be_written_may_go_on_in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.toml").write_text("")
    monkeypatch.setattr(run_directory, "_locked", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(ConfigurationError, match=r"cannot be written: .*; make it writable, or go on in a copy of it"):
        RunDirectory(tmp_path)


def test_there_is_nothing_to_resume_in_an_empty_folder(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="no run to resume"):
        RunDirectory(tmp_path)
    assert list(tmp_path.iterdir()) == []


def try_to_resume(path: Path, answers) -> None:
    try:
        RunDirectory(path)
    except ConfigurationError as error:
        answers.put(str(error))
    else:
        answers.put("resumed")


def test_two_coordinators_cannot_work_in_one_folder(tmp_path: Path):
    forks = multiprocessing.get_context("fork")
    answers = forks.Queue()

    def ask() -> str:
        child = forks.Process(target=try_to_resume, args=(tmp_path, answers))
        child.start()
        answer = answers.get(timeout=30)
        child.join(30)
        return answer

    with opened(tmp_path):
        said = f"Another coordinator (process {os.getpid()}) is at work in {tmp_path}; stop it, or wait until it ends."
        assert ask() == said
    assert ask() == "resumed"


def test_a_coordinator_that_is_stopped_is_named_with_the_command_by_which_it_goes_on(tmp_path: Path):
    (tmp_path / "config.toml").touch()
    holds = "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{holds}; sys.stdin.read()", str(tmp_path / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        other.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        try:
            with pytest.raises(ConfigurationError) as caught:
                RunDirectory(tmp_path)
        finally:
            other.kill()
    assert str(caught.value) == (
        f"Another coordinator holds the run in {tmp_path}, and its process {other.pid} is stopped; "
        f"`kill -CONT {other.pid}` lets it go on, or end if a signal for that has come."
    )


def test_a_file_system_without_locks_is_not_taken_for_another_coordinator(tmp_path: Path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    for _ in range(2):  # nothing is left that would be taken for a run
        with pytest.raises(ConfigurationError, match=r"gives no locks \(No locks available\).* another one\.$"):
            claim_folder(tmp_path / "run")


def test_the_digest_can_be_recomputed_as_the_documentation_says(run: RunDirectory, monkeypatch, capsys):
    page = Path(__file__).parents[3] / "docs" / "run_directory.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    variables = {"w": torch.randn(3, 2).t(), "größe": torch.tensor(3)}
    run.finish(summary(run, model_digest=model_digest(variables)), variables)
    monkeypatch.chdir(run.path)
    exec(program, {})
    assert capsys.readouterr().out.strip() == read_run(run.path).summary["model_digest"]
