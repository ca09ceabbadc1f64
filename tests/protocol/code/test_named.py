"""Code by name, and one sentence about each name that leads nowhere."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from fedemu.protocol.code import named
from fedemu.protocol.code.named import expect, is_open, load, restrict
from fedemu.protocol.code.source import digest_of_source
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import Digest


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that is not on the import path."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_a_file_of_the_working_folder_imports_from_beside_it(working_folder: Path) -> None:
    (working_folder / "beside_example.py").write_text("answer = 42\n")
    (working_folder / "mine.py").write_text("from beside_example import answer\n")
    assert load("mine.py:answer") == 42


@pytest.mark.parametrize("name", ["mine.py:answer", "stale_example:answer"])
def test_a_compiled_file_of_other_code_with_the_same_time_and_size_is_not_taken(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from stale_example import answer\n")
    script = f"from fedemu.protocol.code.named import load; print(load({name!r}))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}

    def run(code: str) -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout

    def answer(value: int) -> str:
        source = tmp_path / "stale_example.py"
        source.write_text(f"answer = {value}\n")
        os.utime(source, (1_000_000_000, 1_000_000_000))
        return run(script).strip()

    assert answer(1) == "1"
    # Whatever imports the module without fedemu leaves a compiled file.
    run("import stale_example")
    assert [*(tmp_path / "__pycache__").glob("stale_example*.pyc")]
    assert answer(2) == "2"
    assert not [*(tmp_path / "__pycache__").glob("mine*.pyc")]


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
        ("/no/such/file.py:x", "there is no Python file /no/such/file.py$"),
        ("no/such.py:x", "there is no Python file no/such.py in {folder}$"),
    ],
)
def test_code_that_does_not_exist_is_named(name: str, message: str, working_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=message.format(folder=working_folder)):
        load(name)


def test_an_attribute_that_a_module_lacks_is_told_with_the_one_that_is_most_like_it(working_folder: Path) -> None:
    (working_folder / "mine_with_a_study.py").write_text("class Study: ...\n")
    for name, hint in (("Studdy", "; did you mean 'Study'?"), ("Other", "")):
        with pytest.raises(ConfigurationError) as error:
            load(f"mine_with_a_study:{name}")
        assert str(error.value) == f"mine_with_a_study has no {name!r}{hint}"


def test_a_module_that_is_not_found_is_told_where_it_was_looked_for(working_folder: Path) -> None:
    with pytest.raises(ConfigurationError) as error:
        load("no_such_module.part:x")
    assert str(error.value) == (
        "'no_such_module.part' can't be imported: ModuleNotFoundError: No module named 'no_such_module'; "
        f"it was looked for in PYTHONPATH and in the working folder, {working_folder}"
    )
    (working_folder / "mine_that_needs.py").write_text("import another_that_is_missing\n")
    with pytest.raises(ConfigurationError) as error:
        load("mine_that_needs:x")
    assert "it was looked for" not in str(error.value), "the module is there; what it imports is not"


@pytest.fixture
def restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test forbids this process is forgotten after it."""
    monkeypatch.setattr(named, "_allowed", None)
    monkeypatch.setattr(named, "_digests", {})


@pytest.mark.usefixtures("restricted")
@pytest.mark.parametrize("name", ["os:system", "math:pi", "fedemu.protocol.code.named:load", "dangerous.py:now"])
def test_a_restricted_process_imports_nothing_but_what_is_allowed(name: str, working_folder: Path) -> None:
    (working_folder / "dangerous.py").write_text("raise SystemExit('it ran')\n")
    restrict(["other.py"])
    place = name.partition(":")[0]
    with pytest.raises(ConfigurationError, match=f"names code that does not come .*, {place}, .*--allow-code {place}$"):
        load(name)


@pytest.mark.usefixtures("restricted")
def test_code_that_is_allowed_must_have_the_digest_that_the_experiment_names(working_folder: Path) -> None:
    (working_folder / "mine.py").write_text("answer = 42\n")
    restrict(["./mine.py"])
    with pytest.raises(ConfigurationError, match=r"names mine\.py without the digest of its source"):
        load("mine.py:answer")
    expect({"mine.py": Digest("ab" * 32)})
    here = sha256(b"answer = 42\n").hexdigest()[:12]
    with pytest.raises(ConfigurationError, match=rf"digest {here}\.\.\. here and abababababab\.\.\. there; give both"):
        load("mine.py:answer")
    expect({"mine.py": digest_of_source("mine.py")})
    assert load("mine.py:answer") == 42


@pytest.mark.usefixtures("restricted")
def test_what_a_module_has_imported_is_not_allowed_with_it(working_folder: Path) -> None:
    (working_folder / "handy.py").write_text(
        "import functools\nfrom os import system\nfrom json import loads, JSONDecoder\nfrom random import seed\n"
        "from fedemu.protocol.code.own_code import is_own\n"
        "def own(): pass\ncached = functools.cache(own)\nmade = JSONDecoder()\n"
    )
    restrict(["handy"])
    expect({"handy": digest_of_source("handy")})
    homes = {
        "system": "posix",
        "loads": "json",
        "JSONDecoder": "json.decoder",
        "seed": "random",
        "is_own": "fedemu.protocol.code.own_code",
    }
    for name, home in homes.items():
        with pytest.raises(ConfigurationError, match=f"handy has '{name}' from {home}, and only what handy itself"):
            load(f"handy:{name}")
    assert all(callable(load(f"handy:{name}")) for name in ("own", "cached"))
    assert load("handy:made").decode("1") == 1


@pytest.mark.usefixtures("restricted")
def test_a_package_may_have_what_one_of_its_modules_defines_and_no_more(working_folder: Path) -> None:
    for name, text in (
        ("opened/__init__.py", "from .nets import Net\nfrom opened_too import Other\n"),
        ("opened/nets.py", "class Net: pass\n"),
        ("opened_too.py", "class Other: pass\n"),
    ):
        (working_folder / name).parent.mkdir(exist_ok=True)
        (working_folder / name).write_text(text)
    restrict(["opened"])
    expect({"opened": digest_of_source("opened")})
    assert load("opened:Net").__module__ == "opened.nets"
    with pytest.raises(ConfigurationError, match="opened has 'Other' from opened_too, and only what opened itself"):
        load("opened:Other")


@pytest.mark.usefixtures("restricted")
def test_a_restriction_is_never_widened() -> None:
    restrict(None)
    assert is_open("anything")
    restrict(["a", "b"])
    restrict(["b", "c"])
    restrict(None)
    assert [place for place in ("a", "b", "c") if is_open(place)] == ["b"]


def test_the_digest_of_a_package_covers_all_its_files_and_importing_is_not_needed(working_folder: Path) -> None:
    package = working_folder / "packed_example"
    (package / "inner").mkdir(parents=True)
    for file in ("__init__.py", "nets.py", "inner/__init__.py"):
        (package / file).write_text("raise AssertionError('imported')\n")
    names = ("packed_example", "packed_example.inner", "packed_example.nets")
    before = [digest_of_source(name) for name in names]
    (package / "inner" / "more.py").write_text("x = 1\n")
    after = [digest_of_source(name) for name in names]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, False, True]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("no_such_module", "there is no module 'no_such_module', neither"),
        ("math.nothing", "there is no module 'math.nothing'"),
        ("no/such.py", "there is no Python file no/such.py in {folder}$"),
        ("sys", "the module 'sys' has no source file"),
    ],
)
def test_a_place_without_a_source_has_no_digest(place: str, message: str, working_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=message.format(folder=working_folder)):
        digest_of_source(place)
