"""An error of somebody's own code is told with his own file, line and type."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fedemu
from fedemu.protocol.code import own_code
from fedemu.protocol.code.named import load
from fedemu.protocol.code.own_code import Elsewhere, account, cause_of, own_frames, place, retold, told, whole
from fedemu.protocol.codec import encode
from fedemu.protocol.errors import ConfigurationError, FedemuError, TrainingError
from fedemu.protocol.messages import Bye

FLOORS = ("protocol", "algorithms", "device", "coordinator", "ops")

OWN = """\
import json

def divide(x):
    return x / 0

def outer(x):
    return divide(x)

def parse():
    return json.loads("{")

def silent():
    assert 1 > 2

def deep(n):
    return deep(n - 1) if n else divide(n)

def long():
    raise ValueError("word " * 200)

def of_fedemu():
    from fedemu.protocol.seeds import generator
    generator("seed")

def rounds():
    yield next(iter(()))

def refused():
    from fedemu.protocol.errors import ConfigurationError
    raise ConfigurationError("choose another number")

def a_syntax_error():
    raise SyntaxError("not in my language")

def a_text_that_is_no_python():
    import ast
    ast.literal_eval("1 +")

def in_two_sentences():
    raise ValueError("There is no more.\\nAsk for less.")

def with_advice():
    import numpy
    return bool(numpy.array([1, 2]))

def singular():
    import numpy
    return numpy.linalg.inv([[0.0]])
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def failure(file: Path, name: str, *arguments: object) -> Exception:
    function = load(f"{file}:{name}")
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError(f"{name} did not fail")


def test_type_message_file_and_line_come_first_and_then_the_own_frames(own: Path) -> None:
    assert account(failure(own, "outer", 1)).splitlines() == [
        "ZeroDivisionError: division by zero, own.py:4",
        "    own.py:7 in outer: return divide(x)",
        "    own.py:4 in divide: return x / 0",
    ]


def test_a_file_that_is_not_below_the_working_folder_has_its_whole_path(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = failure(own, "divide", 1)
    (own.parent / "below").mkdir()
    monkeypatch.chdir(own.parent / "below")
    assert account(error).splitlines()[1] == f"    {own}:4 in divide: return x / 0"


def test_frames_of_installed_packages_are_left_out(own: Path) -> None:
    assert account(failure(own, "singular")).splitlines() == [
        "LinAlgError: Singular matrix, own.py:48",
        "    own.py:48 in singular: return numpy.linalg.inv([[0.0]])",
    ]
    assert not own_code.is_own("/usr/lib/python3/dist-packages/numpy/linalg/linalg.py")


def test_packages_that_pip_put_into_any_folder_are_nobodys_own_code(tmp_path: Path) -> None:
    """``pip install --target`` does so, and PYTHONPATH finds them."""
    record = tmp_path / "tool-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("tool/__init__.py,sha256=abc,3\nalone.py,sha256=abc,3\n../bin/tool,,\n")
    for installed in ("tool/__init__.py", "tool/part/deep.py", "alone.py"):
        assert not own_code.is_own(str(tmp_path / installed))
    for own in ("mine.py", "lab/tool/__init__.py", "lab/alone.py"):
        assert own_code.is_own(str(tmp_path / own))


def test_frames_of_python_are_left_out(own: Path) -> None:
    error = failure(own, "parse")
    assert "own.py:10" in account(error).splitlines()[0]
    assert "json/decoder.py" in whole(error)
    assert "decoder.py" not in account(error)


def test_an_error_without_a_message_has_a_type_and_a_place(own: Path) -> None:
    assert account(failure(own, "silent")).splitlines()[0] == "AssertionError, own.py:13"


def test_a_stop_iteration_in_a_generator_is_told_at_its_line(own: Path) -> None:
    rounds = load(f"{own}:rounds")()
    with pytest.raises(RuntimeError) as caught:
        list(rounds)
    assert account(caught.value).splitlines() == [
        "RuntimeError: generator raised StopIteration, own.py:26",
        "    own.py:26 in rounds: yield next(iter(()))",
    ]


def test_only_the_last_frames_of_many_are_shown_and_a_long_message_is_cut(own: Path) -> None:
    lines = account(failure(own, "deep", 20)).splitlines()
    assert lines[1] == "    ... 16 more of your frames before these"
    assert len(lines) == 8
    assert len(account(failure(own, "long")).splitlines()[0]) < 450


def test_a_message_is_told_on_one_line_without_the_advice_of_a_library(own: Path) -> None:
    assert account(failure(own, "in_two_sentences")).splitlines()[0] == (
        "ValueError: There is no more. Ask for less, own.py:40"
    )
    assert account(failure(own, "with_advice")).splitlines()[0] == (
        "ValueError: The truth value of an array with more than one element is ambiguous, own.py:44"
    )


def test_no_frame_is_left_out_of_as_many_as_are_shown(own: Path) -> None:
    lines = account(failure(own, "deep", 4)).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [*["own.py:16"] * 5, "own.py:4"]


def test_an_error_that_fedemu_raises_is_told_at_the_own_line_that_called_it(own: Path) -> None:
    assert account(failure(own, "of_fedemu")).splitlines()[0].endswith(", own.py:23")


def test_a_file_that_is_no_python_is_told_at_its_wrong_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.py").write_text("import math\n\ndef f(:\n    pass\n")
    with pytest.raises(ConfigurationError) as caught:
        load("wrong.py:f")
    assert str(caught.value).splitlines() == [
        "'wrong.py' can't be imported: SyntaxError: invalid syntax, wrong.py:3",
        "    wrong.py:3: def f(:",
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [("a_syntax_error", "not in my language, own.py:33"), ("a_text_that_is_no_python", "invalid syntax, own.py:37")],
)
def test_a_syntax_error_of_no_file_is_told_at_the_own_line_that_raised_it(own: Path, name: str, said: str) -> None:
    first, frame = account(failure(own, name)).splitlines()
    assert first == f"SyntaxError: {said}"
    assert name in frame


def test_a_compiled_library_is_nobodys_own_code() -> None:
    assert not own_code.is_own("numpy/random/_generator.pyx")
    with pytest.raises(MemoryError) as caught:
        np.random.default_rng(0).standard_normal(2**58)
    assert own_frames(caught.value) == []
    assert account(caught.value).startswith("MemoryError: Unable to allocate 2.00 EiB for an array")


def test_what_own_code_raises_as_an_error_of_fedemu_is_told_by_its_text_alone(own: Path) -> None:
    assert account(failure(own, "refused")) == "choose another number"


def test_any_error_that_fedemu_raises_by_itself_is_told_by_its_text_alone() -> None:
    with pytest.raises(TypeError) as caught:
        encode(Bye(reason=object()))
    assert account(caught.value) == "a message holds an object, which MessagePack cannot carry"


def test_no_file_of_fedemu_is_anybodys_own_code() -> None:
    packages = [fedemu, *(importlib.import_module(f"fedemu.{floor}") for floor in FLOORS)]
    files = [*(str(package.__file__) for package in packages), str(Path(str(fedemu.__file__)).with_name("__main__.py"))]
    assert not [file for file in [*files, __file__] if own_code.is_own(file)]


def test_what_fedemu_itself_says_is_not_told_as_an_error_of_somebody_else() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load("nothing")
    assert account(caught.value) == "'nothing' is not of the form module:attribute"
    assert cause_of(caught.value) is None


def test_an_error_travels_to_another_process_with_its_cause(own: Path) -> None:
    error = TrainingError("device 3 failed")
    error.__cause__ = failure(own, "outer", 1)
    with pytest.raises(ConfigurationError, match="device 3 failed") as caught:
        raise retold(told(error), ConfigurationError)
    cause = caught.value.__cause__
    assert isinstance(cause, ZeroDivisionError)
    assert str(cause) == "division by zero"
    assert isinstance(cause.__cause__, Elsewhere)
    assert "return x / 0" in whole(caught.value)


@pytest.mark.parametrize("fail", [lambda: b"\xff".decode(), lambda: zlib.decompress(b"")], ids=["Unicode", "library"])
def test_a_cause_whose_type_cannot_be_made_again_travels_as_its_traceback(fail: Callable[[], object]) -> None:
    error = TrainingError("device 3 failed")
    with pytest.raises((UnicodeDecodeError, zlib.error)) as caught:
        fail()
    error.__cause__ = caught.value
    again = retold(told(error), TrainingError)
    assert isinstance(again.__cause__, Elsewhere)
    assert str(caught.value) in str(again.__cause__)
    twice = retold(told(again), TrainingError)
    assert str(twice.__cause__) == str(again.__cause__)


def test_an_error_without_a_cause_travels_alone() -> None:
    with pytest.raises(FedemuError, match="too small") as caught:
        raise retold(told(ConfigurationError("too small")), FedemuError)
    assert caught.value.__cause__ is None


def test_a_file_beside_the_code_of_a_clone_counts_as_own() -> None:
    """The folder of a clone is the package itself, and people keep their experiments there."""
    root = Path(own_code.__file__).parents[2]
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("1 / 0", str(root / "mine.py"), "exec"), {})
    # The file is not there, so no line of it can be shown.
    told_at = place(own_frames(caught.value)[-1])
    assert account(caught.value) == f"ZeroDivisionError: division by zero, {told_at}\n    {told_at}"
    assert told_at.endswith("mine.py:1")
    with pytest.raises(ConfigurationError) as refused:
        load("nothing")
    assert not any(frame.filename.endswith("named.py") for frame in own_frames(refused.value))
