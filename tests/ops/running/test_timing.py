"""Where the time of a run goes, as its processes tell it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedemu.ops.running.timing import FILE, Phase, Timing, read_timing, table, timed, timing
from fedemu.protocol.host import phases
from fedemu.protocol.host.phases import mark, part, used, used_by_ended


def said(process: str, pid: int, phase: str, began: float, at: float, cpu: float, **more: object) -> str:
    line = {"process": process, "pid": pid, "phase": phase, "began": began, "at": at, "cpu": cpu}
    return json.dumps(line | {"ended": 0.0, "parts": {}, "others": {}} | more) + "\n"


def test_phases_follow_each_other_and_silent_processes_are_told_by_their_supervisor(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(
        said("fedemu", 1, "imports", 100.0, 101.0, 0.5)
        + said("coordinator", 2, "imports", 101.0, 103.0, 1.5)
        + said("trainer", 4, "imports", 103.0, 104.0, 0.75)
        + said("devices", 3, "attach", 103.0, 104.0, 0.25, others={"devices": 2.0})
        + said("coordinator", 2, "rounds", 101.0, 107.0, 2.5, ended=0.5, parts={"evaluation": [0.5, 0.25]})
        + said("devices", 3, "rounds", 103.0, 107.0, 0.5, others={"devices": 3.5, "trainers": 1.0})
        + said("zygote", 5, "forks", 103.0, 108.0, 0.125, ended=4.0)
        + said("fedemu", 1, "the run", 100.0, 110.0, 1.0, ended=9.0)
    )
    found = read_timing(tmp_path)
    assert found is not None
    assert (found.wall, found.cpu) == (10.0, 10.0)
    assert [phase for phase in found.phases if phase.process == "coordinator"] == [
        Phase("coordinator", "imports", 1.5, 1.0, 3.0),
        Phase("coordinator", "rounds", 1.5, 3.0, 7.0),
        Phase("coordinator", "evaluation (0.50 s)", 0.25, within=True),
    ]
    devices = [(phase.name, phase.cpu) for phase in found.phases if phase.process == "device processes"]
    assert devices == [("attach", 2.0), ("rounds", 1.5), ("end", 0.5)]
    assert [(p.process, p.cpu) for p in found.phases if p.process.startswith("trainer")] == [
        ("trainer 1", 0.75),
        ("trainer", 0.25),
    ]


def test_edges_machines_and_trackers_are_in_the_table(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(
        said("fedemu", 1, "imports", 100.0, 101.0, 0.5)
        + said("track", 9, "imports", 101.0, 103.0, 0.25)
        + said("tree", 2, "imports", 101.0, 102.0, 0.25)
        + said("edge", 3, "imports", 102.0, 103.0, 0.25)
        + said("devices", 4, "attach", 103.0, 104.0, 0.25, others={"devices": 2.0})
        + said("devices", 5, "attach", 103.0, 105.0, 0.25, others={"devices": 3.0})
        + said("devices", 4, "rounds", 103.0, 107.0, 0.5, others={"devices": 2.5, "trainers": 1.0})
        + said("devices", 5, "rounds", 103.0, 107.0, 0.5, others={"devices": 4.0, "trainers": 2.0})
        + said("zygote", 6, "forks", 103.0, 108.0, 0.125, ended=3.0)
        + said("zygote", 7, "forks", 103.0, 108.0, 0.125, ended=4.5)
        + said("fedemu", 1, "the run", 100.0, 110.0, 1.0, ended=9.0)
        + '{"process": "fed'  # a full disk took no more
    )
    found = read_timing(tmp_path)
    assert found is not None
    assert list(dict.fromkeys(phase.process for phase in found.phases)) == [
        *("fedemu", "tree", "edge", "devices 1", "devices 2", "zygote 1", "zygote 2", "device processes", "trainer"),
        "track",
    ]
    devices = [(phase.name, phase.cpu) for phase in found.phases if phase.process == "device processes"]
    assert devices == [("attach", 5.0), ("rounds", 1.5), ("end", 1.0)]
    assert [phase.cpu for phase in found.phases if phase.process == "trainer"] == [3.0]
    told = table(found)
    assert told.count("supervisor 2") == 3  # two phases, and a bar
    assert "edges and machines" in told


def test_the_table_has_a_bar_for_each_process() -> None:
    phases = [Phase("fedemu", "imports", 0.5, 0.0, 1.0), Phase("coordinator", "rounds", 1.5, 2.0, 4.0)]
    lines = table(Timing(phases, 4.0, 2.0)).splitlines()
    assert lines[1].split() == ["fedemu", "a", "imports", "0.00", "1.00", "1.00", "0.50"]
    assert lines[3].split() == ["all", "processes", "4.00", "4.00", "2.00"]
    assert lines[5:] == [f"fedemu             {'a' * 15}{'.' * 45}", f"coordinator        {'.' * 30}{'b' * 30}"]


def test_only_a_run_that_is_asked_marks_its_phases(tmp_path: Path) -> None:
    mark("fedemu", "nothing")
    with timing(tmp_path, wanted=False):
        assert not phases.marks()
        assert timed(3) == []
    assert read_timing(tmp_path) is None
    with timing(tmp_path, wanted=True):
        assert len(timed(3)) == 1
        with part("work"):
            sum(range(1000))
    assert not phases.marks()
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [(line["phase"], list(line["parts"])) for line in lines] == [
        ("imports and settings", []),
        ("the run", ["work"]),
    ]
    assert lines[0]["began"] < lines[0]["at"] <= lines[1]["at"]


def test_a_mark_that_cannot_be_kept_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(phases.VARIABLE, "/proc/no/such/file")
    mark("fedemu", "imports")


def test_a_part_tells_its_wall_time_and_its_cpu_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / FILE
    monkeypatch.setenv(phases.VARIABLE, str(file))
    wall, cpu = time.monotonic(), time.thread_time()
    for _ in range(2):
        with part("work"):
            compute(0.05)
    wall, cpu = time.monotonic() - wall, time.thread_time() - cpu
    mark("fedemu", "with work")
    mark("fedemu", "without")
    first, second = (json.loads(line)["parts"] for line in file.read_text().splitlines())
    assert 0.099 <= first["work"][1] <= cpu
    assert 0.099 <= first["work"][0] <= wall
    assert second == {}


def test_the_cpu_of_other_processes_is_read_from_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint(time.process_time(), flush=True)\ninput()"
    command = [sys.executable, "-S", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        told = float(other.stdout.readline())
        assert used([other.pid]) == pytest.approx(told, abs=0.05)
        monkeypatch.setattr(Path, "read_bytes", no_such_file)  # a kernel that counts no single threads
        assert used([other.pid, 2**22 + 1]) == pytest.approx(told, abs=0.05)
        other.communicate("\n")
    assert used([2**22 + 1]) == 0.0
    assert used_by_ended(2**22 + 1) == 0.0


def test_a_process_marks_when_it_began_and_the_cpu_of_its_children_that_ended(tmp_path: Path) -> None:
    file = tmp_path / FILE
    compute_long = "import time\nwhile time.process_time() < 0.2: pass"
    code = f"""import os, subprocess, sys
from fedemu.protocol.host.phases import mark, used_by_ended
subprocess.run([sys.executable, "-S", "-c", {compute_long!r}], check=True)
mark("fedemu", "imports", lambda: {{"ended": used_by_ended(os.getpid())}})"""
    before = time.monotonic()
    subprocess.run([sys.executable, "-c", code], env={**os.environ, phases.VARIABLE: str(file)}, check=True)
    line = json.loads(file.read_text())
    assert before - 0.02 <= line["began"] < line["at"] <= time.monotonic()  # the kernel counts in steps of 10 ms
    assert 0.19 <= line["ended"] < line["at"] - line["began"]
    assert line["others"]["ended"] == pytest.approx(line["ended"], abs=0.03)


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def no_such_file(_: Path) -> bytes:
    raise FileNotFoundError
