"""One ``fedemu run digits`` under observation: how long its rounds took, and which processes paid for them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from fedemu.ops.bench.processes import cpu_seconds
from fedemu.ops.bench.worker import BenchmarkError

RUN_SECONDS = 300.0
_POLL_SECONDS = 0.02
_KINDS = {
    "fedemu-coordina": "coordinator",
    "fedemu-devices": "supervisor",
    # A dead process's time is its parent's, so these two can't be told apart.
    "fedemu-zygote": "device processes",
    "fedemu-device": "device processes",
    "fedemu-trainer": "trainers",
}
"""By process name, of which the kernel keeps 15 characters."""


@dataclass(frozen=True)
class Stretch:
    """``accepted`` updates in ``wall`` seconds; CPU seconds per accepted update by kind of process."""

    accepted: int
    wall: float
    cpu_per_update: Mapping[str, float]
    digest: str


def run_digits(directory: Path, overrides: Sequence[str], first: int, last: int) -> Stretch:
    """Run to the end and look at the stretch from the end of round ``first`` to the end of round ``last``.

    CPU time is read shortly before the last round, because at the end processes go away with theirs.
    """
    log = directory.with_suffix(".log")
    settings = [word for override in overrides for word in ("--set", override)]
    with log.open("wb") as terminal:
        run = subprocess.Popen(
            [sys.executable, "-m", "fedemu.ops.cli", "run", "digits", "--out", str(directory), *settings],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=terminal,
        )
    end = time.monotonic() + RUN_SECONDS
    try:
        rounds_before, before = _cpu_after(run, directory, first, end)
        rounds_after, after = _cpu_after(run, directory, max(first + 1, last - 1), end)
        code = run.wait(max(1.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"fedemu run did not end within {RUN_SECONDS:.0f} s") from None
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(30.0)
    if code:
        raise BenchmarkError(f"fedemu run ended with exit {code}: {log.read_text(errors='replace')[-500:]}")
    rows = _rows(directory)
    counted = sum(row["accepted"] for row in rows[rounds_before:rounds_after])
    return Stretch(
        accepted=sum(row["accepted"] for row in rows[first:last]),
        wall=rows[last - 1]["wall_time"] - rows[first - 1]["wall_time"],
        cpu_per_update={kind: (after[kind] - before[kind]) / counted for kind in dict.fromkeys(_KINDS.values())},
        digest=str(json.loads((directory / "summary.json").read_text())["model_digest"]),
    )


def _cpu_after(run: subprocess.Popen[bytes], directory: Path, round: int, end: float) -> tuple[int, dict[str, float]]:
    """How many rounds are over, at least ``round``, and the CPU seconds that each kind of process has used so far."""
    while (rounds := len(_rows(directory))) < round:
        if run.poll() is not None or time.monotonic() > end:
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


def _rows(directory: Path) -> list[dict[str, Any]]:
    """The rounds that are over; a line that is being written is left out."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
