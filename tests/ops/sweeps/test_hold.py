"""A folder belongs to one sweep at a time, and a run of a sweep that was killed has stopped before another takes it."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedemu.ops.sweeps import hold
from fedemu.ops.sweeps.hold import LOCK, await_left, held
from fedemu.protocol.errors import ConfigurationError

HOLDER = """
import fcntl, sys
with open(sys.argv[1], "ab") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""
TAKER = """
import fcntl, sys
with open(sys.argv[1], "ab") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


@contextmanager
def locked(path: Path) -> Iterator[Callable[[], object]]:
    """Another process has locked the file. Yields what ends it."""
    command = [sys.executable, "-S", "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        yield lambda: other.communicate(timeout=60)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.slept: Callable[[], object] = lambda: None
        monkeypatch.setattr(hold, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept()


def test_a_folder_in_which_another_sweep_is_at_work_is_refused_until_that_ends(tmp_path: Path) -> None:
    with locked(tmp_path / LOCK) as end:
        with (
            pytest.raises(ConfigurationError, match=r"^another sweep is at work in .*; stop it, or choose"),
            held(tmp_path),
        ):
            raise AssertionError("the folder is not free")
        end()
    folder = tmp_path / "of today" / "sweep"
    taken = [sys.executable, "-S", "-c", TAKER, str(folder / LOCK)]
    with held(folder):
        assert subprocess.run(taken, stderr=subprocess.DEVNULL, timeout=60, check=False).returncode == 1
    assert subprocess.run(taken, timeout=60, check=False).returncode == 0


def test_a_folder_that_cannot_be_made_is_the_mistake_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigurationError, match=r"Not a directory; choose another folder with --out$"),
        held(tmp_path / "file" / "sweep"),
    ):
        raise AssertionError("there is no folder")


def test_a_file_system_without_locks_is_not_taken_for_another_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.raises(ConfigurationError, match=r"gives no locks \(Function not implemented\)"), held(tmp_path):
        raise AssertionError("there is no lock")


def test_a_run_that_is_still_at_work_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    with locked(tmp_path / ".lock") as end:
        clock.slept = lambda: clock.now > 2 and end()
        await_left([tmp_path / "none", tmp_path])
    assert 2 < clock.now < 10
    assert capsys.readouterr().err == "waiting until the runs of the sweep that was killed have stopped\n"
    await_left([tmp_path / "none", tmp_path])
    assert capsys.readouterr().err == ""


def test_a_run_that_does_not_stop_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    with locked(tmp_path / ".lock") as end:
        await_left([tmp_path])
        end()
    assert 60 < clock.now < 600
