"""The daemon of NVIDIA's Multi-Process Service: a stand-in shows how it is started and ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from fedemu.ops.bench.gpu.mps import CONTROL, mps
from fedemu.ops.bench.peers.environments import Absent

STAND_IN = """#!{python}
# In the foreground (-f) it is the daemon, with a server below it. Without an option it passes on what it reads.
import os, subprocess, sys, time
way = {way!r}
pipe = os.path.join(os.environ["CUDA_MPS_PIPE_DIRECTORY"], "control")
if sys.argv[1:] != ["-f"]:
    with open(pipe, "w") as file:
        file.write(sys.stdin.read())
elif way == "fails":
    sys.exit("Failed to find any GPU")
else:
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open({note!r}, "w") as file:
        print(os.getpid(), server.pid, file=file)
    os.mkfifo(pipe)
    while True:
        with open(pipe) as file:
            said = file.read()
        if said == "quit\\n" and way == "obeys":
            server.kill()
            server.wait()
            sys.exit()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a test writes its stand-in, and in which that notes its processes."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return tmp_path


def write(folder: Path, way: str) -> None:
    program = folder / "bin" / CONTROL
    program.write_text(STAND_IN.format(python=sys.executable, way=way, note=str(folder / "note")))
    program.chmod(0o755)


@pytest.mark.parametrize(("way", "seconds"), [("obeys", 20.0), ("ignores", 0.5)])
def test_the_daemon_has_a_folder_of_its_own_and_nothing_of_it_is_left(stand_in: Path, way: str, seconds: float) -> None:
    write(stand_in, way)
    with mps(20.0) if way == "obeys" else mps(seconds) as variables:
        folder = Path(variables["CUDA_MPS_PIPE_DIRECTORY"]).parent
        assert Path(variables["CUDA_MPS_LOG_DIRECTORY"]).parent == folder
        assert folder.stat().st_mode & 0o77 == 0, "nobody else may use it"
        processes = [psutil.Process(int(pid)) for pid in (stand_in / "note").read_text().split()]
        assert len(processes) == 2
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    _, alive = psutil.wait_procs(processes, 10.0)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert not folder.exists()


def test_it_ends_with_an_error_of_the_benchmark_too(stand_in: Path) -> None:
    write(stand_in, "obeys")
    seen: list[psutil.Process] = []

    def benchmark() -> None:
        with mps():
            seen.append(psutil.Process(int((stand_in / "note").read_text().split()[0])))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        benchmark()
    assert [process.is_running() for process in seen] == [False]


def test_a_daemon_that_does_not_start_is_absent_with_its_words(stand_in: Path) -> None:
    write(stand_in, "fails")
    with pytest.raises(Absent, match=f"^{CONTROL} did not start: Failed to find any GPU$"), mps():
        pass
