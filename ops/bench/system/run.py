"""One ``fedemu run`` under observation: the time of its rounds, and the CPU time of each kind of process."""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from fedemu.coordinator.record.row import read_rows
from fedemu.coordinator.record.run import read_summary
from fedemu.ops.bench.measuring.processes import cpu_seconds, end
from fedemu.ops.bench.measuring.worker import BenchmarkError
from fedemu.ops.stress.fleet import finished_rounds
from fedemu.protocol.code.source import interpreter

RUN_SECONDS = 300.0
_POLL_SECONDS = 0.02
_KINDS = {
    "fedemu-coordina": "coordinator",
    "fedemu-job": "coordinator",
    "fedemu-devices": "supervisor",
    # When a process ends, its parent gets its CPU time. So these two cannot be told apart.
    "fedemu-zygote": "device processes",
    "fedemu-device": "device processes",
    "fedemu-trainer": "trainers",
    "fedemu-nursery": "trainers",
}
"""The kind of a process by its name, of which the kernel keeps 15 characters."""


@dataclass(frozen=True)
class Stretch:
    """A part of a run: ``accepted`` updates in ``wall`` seconds, with the model digest of the whole run.

    ``cpu_per_update`` are CPU seconds per accepted update, by the kind of process.
    """

    accepted: int
    wall: float
    cpu_per_update: Mapping[str, float]
    digest: str


def run_observed(preset: str, directory: Path, overrides: Sequence[str], first: int, last: int) -> Stretch:
    """Play a run of a preset and measure it from the end of round ``first`` to the end of round ``last``.

    CPU time is read shortly before the last round, because processes that have ended can't be asked. Raises
    BenchmarkError if the run fails, takes too long, or is too fast.
    """
    log = directory.with_suffix(".log")
    settings = [f"--set={override}" for override in (*overrides, "runtime.report=false")]
    with log.open("wb") as terminal:
        run = subprocess.Popen(
            [*interpreter(), "-m", "fedemu.ops.cli", "run", preset, "--out", str(directory), *settings],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=terminal,
        )
    deadline = time.monotonic() + RUN_SECONDS
    try:
        rounds_before, before = _cpu_after(run, directory, first, deadline)
        rounds_after, after = _cpu_after(run, directory, max(first + 1, last - 1), deadline)
        code = run.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"fedemu run did not end within {RUN_SECONDS:.0f} s") from None
    finally:
        end(run)
    if code:
        raise BenchmarkError(f"fedemu run ended with exit {code}: {log.read_text(errors='replace')[-500:]}")
    rows = read_rows(directory)
    counted = sum(row.accepted or 0 for row in rows[rounds_before:rounds_after])
    if not counted:
        raise BenchmarkError("the rounds of fedemu run were over before they could be measured")
    return Stretch(
        accepted=sum(row.accepted or 0 for row in rows[first:last]),
        wall=(rows[last - 1].wall_time or 0.0) - (rows[first - 1].wall_time or 0.0),
        cpu_per_update={kind: (after[kind] - before[kind]) / counted for kind in dict.fromkeys(_KINDS.values())},
        digest=str(read_summary(directory)["model_digest"]),
    )


def _cpu_after(
    run: subprocess.Popen[bytes], directory: Path, round: int, deadline: float
) -> tuple[int, dict[str, float]]:
    """Wait until ``round`` is over. Returns how many rounds are over then, and the CPU seconds of each kind so far."""
    while (rounds := finished_rounds(directory)) < round:
        if run.poll() is not None or time.monotonic() > deadline:
            log = directory.with_suffix(".log").read_text(errors="replace")
            raise BenchmarkError(f"fedemu run never reached round {round}: {log[-500:]}")
        time.sleep(_POLL_SECONDS)
    used: dict[str, float] = defaultdict(float)
    for process in psutil.Process(run.pid).children(recursive=True):
        try:
            name, seconds = process.name(), cpu_seconds(process)
        except psutil.NoSuchProcess:
            continue
        used[_KINDS.get(name, name)] += seconds
    return rounds, used
