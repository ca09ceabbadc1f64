"""The supervisors of a run, found among processes that are called as those of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedemu.ops.live.found import supervisors_of
from fedemu.ops.live.machine import Machine

COMMAND = """
import os, signal, sys
from fedemu.protocol.host.kernel import name_process

def start(name, inside=lambda: None):
    named, naming = os.pipe()
    if pid := os.fork():
        os.read(named, 1)
        return pid
    name_process(name)
    os.write(naming, b".")
    inside()
    signal.pause()

def machines():
    for _ in range(int(sys.argv[1])):
        start("fedemu-devices")
    print("all", flush=True)

start("some-long-nameä")  # the kernel keeps 15 bytes, the last of which is half a letter
print(start("fedemu-coordinator"), flush=True)
start("fedemu-tree", machines) if sys.argv[2] == "edges" else machines()
signal.pause()
"""


@pytest.fixture
def run() -> Iterator[Callable[..., int]]:
    """Starts the processes of a run with so many machines. Returns the process id of its coordinator."""
    groups: list[subprocess.Popen[str]] = []

    def start(machines: int, behind: str) -> int:
        words = [sys.executable, "-c", COMMAND, str(machines), behind]
        groups.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True))
        assert groups[-1].stdout is not None
        said = {groups[-1].stdout.readline().strip() for _ in range(2)}
        assert "all" in said
        return int(next(iter(said - {"all"})))

    yield start
    for group in groups:
        os.killpg(group.pid, signal.SIGKILL)
        group.wait()
        group.stdout.close()  # type: ignore[union-attr]


@pytest.mark.parametrize(("machines", "behind"), [(1, "nothing"), (3, "edges")])
def test_the_machines_of_a_run_are_its_own_also_behind_edges(
    run: Callable[..., int], tmp_path: Path, machines: int, behind: str
) -> None:
    run(2, "edges")  # another run, whose machines are not ours
    found = supervisors_of(run(machines, behind), tmp_path)
    assert [(each.process.name(), each.folder) for each in found] == [
        ("fedemu-devices", tmp_path / "devices" / "live")
    ] * machines


@pytest.mark.parametrize(
    ("machines", "behind", "names"),
    [
        (1, "nothing", ["supervisor", "trainer 1"]),
        (2, "edges", ["supervisor 1", "trainer 1 of supervisor 1", "supervisor 2", "trainer 1 of supervisor 2"]),
    ],
)
def test_the_use_of_every_supervisor_and_of_its_trainers_has_a_name(
    run: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machines: int,
    behind: str,
    names: list[str],
) -> None:
    monkeypatch.setattr("fedemu.ops.live.machine.SAMPLE_SECONDS", 0.0)
    coordinator = run(machines, behind)
    for process, folder in supervisors_of(coordinator, tmp_path):
        folder.mkdir(parents=True, exist_ok=True)
        account = {"pid": process.pid, "trainers": {"0": process.pid}}
        (folder / f"machine-{process.pid}").write_text(json.dumps(account) + "\n")
    machine = Machine(tmp_path)
    machine.look(coordinator)
    machine.sample()
    assert list(machine.sample()["used"]) == ["coordinator", *names]
