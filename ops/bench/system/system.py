"""The whole system: ``fedemu run`` with real processes. The floor is a plain loop in one process."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedemu.coordinator.record.json_lines import read_lines
from fedemu.coordinator.record.run import read_summary
from fedemu.ops.bench.measuring.images import IMAGES, PLAIN_SGD
from fedemu.ops.bench.measuring.measure import Effort, Figure, Sample, Tell, cost, rate
from fedemu.ops.bench.measuring.worker import BenchmarkError, Worker
from fedemu.ops.bench.system.run import Stretch, run_observed
from fedemu.protocol.code.source import interpreter

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


@dataclass(frozen=True)
class Work:
    """A run of ``preset``, in which ``per_round`` devices reply in a round.

    It is measured from the end of round ``first`` to the end of round ``last``, without its start and its report.
    """

    title: str
    preset: str
    overrides: tuple[str, ...]
    devices: int
    per_round: int
    first: int
    last: int
    arrangements: tuple[Arrangement, ...]


DIGITS = Work(
    title="digits",
    preset="digits",
    overrides=_SELDOM_AWAY,
    devices=300,
    per_round=30,
    first=5,
    last=40,
    arrangements=(Arrangement(1, "own", 1.5), Arrangement(1, "shared", 1.5), Arrangement(30, "own", 3.0)),
)
"""The first arrangement is the default: a process and a connection for each device."""
CNN = Work(
    title="CNN of 2,156,490",
    preset="cifar10-cnn",
    overrides=(*PLAIN_SGD, IMAGES),
    devices=40,
    per_round=10,
    first=2,
    last=8,
    arrangements=(Arrangement(1, "own", 1.5),),
)
"""Each result has 8.6 MB, so it is the way of large tensors that counts beside the training."""
WORKS = (DIGITS, CNN)


@dataclass(frozen=True)
class Accepted:
    """The devices whose updates were accepted, by round, and the model digest."""

    rounds: dict[int, list[int]]
    digest: str


def figures(effort: Effort, tell: Tell) -> Iterator[Figure]:
    """Accepted updates per second, and the CPU time per accepted update by kind of process, for each work."""
    for work in WORKS:
        yield from _measured(work, effort, tell)


def _measured(work: Work, effort: Effort, tell: Tell) -> Iterator[Figure]:
    per_round = effort.count(work.per_round)
    devices, last = per_round * work.devices // work.per_round, max(work.first + 3, effort.count(work.last))
    overrides = [f"fleet.devices={devices}", f"fleet.per_round={per_round}", f"rounds={last}", *work.overrides]
    tell(f"system: {work.title}: which updates are accepted")
    accepted = find_accepted(work.preset, overrides)
    cohorts = [accepted.rounds.get(round, []) for round in range(work.first + 1, last + 1)]
    side = {"preset": work.preset, "cohorts": cohorts, "overrides": overrides}
    with (
        tempfile.TemporaryDirectory(prefix="fedemu-bench-") as folder,
        Worker("fedemu.ops.bench.system.sides:plain", side) as floor,
    ):
        floor.ready().measure()
        for arrangement in work.arrangements:
            name, pairs, stretches = arrangement.name(devices), [], []
            options = [*overrides, f"fleet.link={arrangement.link}", f"runtime.per_process={arrangement.per_process}"]
            for number in range(min(effort.pairs - 1, _MOST_PAIRS)):
                tell(f"system: {work.title}, {name}, {last} rounds")
                run = Path(folder) / f"{arrangement.per_process}-{arrangement.link}-{number}"
                stretch = run_observed(work.preset, run, options, work.first, last)
                if stretch.digest != accepted.digest:
                    raise BenchmarkError("the run with real processes ended with another model than the one in memory")
                stretches.append(stretch)
                seconds = sum(stretch.cpu_per_update.values())
                pairs.append((Sample(stretch.accepted, stretch.wall, seconds * stretch.accepted), floor.measure()))
            title = f"{work.title}, {name}, rounds {work.first} to {last}"
            yield rate("system", title, "updates/s", pairs, arrangement.reach)
            yield from _shares(f"{work.title}, {name}", stretches)


def _shares(name: str, stretches: Sequence[Stretch]) -> Iterator[Figure]:
    """The CPU time per accepted update in this arrangement, for each kind of process."""
    for kind in stretches[0].cpu_per_update:
        values = [1000 * stretch.cpu_per_update[kind] for stretch in stretches]
        yield cost("system", f"{name}: CPU per accepted update: {kind}", "ms", values)


def find_accepted(preset: str, overrides: Sequence[str]) -> Accepted:
    """The updates that a run in one process accepts. A run of real processes accepts the same ones."""
    with tempfile.TemporaryDirectory(prefix="fedemu-bench-") as folder:  # Ctrl-C kills it, so it leaves its files
        directory = Path(folder) / "run"
        settings = [f"--set={each}" for each in (*overrides, "runtime.transport=memory", "runtime.report=false")]
        done = subprocess.run(
            [*interpreter(), "-m", "fedemu.ops.cli", "run", preset, "--out", str(directory), *settings],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": folder},
            timeout=300,
            process_group=0,
        )
        if done.returncode:
            raise BenchmarkError(f"the run in memory failed: {done.stdout.decode(errors='replace')[-500:]}")
        accepted: dict[int, list[int]] = defaultdict(list)
        for ask in read_lines(directory / "asks.jsonl"):
            outcomes = zip(ask["devices"], ask["outcomes"], strict=True)
            accepted[ask["round"]] += [device for device, outcome in outcomes if outcome == "a"]
        return Accepted(accepted, read_summary(directory)["model_digest"])
