"""Errors become an exit code and one sentence on stderr."""

import errno
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fedemu.ops import doctor
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.running.exits import exit_code_of
from fedemu.protocol import errors
from fedemu.protocol.code.named import load


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigurationError("wrong"), 2),
        (errors.DataError("wrong"), 2),
        (errors.QuorumError("wrong"), 3),
        (errors.UnreachableError("wrong"), 3),
        (errors.RefusedError("fleet_full", "wrong"), 3),
        (errors.Interrupted("wrong"), 4),
    ],
)
def test_an_error_ends_with_its_code_and_its_sentence(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def action() -> int:
        raise error

    assert exit_code_of(action) == code
    assert capsys.readouterr().err == "fedemu: wrong\n"


def test_control_characters_of_a_quoted_text_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> int:
        raise errors.DataError("\x1b[31mone\x9b0m\u202e\ntwo caf\xe9")

    assert exit_code_of(action) == 2
    assert capsys.readouterr().err == "fedemu: \\x1b[31mone\\x9b0m\\u202e\ntwo caf\xe9\n"


def test_an_internal_error_is_one_sentence_that_names_the_file_with_the_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["fedemu", os.fsdecode(b"caf\xe9")])  # names of files need not be text

    def action() -> int:
        raise ZeroDivisionError("by zero")

    assert exit_code_of(action) == 5
    said = capsys.readouterr().err
    assert said.startswith("fedemu: internal error: ZeroDivisionError: by zero")
    assert said.count("\n") == 1
    log = Path(said.rpartition(" is in ")[2].strip().rstrip(")"))
    assert "Traceback" in log.read_text()
    assert log.read_text().endswith("\nfedemu caf\\udce9\n")


@pytest.mark.parametrize(
    "action",
    [
        lambda: len(Path.cwd().parts),
        lambda: load_experiment("mine.toml", [], {}) and 0,
        lambda: len(doctor.examine({})),
    ],
    ids=["asked for", "beside a path", "doctor"],
)
def test_a_working_folder_that_was_removed_is_named(
    action: Callable[[], int], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert exit_code_of(action) == 2
    assert capsys.readouterr().err == "fedemu: the working folder no longer exists; change to another one\n"


def test_a_library_that_finds_no_place_for_temporary_files_is_no_internal_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/nowhere"])
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert exit_code_of(lambda: len(tempfile.gettempdir())) == 2
    assert capsys.readouterr().err == (
        "fedemu: /nowhere cannot be written: No such file or directory; set TMPDIR to a folder for temporary files\n"
    )


def test_too_many_open_files_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> int:
        raise OSError(errno.EMFILE, "Too many open files", "/there/blobs")

    assert exit_code_of(action) == 5
    assert capsys.readouterr().err == (
        "fedemu: /there/blobs cannot be opened, because too many files are open; raise ulimit -n\n"
    )


def test_a_machine_that_starts_no_thread_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> int:
        raise RuntimeError("can't start new thread")

    assert exit_code_of(action) == 5
    assert capsys.readouterr().err == (
        "fedemu: no thread can be started on this machine: the limit of processes is reached; raise it (ulimit -u, or "
        "pids.max of the container)\n"
    )


def test_an_internal_error_whose_traceback_finds_no_place_is_still_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))

    def action() -> int:
        raise KeyError(3)

    assert exit_code_of(action) == 5
    assert capsys.readouterr().err == "fedemu: internal error: KeyError: 3\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_and_is_no_internal_error(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> int:
        raise OSError(number, "No space left on device", "/there/metrics.jsonl")

    assert exit_code_of(action) == 5
    assert (
        capsys.readouterr().err == "fedemu: /there/metrics.jsonl cannot be written: the disk is full; make room there\n"
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 149. GiB for an array"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_a_lack_of_memory_is_named_and_is_no_internal_error(
    error: Exception, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def action() -> int:
        raise error

    assert exit_code_of(action) == 5
    said, _, log = capsys.readouterr().err.partition(" (the traceback is in ")
    assert said == f"fedemu: this machine has too little memory: {type(error).__name__}: {error}"
    assert "Traceback" in Path(log.strip().rstrip(")")).read_text()


def test_ctrl_c_is_code_4(capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> int:
        raise KeyboardInterrupt

    assert exit_code_of(action) == 4
    assert capsys.readouterr().err == "fedemu: interrupted\n"


def test_a_reader_of_stdout_that_went_away_is_no_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert exit_code_of(lambda: print("more", flush=True) or 7) == 0
    assert capsys.readouterr().err == ""


def test_another_broken_pipe_is_told_and_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pipes.py").write_text("def fail():\n    raise BrokenPipeError(32, 'Broken pipe')\n")
    reading, writing = os.pipe()
    with open(reading), open(writing, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert exit_code_of(load("pipes.py:fail")) == 5
    assert "fedemu: BrokenPipeError: [Errno 32] Broken pipe, pipes.py:2" in capsys.readouterr().err


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A function of somebody's own that fails."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def fail():\n    return 1 / 0\n")
    fail: Callable[[], int] = load("own.py:fail")
    return fail


def test_an_error_in_somebodys_own_code_is_no_internal_error(
    own: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(own) == 5
    assert capsys.readouterr().err.splitlines() == [
        "fedemu: ZeroDivisionError: division by zero, own.py:2",
        "    own.py:2 in fail: return 1 / 0",
        "    --log-level debug shows the whole traceback",
    ]


def test_a_file_that_somebodys_own_code_cannot_open_is_told_with_its_line(
    own: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("opens.py").write_text("def read():\n    return open('.').read()\n")
    assert exit_code_of(load("opens.py:read")) == 5
    assert "IsADirectoryError: [Errno 21] Is a directory: '.', opens.py:2\n" in capsys.readouterr().err


def test_an_exit_in_somebodys_own_code_is_told_as_an_error(
    own: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("ends.py").write_text("def end():\n    exit(0)\n")
    assert exit_code_of(load("ends.py:end")) == 5
    assert capsys.readouterr().err.startswith("fedemu: SystemExit: 0, ends.py:2\n    ends.py:2 in end: exit(0)\n")


def test_at_the_level_debug_the_whole_traceback_is_shown(
    own: Callable[[], int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "level", logging.DEBUG)
    monkeypatch.setattr(logging.getLogger(), "_cache", {})
    exit_code_of(own)
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):")
    assert said.splitlines()[-2:] == [
        "fedemu: ZeroDivisionError: division by zero, own.py:2",
        "    own.py:2 in fail: return 1 / 0",
    ]
