"""A cluster with Slurm on this machine: its commands are stand-ins, and its nodes are processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

STAND_IN = Path(__file__).parent / "slurm_stand_in.py"
LONGEST_SECONDS = 600.0


class SlurmHere:
    """The stand-ins in ``folder``, and the jobs that were submitted to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("sbatch", "srun", "scontrol"):
            command = folder / name
            command.write_text(f'#!/bin/bash\nexec {sys.executable} {STAND_IN} {folder} {name} "$@"\n')
            command.chmod(0o755)
        self.environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "LISTEN": "127.0.0.1"}

    def submit(self, script: Path) -> str:
        """Submit a script. Returns the number of its job."""
        done = subprocess.run(["sbatch", str(script)], env=self.environment, capture_output=True, text=True, check=True)
        return done.stdout.split()[-1]

    def wait(self, job: str) -> int:
        """Wait until a job is over. Returns its exit code."""
        self.until((self.folder / f"job-{job}.code").exists, f"the end of job {job}")
        return int((self.folder / f"job-{job}.code").read_text())

    def notice(self, job: str) -> None:
        """Tell a job that its time is nearly over."""
        os.kill(int((self.folder / f"job-{job}.pid").read_text()), signal.SIGUSR1)

    def processes(self, job: str, word: str) -> list[psutil.Process]:
        """The living processes of a job with ``word`` on their command line."""
        found, own = [], {"SLURM_CLUSTER_NAME": str(self.folder), "SLURM_JOB_ID": job}
        for process in psutil.process_iter():
            try:
                if own.items() <= process.environ().items() and (not word or word in process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until ``condition()`` is true."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come"
            time.sleep(0.05)

    def close(self) -> None:
        """End what is left of all jobs."""
        for script in self.folder.glob("job-*.script"):
            for process in self.processes(script.stem.removeprefix("job-"), ""):
                process.kill()


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SlurmHere]:
    """A cluster on this machine."""
    here = SlurmHere(tmp_path / "slurm")
    yield here
    here.close()
