"""The processes of a run as the page shows them: which there are, how busy they are, and which stand still."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fedemu.ops.live import machine as room
from fedemu.ops.live.found import Supervisor
from fedemu.ops.live.machine import Crew, Machine

COORDINATOR, SUCCESSOR = 10, 20


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits."""
    with subprocess.Popen(["sleep", "600"]) as waiting:
        yield waiting
        waiting.kill()


def watched(machine: Machine, *crews: Crew) -> Machine:
    """A machine that knows these processes of a coordinator which is this process."""
    machine._coordinator = os.getpid()
    machine.crews = [*crews]
    return machine


def test_supervisors_are_looked_for_now_and_then_and_for_every_new_coordinator(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Supervisor(psutil.Process(process.pid), tmp_path)
    there = {COORDINATOR: [here], SUCCESSOR: []}
    monkeypatch.setattr(room, "supervisors_of", lambda coordinator, directory: there[coordinator])
    machine = Machine(tmp_path)

    def look(coordinator: int | None) -> int:
        machine.look(coordinator)
        return len(machine.crews)

    assert look(COORDINATOR) == 1
    there[COORDINATOR] = [here, here]
    assert look(COORDINATOR) == 1
    monkeypatch.setattr(room, "SEARCH_SECONDS", 0.0)
    assert look(COORDINATOR) == 2
    monkeypatch.setattr(room, "SEARCH_SECONDS", 3600.0)
    assert look(SUCCESSOR) == 0
    assert look(COORDINATOR) == 2
    assert machine.folders == [tmp_path, tmp_path]
    assert (look(None), machine.folders) == (0, [])
    assert look(COORDINATOR) == 2
    process.kill()
    process.wait()
    assert look(COORDINATOR) == 0


def test_what_a_supervisor_tells_counts_and_not_what_another_one_with_its_number_told_before(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "SEARCH_SECONDS", 0.0)
    monkeypatch.setattr(
        room, "supervisors_of", lambda coordinator, directory: [Supervisor(psutil.Process(process.pid), directory)]
    )
    machine = Machine(tmp_path)
    account = {
        "trainers": {"0": 31, "1": 32},
        "devices": [[41, [0, 1]], [42, [2]]],
        "waiting": 3,
        "busy": [0],
    }
    seen = []
    for pid in (process.pid, process.pid + 1):
        (tmp_path / f"machine-{process.pid}").write_text(json.dumps({"pid": pid, **account}) + "\n")
        machine.look(COORDINATOR)
        seen.append((machine.counts(), [machine.process_of(device) for device in (0, 1, 2, 3)]))
    assert seen == [
        ({"coordinator": 1, "supervisor": 1, "trainer": 2, "device": 2}, [41, 41, 42, None]),
        ({"coordinator": 1, "supervisor": 1, "trainer": 0, "device": 0}, [None] * 4),
    ]


def test_the_use_of_a_process_is_its_share_of_a_core_since_the_last_sample(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, times, gone = 10.0, [0.0, 0.0], set[int]()

    def told(pid: int) -> Any:
        def cpu_times() -> Any:
            if pid in gone:
                raise psutil.NoSuchProcess(pid)
            return SimpleNamespace(user=times[0], system=times[1])

        return SimpleNamespace(cpu_times=cpu_times, memory_info=lambda: SimpleNamespace(rss=7))

    crew = Crew(psutil.Process(process.pid), trainers={0: 31}, waiting=2, busy=[0])
    machine = watched(Machine(tmp_path), crew)
    monkeypatch.setattr(room.psutil, "Process", told)
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: 1000.04))
    assert machine.sample()["used"] == {}, "nobody knows yet how much it was"
    now, times = 10.5, [1.0, 0.5]
    assert machine.sample() == {}, "it is too early"
    now, times, gone = 12.0, [1.0, 0.5], {31}
    sample = {
        "at": 1000.0,
        "used": {"coordinator": [0.75, 7], "supervisor": [0.75, 7]},
        "waiting": 2,
        "busy": 1,
        "processes": {"coordinator": 1, "supervisor": 1, "trainer": 1, "device": 0},
    }
    assert machine.sample() == sample
    now, times = 16.0, [1.0, 1.5]
    assert machine.sample()["used"] == {"coordinator": [0.25, 7], "supervisor": [0.25, 7]}
    assert machine.history()[1] == sample
    machine.look(None)
    now = 20.0
    assert machine.sample() == {}


def test_devices_are_frozen_until_their_process_goes_on_or_ends(
    process: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    own = psutil.Process()
    machine = watched(Machine(tmp_path), Crew(own, devices={0: process.pid, 1: process.pid, 2: own.pid}))
    still = psutil.Process(process.pid)

    def frozen(seconds: float) -> set[int]:
        """The frozen devices, if the page has stopped the process so many seconds ago."""
        machine.frozen[process.pid] = still, time.monotonic() - seconds
        return machine.frozen_devices()

    assert frozen(0.0) == {0, 1}, "the kernel may take a moment"
    assert (frozen(60.0), machine.frozen) == (set(), {}), "somebody else has let it go on"
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert frozen(60.0) == {0, 1}
    process.kill()
    process.wait()
    assert (frozen(0.0), machine.frozen) == (set(), {})
