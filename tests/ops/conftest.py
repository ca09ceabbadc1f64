"""Parts of a small run directory, so that tests can read one without playing a run, and a browser that shows pages."""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run_directory import RunDirectory
from fedemu.ops.running.launch import child_command
from fedemu.ops.stress import warm_process
from fedemu.ops.stress.warm import WarmStart
from fedemu.protocol.code.source import interpreter
from fedemu.protocol.host.private import private_folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, which knows nothing of the user's. It begins only where the paths of its sockets are short."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip install playwright)")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "chromium-browser"))), None)
    if chromium is None:
        pytest.skip("no chromium (on Debian: apt-get install chromium)")
    with private_folder() as folder, sync_api.sync_playwright() as playwright:
        environment = os.environ | {"HOME": str(folder), "TMPDIR": str(folder)}
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"], env=environment)
        yield started
        started.close()


@pytest.fixture
def write_row() -> Callable[[Path, int], None]:
    """Adds the row of a round to a run directory."""

    def write(directory: Path, round: int) -> None:
        with RunDirectory(directory) as run:
            run.metrics(Row(round=round, accuracy=0.5, accepted=5))

    return write


@pytest.fixture
def write_summary() -> Callable[..., None]:
    """Writes the summary of a completed run of three rounds. Keyword arguments replace its values."""

    def write(directory: Path, **more: Any) -> None:
        summary = {
            "name": "tiny",
            "outcome": "completed",
            "rounds": 3,
            "final_accuracy": 0.875,
            "best_accuracy": 0.9,
            "perturbed": False,
            "totals": {"selected": 12, "accepted": 9, "cancelled": 2, "dropped": 1},
            "virtual_time": 7200.0,
            "wall_time": 4.25,
            "model_digest": "ab" * 32,
        }
        (directory / "summary.json").write_text(json.dumps(summary | more))

    return write


class Forking:
    """``subprocess`` for a module that starts commands of fedemu: ``warm`` forks them, with all imports done.

    What a command writes goes to where its last words go, stdout and stderr alike.
    """

    def __init__(self, warm: WarmStart) -> None:
        self._warm = warm

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(
        self,
        command: Sequence[str],
        *,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] = os.environ,
        **how: Any,
    ) -> Any:
        """Start ``command``, warm if it is one of fedemu as fedemu starts them."""
        beginnings = [*interpreter(), "-m", "fedemu.ops.cli"], child_command("fedemu-run", "fedemu.ops.cli.__main__")
        found = [command[len(beginning) :] for beginning in beginnings if command[: len(beginning)] == beginning]
        if not found:
            return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env, **how)
        words = found[0]
        to = stdout if stderr == subprocess.STDOUT else stderr
        if to != subprocess.PIPE:
            return self._warm.start(words, Path(to.name), env)
        reading, writing = os.pipe()
        started: Any = self._warm.start(words, Path(f"/dev/fd/{writing}"), env)
        os.close(writing)
        started.stdout = started.stderr = os.fdopen(reading, errors="replace")
        return started

    def run(self, command: Sequence[str], *, timeout: float, **how: Any) -> subprocess.CompletedProcess[bytes]:
        """Start ``command`` as ``Popen`` does, and wait for its end."""
        started = self.Popen(command, **how)
        with started.stdout as lines:
            said = lines.read().encode()
        return subprocess.CompletedProcess(list(command), started.wait(timeout), said)


@pytest.fixture
def forked(warm: WarmStart, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], None]:
    """``forked(module)``: the commands of fedemu that ``module`` starts need no interpreter and no imports."""
    return lambda module: monkeypatch.setattr(module, "subprocess", Forking(warm))


BENCHED = ("fedemu.ops.bench.measuring.worker", "fedemu.ops.bench.peers.own")
"""Modules that benchmarks start beside those that every run starts."""


class _Forks(warm_process.Blanks):
    """Forks a process when it is needed."""

    def __init__(self) -> None: ...

    def start(self, request: dict[str, Any], descriptors: Sequence[int]) -> int | None:
        super().__init__(1)
        return super().start(request, descriptors)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of fedemu that this one starts are forks of it: they need no interpreter and no imports.

    They have the streams, the working folder and the environment that other processes would have, and no descriptor or
    handler of this one. What this one does at its end is none of their business.
    """
    wait = warm_process._wait_blank

    def wait_alone(line: socket.socket, parent: int) -> None:
        atexit._clear()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for sign in (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGCHLD):
            signal.signal(sign, signal.SIG_DFL)
        gc.freeze()  # of what is closed now nothing is closed again
        os.closerange(3, line.fileno())
        os.closerange(line.fileno() + 1, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        tempfile.tempdir = None
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        wait(line, parent)

    for name in BENCHED:
        monkeypatch.setitem(warm_process.MODULES, name, partial(_as_main, name))  # type: ignore[arg-type]
    monkeypatch.setattr(warm_process, "_wait_blank", wait_alone)
    monkeypatch.setattr(subprocess.Popen, "_execute_child", subprocess.Popen._execute_child)  # type: ignore[attr-defined]
    warm_process.start_from(_Forks())


def _as_main(name: str, words: list[str]) -> Callable[[], object]:
    sys.argv = [name, *words]
    return lambda: runpy.run_module(name, run_name="__main__")
