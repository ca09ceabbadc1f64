"""Data that another process prepares: its digest, its errors, and its end."""

from __future__ import annotations

import asyncio
import errno
import io
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from fedemu.device.machine import prepare
from fedemu.device.machine.prepare import compare_data, prepare_data
from fedemu.protocol.errors import ConfigurationError, DataError, FedemuError

pytestmark = pytest.mark.usefixtures("started_warm")

HERE, THERE = "a" * 64, "b" * 64


@pytest.fixture
def code(tmp_path: Path) -> str:
    path = tmp_path / "preparing.py"
    path.write_text(
        textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from fedemu.protocol.errors import ConfigurationError, FedemuError

        mark = Path(__file__).with_name("killed")

        def prepare(experiment):
            with open(Path(__file__).with_name("begun"), "a") as begun:
                begun.write("x")
            print("12 of 12 files", end="")  # as a line of progress that is never ended
            os.write(1, b"12 of 12 caf\\xe9s")  # as a library of C does it
            if experiment == b"one sentence":
                raise ConfigurationError("There is no column 'writer',\\nso nothing can be read.")
            if experiment == b"full":
                raise FedemuError("the disk is full")
            if experiment == b"bug":
                raise ZeroDivisionError
            if experiment == b"exit":
                exit(3)
            if experiment == b"ended":
                os._exit(70)
            if experiment == b"never begun":  # as an interpreter ends whose imports fail
                os._exit(1)
            if experiment == b"killed" or experiment == b"killed once" and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return {HERE!r}
        """)
    )
    return f"{path}:prepare"


@pytest.fixture
def experiment(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "experiment"
        path.write_bytes(content)
        return path

    return write


async def test_equal_data_are_accepted(code: str, experiment: Callable[[bytes], Path], tmp_path: Path) -> None:
    await prepare_data(code, experiment(b"digits"), HERE)
    assert (tmp_path / "begun").read_text() == "x"
    with pytest.raises(DataError, match=f"digest {HERE[:12]} here, {THERE[:12]} there"):
        await prepare_data(code, experiment(b"digits"), THERE)


async def test_an_error_that_is_meant_for_people_comes_back_as_it_was_said(
    code: str, experiment: Callable[[bytes], Path]
) -> None:
    with pytest.raises(DataError, match=r"^There is no column 'writer',\nso nothing can be read\.$"):
        await prepare_data(code, experiment(b"one sentence"), HERE)


async def test_a_full_disk_is_no_fault_of_the_data(code: str, experiment: Callable[[bytes], Path]) -> None:
    with pytest.raises(FedemuError, match=r"^the disk is full$") as told:
        await prepare_data(code, experiment(b"full"), HERE)
    assert told.value.exit_code == 5


@pytest.mark.parametrize(("content", "kind", "said"), [(b"bug", ZeroDivisionError, ""), (b"exit", SystemExit, ": 3")])
async def test_a_bug_in_somebodys_own_code_comes_back_with_its_file_and_line(
    code: str, experiment: Callable[[bytes], Path], content: bytes, kind: type[BaseException], said: str
) -> None:
    told = rf"can't be prepared: {kind.__name__}{said}, .*preparing\.py:\d+\n"
    with pytest.raises(DataError, match=told) as caught:
        await prepare_data(code, experiment(content), HERE)
    assert isinstance(caught.value.__cause__, kind)


async def test_a_folder_that_has_vanished_is_told_and_is_no_fault_of_the_configuration(
    code: str, tmp_path: Path
) -> None:
    with pytest.raises(FedemuError, match=r"experiment can't be read \(.*gone: No such file or directory\)$") as caught:
        await prepare_data(code, tmp_path / "gone", HERE)
    assert caught.value.exit_code == 5


def test_a_machine_that_lacks_open_files_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "load", MagicMock(side_effect=OSError(errno.EMFILE, "Too many open files")))
    answer = io.StringIO()
    assert prepare._answer("module:function", Path(), (), answer) == prepare.SAID
    error = prepare.error_on(answer.getvalue())
    said = "the data can't be prepared: the limit of open files is reached; raise it (ulimit -n)"
    assert (str(error), error.exit_code) == (said, 5)


@pytest.mark.parametrize(
    ("content", "end"),
    [
        (b"ended", "ended with code 70"),
        (b"never begun", "ended with code 1"),
        (b"killed", "was ended by SIGKILL"),
    ],
)
async def test_every_other_end_is_told(
    code: str, experiment: Callable[[bytes], Path], content: bytes, end: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"prepares the data {end}.*; see its error output"):
        await prepare_data(code, experiment(content), HERE)


async def test_a_process_that_was_killed_is_started_again(
    code: str, experiment: Callable[[bytes], Path], tmp_path: Path
) -> None:
    await prepare_data(code, experiment(b"killed once"), HERE)
    assert (tmp_path / "begun").read_text() == "xx"


async def test_a_machine_that_is_stopped_just_as_the_process_ends_is_stopped(
    code: str, experiment: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, processes = asyncio.create_subprocess_exec, list[asyncio.subprocess.Process]()

    async def started(*command: str, **settings: Any) -> asyncio.subprocess.Process:
        processes.append(await start("true", **settings))
        return processes[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    preparing = asyncio.create_task(prepare_data(code, experiment(b"digits"), HERE))
    async with asyncio.timeout(60):
        while not processes or processes[0].returncode is None:  # noqa: ASYNC110 - the very turn in which it ends
            await asyncio.sleep(0)
    preparing.cancel()
    await asyncio.wait({preparing})
    assert preparing.cancelled()


async def test_a_machine_that_can_start_no_process_says_so(
    code: str, experiment: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*command: object, **settings: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    sentence = "no process can be started on this machine: the limit of processes is reached; raise it (ulimit -u"
    with pytest.raises(FedemuError, match=re.escape(sentence)):
        await prepare_data(code, experiment(b"digits"), HERE)


def test_data_are_compared_by_their_digests() -> None:
    compare_data(HERE, HERE)
    with pytest.raises(DataError, match="Give both the same data set"):
        compare_data(HERE, THERE)
