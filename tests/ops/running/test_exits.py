"""Errors become an exit code and one sentence on stderr."""

from pathlib import Path

import pytest

from fedemu.ops.running.exits import exit_code_of
from fedemu.protocol import errors


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


def test_an_internal_error_is_one_sentence_that_names_the_file_with_the_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def action() -> int:
        raise ZeroDivisionError("by zero")

    assert exit_code_of(action) == 5
    said = capsys.readouterr().err
    assert said.startswith("fedemu: internal error: ZeroDivisionError: by zero")
    assert said.count("\n") == 1
    log = Path(said.rpartition(" is in ")[2].strip().rstrip(")"))
    assert "Traceback" in log.read_text()


def test_ctrl_c_is_code_4(capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> int:
        raise KeyboardInterrupt

    assert exit_code_of(action) == 4
    assert capsys.readouterr().err == "fedemu: interrupted\n"
