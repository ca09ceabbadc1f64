"""The members of a tree: what is told of the one that failed, how the others end, and who is started again."""

from __future__ import annotations

import errno
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedemu.ops.edges import tree
from fedemu.ops.edges.tree import MOST_RESTARTS, Member, main, run_members
from fedemu.ops.experiment import Runtime
from fedemu.ops.running.codes import INTERNAL_ERROR, INTERRUPTED, USAGE

WAITS = """
import signal, sys, time
def leave(*_):
    open(sys.argv[1], "a").write("fedemu: The devices were stopped by SIGTERM\\n")
    sys.exit(4)
signal.signal(signal.SIGTERM, leave)
open(sys.argv[1] + ".ready", "a").write("!")
while True:  # pause() misses a signal that comes just before it
    time.sleep(0.02)
"""
FAILS = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1] + ".ready").exists():
    time.sleep(0.01)
open(sys.argv[1], "a").write("fedemu: no room for 150 devices\\n")
sys.exit(2)
"""
IS_KILLED_ONCE = """
import os, pathlib, signal, sys
once = pathlib.Path(sys.argv[1] + ".once")
if once.exists():
    sys.exit(0)
once.touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "devices.out"


def toy(code: str, output: Path) -> Member:
    return Member.start("machine 1", [sys.executable, "-c", code, str(output)])


def test_a_run_that_is_over_before_its_machines_begin_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    near_end, far_end = socket.socketpair()
    near_end.close()
    words = ("[2]", "4", str(tmp_path), str(tmp_path), Runtime().model_dump_json(), str(far_end.detach()))
    assert main(words) == INTERRUPTED
    assert capsys.readouterr().err == "fedemu: The run was over before its devices began\n"


@pytest.mark.parametrize(
    ("gpus", "trainers", "shown"),
    [
        (["0", "1", "2", "3"], 0, [("0", 1, 1), ("1", 1, 1), ("2", 1, 1), ("3", 1, 1)]),
        (["GPU-a", "GPU-b"], 8, [("GPU-a", 2, 2), ("GPU-a", 2, 2), ("GPU-b", 2, 2), ("GPU-b", 2, 2)]),
        ([], 9, [(None, 2, 1), (None, 2, 1), (None, 2, 1), (None, 3, 1)]),
    ],
)
def test_machines_of_a_tree_divide_trainers_and_gpus(
    gpus: list[str], trainers: int, shown: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "usable_gpus", lambda device_type: gpus)
    monkeypatch.setattr(tree, "default_trainers", lambda device_type: len(gpus))
    monkeypatch.setattr(Member, "start", lambda name, command, environment=None: (command, environment))
    *edges, a, b, c, d = tree.plan([1, 4], 40, Runtime(trainers=trainers), tmp_path, tmp_path, "place")
    assert len(edges) == 5
    found = [
        (environment.get("CUDA_VISIBLE_DEVICES"), Runtime.model_validate_json(command[-3]).trainers, int(command[-1]))
        for command, environment in (a, b, c, d)
    ]
    assert found == shown


def test_a_machine_that_starts_no_further_process_says_so_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    near_end, far_end = socket.socketpair()
    near_end.send(b"!")
    words = ("[2]", "4", str(tmp_path), str(tmp_path), Runtime(device_type="cpu").model_dump_json())
    with near_end:
        assert main((*words, str(far_end.detach()))) == USAGE
    said = "no process can be started on this machine: the limit of processes is reached; raise it (ulimit -u"
    assert said in capsys.readouterr().err


def test_the_sentence_of_a_member_that_failed_is_the_last_one(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = [toy(WAITS, output), toy(FAILS, output)]
    assert run_members(members, [], output) == 2
    assert output.read_text().splitlines()[-1] == "fedemu: The devices were stopped by SIGTERM"
    assert capsys.readouterr().err == "fedemu: no room for 150 devices\n"
    assert not any(psutil.pid_exists(member.process.pid) for member in members)


def test_members_that_are_stopped_have_nothing_to_explain(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    member = toy(WAITS, output)
    assert run_members([member], [signal.SIGTERM], output) == 0
    assert capsys.readouterr().err == ""
    assert not psutil.pid_exists(member.process.pid)


def test_a_member_that_was_killed_is_started_again(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    member = toy(IS_KILLED_ONCE, output)
    assert run_members([member], [], output) == 0
    assert member.restarts == 1
    assert (
        capsys.readouterr().err
        == "machine 1 was ended by SIGKILL (the kernel does so if memory runs out); starting it again\n"
    )


def test_a_member_that_is_killed_too_often_fails(output: Path) -> None:
    killed = Member.start("machine 1", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    killed.restarts = MOST_RESTARTS
    assert run_members([killed], [], output) == INTERNAL_ERROR


def test_members_that_have_started_end_if_the_next_cannot(output: Path) -> None:
    started: list[Member] = []

    def members() -> Iterator[Member]:
        started.append(toy(WAITS, output))
        yield started[0]
        raise OSError("no processes left")

    with pytest.raises(OSError, match="no processes left"):
        run_members(members(), [], output)
    assert not psutil.pid_exists(started[0].process.pid)
