"""Factories by name, and one sentence where there is none."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.named import load


def test_an_attribute_of_a_module() -> None:
    assert load("math:pi") == math.pi


def test_an_attribute_of_a_file_which_is_imported_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine: pass\n")
    assert load(f"{file}:Mine") is load(f"{file}:Mine")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math", "is not of the form module:attribute"),
        (":pi", "is not of the form module:attribute"),
        ("no_such_module:x", "can't be imported"),
        ("math:tau_and_a_half", "math has no tau_and_a_half"),
        ("/no/such/file.py:x", "there is no Python file /no/such/file.py"),
    ],
)
def test_what_does_not_exist_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(name)
