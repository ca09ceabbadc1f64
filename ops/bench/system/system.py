"""The whole system: ``fedemu run digits`` with real processes. The floor is a plain loop in one process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedemu.ops.bench.measuring.measure import Effort, Figure, Sample, Tell, cost, rate
from fedemu.ops.bench.measuring.worker import BenchmarkError, Worker
from fedemu.ops.bench.system.run import Stretch, run_digits

FIRST, LAST = 5, 40
"""The run is measured from the end of round FIRST to the end of round LAST, without its start and its report."""
_DEVICES = 300
_MOST_PAIRS = 3


_SELDOM_AWAY = (
    "availability.mean_online=3600.0",
    "availability.mean_offline=1800.0",
    "profile.seconds_per_sample={kind='lognormal', median=0.01, sigma=0.5}",
)
"""Devices that are on-line for an hour, so that few drop out and an update costs what its work costs."""


@dataclass(frozen=True)
class Arrangement:
    """How the devices of a run live and connect. ``per_process`` of them share a process, ``link`` is a ``fleet.link``.

    ``reach`` is the least ratio to the floor that is wanted.
    """

    per_process: int
    link: str
    reach: float

    def name(self, devices: int) -> str:
        """The arrangement in words."""
        processes = -(-devices // self.per_process)
        shared = ", shared connection" if self.link == "shared" else ""
        return f"{processes} process{'es' if processes > 1 else ''}{shared}"


ARRANGEMENTS = (Arrangement(1, "own", 1.5), Arrangement(1, "shared", 1.5), Arrangement(30, "own", 3.0))
"""The first is the default: a process and a connection for each device."""


@dataclass(frozen=True)
class Accepted:
    """The devices whose updates were accepted, by round, and the model digest."""

    rounds: dict[int, list[int]]
    digest: str


def figures(effort: Effort, tell: Tell) -> Iterator[Figure]:
    """Accepted updates per second, and the CPU time per accepted update by kind of process."""
    devices, last = effort.count(_DEVICES, 10), max(FIRST + 3, effort.count(LAST))
    overrides = [f"fleet.devices={devices}", f"fleet.per_round={devices // 10}", f"rounds={last}", *_SELDOM_AWAY]
    tell("system: which updates are accepted")
    accepted = find_accepted(overrides)
    cohorts = [accepted.rounds.get(round, []) for round in range(FIRST + 1, last + 1)]
    with (
        tempfile.TemporaryDirectory(prefix="fedemu-bench-") as folder,
        Worker("fedemu.ops.bench.system.sides:plain", {"cohorts": cohorts, "overrides": overrides}) as floor,
    ):
        floor.ready().measure()
        for arrangement in ARRANGEMENTS:
            name, pairs, stretches = arrangement.name(devices), [], []
            options = [*overrides, f"fleet.link={arrangement.link}"]
            for number in range(min(effort.pairs - 1, _MOST_PAIRS)):
                tell(f"system: {name}, {last} rounds")
                run = Path(folder) / f"{arrangement.per_process}-{arrangement.link}-{number}"
                stretch = run_digits(run, options, FIRST, last, arrangement.per_process)
                if stretch.digest != accepted.digest:
                    raise BenchmarkError("the run with real processes ended with another model than the one in memory")
                stretches.append(stretch)
                seconds = sum(stretch.cpu_per_update.values())
                pairs.append((Sample(stretch.accepted, stretch.wall, seconds * stretch.accepted), floor.measure()))
            yield rate("system", f"digits, {name}, rounds {FIRST} to {last}", "updates/s", pairs, arrangement.reach)
            yield from _shares(name, stretches)


def _shares(name: str, stretches: Sequence[Stretch]) -> Iterator[Figure]:
    """The CPU time per accepted update in this arrangement, for each kind of process."""
    for kind in stretches[0].cpu_per_update:
        values = [1000 * stretch.cpu_per_update[kind] for stretch in stretches]
        yield cost("system", f"{name}: CPU per accepted update: {kind}", "ms", values)


def find_accepted(overrides: Sequence[str]) -> Accepted:
    """The updates that a run accepts, found by ``accepted.py`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "fedemu.ops.bench.system.accepted", *overrides],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=300,
    )
    if done.returncode:
        raise BenchmarkError("the run in memory failed; its error is above")
    answer = json.loads(done.stdout)
    return Accepted({int(round): devices for round, devices in answer["accepted"].items()}, answer["digest"])
