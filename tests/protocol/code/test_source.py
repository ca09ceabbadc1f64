"""Which files make the source of a place, and that its digest covers them all."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

import pytest

from fedemu.protocol.code import source
from fedemu.protocol.code.source import digest_of_source, files_of, interpreter
from fedemu.protocol.errors import ConfigurationError

FILES = {
    "mine.py": "import numpy\nfrom near import tool\ndef later():\n    import late\n",
    "near/__init__.py": "",
    "near/tool.py": "from . import parts\nfrom .parts import deep\n",
    "near/parts/__init__.py": "from ..other import x\n",
    "near/parts/deep.py": "import mine\n",
    "near/other.py": "x = 1\n",
    "near/unused.py": "",
    "late.py": "import json, late.nothing",
    "apart.py": "",
    "alone.py": "import os, fedemu.protocol\nfrom os import path\n",
    "user.py": "import loose.part, broken",
    "loose/part.py": "",
    "broken.py": "def (",
}
UNUSED = {"apart.py", "alone.py", "user.py", "loose/part.py", "broken.py"}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_a_new_process_looks_into_the_working_folder_only_where_fedemu_was_found_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert interpreter() == [sys.executable, "-P"]
    monkeypatch.chdir(Path(__file__).resolve().parents[4])
    assert interpreter() == [sys.executable]


def beside(place: str) -> set[str]:
    return {path.resolve().relative_to(Path.cwd()).as_posix() for path in files_of(place).values()}


@pytest.mark.parametrize(
    ("place", "files"),
    [
        ("mine.py", {*FILES} - {"near/unused.py", *UNUSED}),
        ("mine", {*FILES} - {"near/unused.py", *UNUSED}),
        ("near", {*FILES} - UNUSED),
        ("near.other", {"near/__init__.py", "near/other.py"}),
        ("alone", {"alone.py"}),
        ("user.py", {"user.py", "loose/part.py", "broken.py"}),
    ],
)
def test_the_source_of_a_place_is_what_it_imports_from_beside_it(place: str, files: set[str]) -> None:
    assert beside(place) == files


def test_a_place_with_too_many_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(beside("mine.py"))
    monkeypatch.setattr(source, "MOST_FILES", count)
    digest_of_source("mine.py")
    monkeypatch.setattr(source, "MOST_FILES", count - 1)
    with pytest.raises(ConfigurationError, match=rf"mine\.py has more than {count - 1} files of source"):
        digest_of_source("mine.py")


def test_the_digest_of_a_file_alone_is_that_of_its_bytes() -> None:
    assert digest_of_source("alone.py") == sha256(FILES["alone.py"].encode()).hexdigest()


@pytest.mark.parametrize(
    ("changed", "counts"), [("late.py", True), ("near/other.py", True), ("near/unused.py", False), ("apart.py", False)]
)
def test_the_digest_changes_with_each_file_that_is_imported_and_with_no_other(changed: str, counts: bool) -> None:
    before = digest_of_source("mine.py")
    Path(changed).write_text("x = 2\n")
    assert (digest_of_source("mine.py") != before) is counts


def test_the_digest_does_not_depend_on_where_the_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = digest_of_source("mine.py")
    elsewhere = tmp_path / "elsewhere"
    for name, text in FILES.items():
        (elsewhere / name).parent.mkdir(parents=True, exist_ok=True)
        (elsewhere / name).write_text(text)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != str(tmp_path)])
    monkeypatch.chdir(elsewhere)
    assert digest_of_source("mine.py") == here
