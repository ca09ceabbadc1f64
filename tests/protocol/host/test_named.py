"""Code by name, and one sentence about each name that leads nowhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.named import load


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder that is not on the import path; modules that a test imports from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_an_attribute_of_a_module() -> None:
    assert load("math:pi") == math.pi


def test_a_module_of_the_working_folder(working_folder: Path) -> None:
    (working_folder / "named_example.py").write_text("answer = 42\n")
    assert load("named_example:answer") == 42


def test_an_installed_module_comes_before_one_of_the_working_folder(working_folder: Path) -> None:
    (working_folder / "colorsys.py").write_text("rgb_to_hsv = None\n")
    assert load("colorsys:rgb_to_hsv") is not None


def test_an_attribute_of_a_file_which_is_imported_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine: pass\n")
    assert load(f"{file}:Mine") is load(f"{file}:Mine")


def test_a_file_that_failed_is_imported_anew_once_it_is_repaired(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("answer = 1 / 0\n")
    with pytest.raises(ConfigurationError, match=r"mine\.py' can't be imported: ZeroDivisionError: division by zero"):
        load(f"{file}:answer")
    file.write_text("answer = 42\n")
    assert load(f"{file}:answer") == 42


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math", "'math' is not of the form module:attribute"),
        (":pi", "':pi' is not of the form module:attribute"),
        ("no_such_module:x", "'no_such_module' can't be imported: ModuleNotFoundError"),
        ("math:tau_and_a_half", "math has no 'tau_and_a_half'"),
        ("/no/such/file.py:x", "there is no Python file /no/such/file.py"),
    ],
)
def test_code_that_does_not_exist_is_named(name: str, message: str, working_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(name)
