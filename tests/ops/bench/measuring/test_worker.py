"""Measuring children: they answer, they are told apart from what libraries print, and they do not outlive their use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedemu.ops.bench.measuring.measure import Sample
from fedemu.ops.bench.measuring.worker import BenchmarkError, Worker, at_once

HERE = "test_worker"


def chatty(work: float) -> Callable[[], Sample]:
    """Run in the child."""
    print("a library says something")

    def measure() -> Sample:
        print("and again")
        return Sample(work, 2.0 * work, 0.5)

    return measure


def sleepy() -> Callable[[], Sample]:
    def measure() -> Sample:
        tempfile.mkdtemp()
        time.sleep(60.0)
        return Sample(1.0, 1.0, 1.0)

    return measure


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("PYTHONPATH", str(request.path.parent))


def test_workers_at_once_add_up_their_work_in_the_time_of_the_slowest() -> None:
    with Worker(f"{HERE}:chatty", {"work": 1.0}) as first, Worker(f"{HERE}:chatty", {"work": 2.0}) as second:
        assert at_once([first.ready(), second.ready()]) == Sample(3.0, 4.0, 1.0)


def test_ctrl_c_in_a_terminal_reaches_the_command_alone() -> None:
    command = (
        "import time\nfrom fedemu.ops.bench.measuring.worker import Worker\n"
        f"with Worker('{HERE}:chatty', {{'work': 3.0}}) as worker:\n"
        "    worker.ready()\n"
        "    try:\n        print('ready', flush=True)\n        time.sleep(20)\n"
        "    except KeyboardInterrupt:\n        print(worker.measure().work)\n"
    )
    words = [sys.executable, "-c", command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.killpg(process.pid, signal.SIGINT)
        said, errors = process.communicate(timeout=60.0)
    assert said == b"3.0\n"
    assert b"KeyboardInterrupt" not in errors


def test_a_factory_that_is_not_there_is_a_benchmark_error() -> None:
    with Worker(f"{HERE}:nobody", {}) as worker, pytest.raises(BenchmarkError, match="ended with code 1"):
        worker.ready()


def test_a_worker_that_takes_too_long_is_given_up_and_killed_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Worker(f"{HERE}:sleepy", {}, seconds=20.0) as worker:
        worker.ready()
        worker._seconds = 0.05
        with pytest.raises(BenchmarkError, match="did not answer within"):
            worker.measure()
    assert worker._child.returncode is not None
    assert not [*tmp_path.iterdir()]


def test_a_worker_whose_answer_nobody_awaits_any_more_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    with Worker(f"{HERE}:chatty", {"work": 1.0}) as worker:
        assert worker._child.stdout is not None
        worker._child.stdout.close()
        worker._child.wait(60.0)
    assert (worker._child.returncode, capfd.readouterr().err.splitlines()) == (0, ["a library says something"])
