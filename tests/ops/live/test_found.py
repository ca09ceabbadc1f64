"""The supervisors of a run, found among processes that are called as those of a run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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


DEVICE = """
import os, socket, sys

place, state = sys.argv[3:]
if place == "itself":
    listening = socket.create_server(("127.0.0.1", 0))
    place = listening.getsockname()[1]
connection = socket.create_connection(("127.0.0.1", int(place)))
folder = os.path.join(state, "run", "lease")
os.makedirs(folder)
open(os.path.join(folder, "lease.json"), "w").close()
held = os.open(folder, os.O_RDONLY)
elsewhere = os.open(state, os.O_RDONLY)
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_machines_that_were_started_by_themselves_are_found_by_their_connection(tmp_path: Path) -> None:
    """Each tells what it does in its own folder. Those of another coordinator are not ours."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as stack:
        ours = str(listening.getsockname()[1])
        machines = []
        for number, (command, place) in enumerate([("device", ours), ("device", "itself"), ("watch", ours)]):
            words = [sys.executable, "-c", DEVICE, "fedemu", command, place, str(tmp_path / f"state-{number}")]
            machine = stack.enter_context(
                subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            machines.append(machine)
            stack.callback(machine.kill)
        taken = [stack.enter_context(listening.accept()[0]) for _ in range(2)]
        assert [machine.stdout.readline() for machine in machines if machine.stdout] == ["ready\n"] * 3
        found = supervisors_of(os.getpid(), tmp_path)
        assert [(each.process.pid, each.folder) for each in found] == [(machines[0].pid, tmp_path / "state-0" / "live")]
        for connection in taken:
            connection.close()
        assert supervisors_of(os.getpid(), tmp_path) == []
