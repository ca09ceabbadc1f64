"""The training of a generator at the coordinator of a fleet: how a scenario finds and kills this training."""

from __future__ import annotations

import re
import signal

import psutil

from fedemu.ops.stress.fleet import LiveFleet

_CHECKPOINT = re.compile(r"job-(\d+)\.\d+\.\d+\.(\d+)\.safetensors")


def steps_on_disk(fleet: LiveFleet, round: int) -> int:
    """How many steps the checkpoint of a round's server job holds. 0 if there is no checkpoint."""
    files = (fleet.run_directory / "checkpoint").glob(f"job-{round}.*")
    return max((int(match[2]) for file in files if (match := _CHECKPOINT.fullmatch(file.name))), default=0)


def job_process(fleet: LiveFleet) -> psutil.Process | None:
    """The process of the server job that is running, the coordinator's only child. None if there is none."""
    assert fleet.coordinator is not None
    try:
        return next(iter(fleet.coordinator.children()), None)
    except psutil.NoSuchProcess:
        return None


def wait_for_training(fleet: LiveFleet, round: int, seconds: float = 120.0) -> psutil.Process | None:
    """Wait until a round's server job has a checkpoint. Returns its process, or None if the job is over already.

    Raises FleetTimeout after ``seconds``.
    """
    fleet.wait_until(lambda: steps_on_disk(fleet, round) > 0, f"a checkpoint of the job of round {round}", seconds)
    return job_process(fleet)


def kill_job(fleet: LiveFleet, process: psutil.Process) -> None:
    """Kill a job's process, and wait until the coordinator has noticed."""
    noticed = _deaths(fleet) + 1
    fleet.signal(process, signal.SIGKILL)
    fleet.wait_until(lambda: _deaths(fleet) >= noticed, "the death of a server job", 30)


def _deaths(fleet: LiveFleet) -> int:
    return sum(event["event"] == "server_job_died" for event in fleet.events())
