"""A soak: a small fleet under churn for a long time, and whether anything of it grows meanwhile.

Devices crash, leave, fall silent and send damaged replies by plan, and device processes are killed from outside. Each
round runs a server job in a process of its own, and devices write new own states.
"""

from __future__ import annotations

import csv
import io
import math
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from fedemu.ops.figures import span
from fedemu.ops.running.launch import free_address
from fedemu.ops.stress.fleet import FleetTimeout, LiveFleet, Start, send_home
from fedemu.ops.stress.leftovers import orphaned_memory, shared_memory
from fedemu.ops.stress.soak.slopes import Slope, slope_of, unknown
from fedemu.ops.terminal import last_words
from fedemu.protocol.host.files import write_for_people

EXPERIMENT = "digits-small+public+flashback"
SETTINGS = (
    "rounds=1000000",
    "fleet.quorum=0.1",
    "fleet.attempts=20",
    "fleet.start_timeout=120.0",
    "fleet.give_up=90.0",
    "liveness.heartbeat_seconds=1.0",
    "stream={kind='drift', periods=4, rounds_per_period=25}",
    "replay={strategy='naive_uniform', capacity=5}",
    "faults={crash_rate=0.15, leave_rate=0.1, silence_rate=0.02, corrupt_rate=0.05, duplicate_rate=0.05, "
    "decline_rate=0.05}",
    "evaluate.every=10",
)
"""What the fleet plays: server jobs, own states with replay buffers, and every planned fault."""
DEVICES = 40
SAMPLE_SECONDS = 5.0
KILL_EVERY = 2
"""The number of samples between two device processes that are killed from outside."""
WARM_UP = 1 / 5
"""The share of the time that does not count: caches fill, and all devices get their own states."""
WARM_UP_SECONDS = 180.0
"""The least time that does not count. A fleet gets warm in a time of its own, however long the soak is."""
LEAST_SECONDS = 400.0
"""The least time that has to count. Half a MiB in it looks like 4.5 MiB an hour, and in less time like more."""
LEAST_MINUTES = 10
"""A soak of so many minutes is long enough, also if its last sample is late."""
MIB = 2**20


@dataclass(frozen=True)
class Quantity:
    """Something that is sampled. It may not grow by more than ``limit`` an hour, in its unit."""

    name: str
    unit: str
    limit: float


_MEMORY = [
    Quantity(f"memory of {of}", "MiB", limit)
    for of, limit in (("coordinator", 8.0), ("supervisor", 4.0), ("zygote", 2.0), ("trainers", 16.0), ("a device", 1.0))
]
QUANTITIES: Mapping[str, Quantity] = {
    quantity.name: quantity
    for quantity in (
        *_MEMORY,
        Quantity("descriptors of coordinator", "", 4.0),
        Quantity("descriptors of supervisor", "", 4.0),
        Quantity("threads of coordinator", "", 2.0),
        Quantity("threads of supervisor", "", 2.0),
        Quantity("processes", "", 2.0),
        Quantity("files of run", "", 4.0),
        Quantity("files of devices", "", 8.0),
        Quantity("temporary files", "", 2.0),
        Quantity("files in shared memory", "", 2.0),
    )
}
"""Everything that is sampled, by name. Memory is that which a process shares with no other.

Coordinator and zygote share theirs with processes that they fork, and trainers with the one from which they are forked,
so that theirs is all that is resident. What is shared becomes a process's own as it writes there; that is no growth.
Processes are those of the whole fleet, also those that server jobs start. A folder counts as a file.
"""

Sample = Mapping[str, float]


@dataclass(frozen=True)
class SoakResult:
    """What a soak showed. ``seconds`` are the times of the samples; ``slopes`` are per hour, after the warm-up.

    Those of a soak that was too short are unknown.

    It passed if it was not ``interrupted``, and there are no complaints.
    """

    seconds: tuple[float, ...]
    samples: tuple[Sample, ...]
    slopes: Mapping[str, Slope]
    rounds: int
    ended: Mapping[str, int]
    """How many processes of devices ended, and how many of these were killed from outside."""
    complaints: tuple[str, ...]
    interrupted: bool = False
    """Whether it was ended by Ctrl-C or a signal. All else tells what there was before."""

    @property
    def passed(self) -> bool:
        """Whether it was played to its end without complaints."""
        return not self.complaints and not self.interrupted


def soak(
    folder: Path,
    minutes: float,
    seed: int = 1,
    *,
    devices: int = DEVICES,
    every: float = SAMPLE_SECONDS,
    told: Callable[[float, Sample], None] = lambda seconds, sample: None,
    start: Start | None = None,
) -> SoakResult:
    """Play the soak in ``folder`` for ``minutes``, and judge what was sampled ``every`` so many seconds.

    ``told`` gets each sample. ``start`` starts the processes. A KeyboardInterrupt ends the soak early, and the result
    says so: what was sampled may have taken hours.
    """
    chance = random.Random(seed)
    seconds: list[float] = []
    samples: list[Sample] = []
    complaints: list[str] = []
    interrupted = False
    before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        # All temporary files of the fleet come here, so that they can be counted.
        place = {"TMPDIR": temporary, "XDG_RUNTIME_DIR": temporary}
        settings = (f"fleet.devices={devices}", f"fleet.per_round={min(8, devices)}", *SETTINGS)
        with LiveFleet(
            folder, address=free_address(), overrides=settings, experiment=EXPERIMENT, start=start, environment=place
        ) as fleet:
            fleet.start_devices(devices)
            coordinator = fleet.start_coordinator()
            counting = _Deaths(fleet)
            try:
                fleet.wait_until(lambda: fleet.rounds() > 0 or coordinator.poll() is not None, "round 1", 180.0)
                began = time.monotonic()
                while not complaints and (now := time.monotonic() - began) < 60 * minutes:
                    sample = look(fleet, Path(temporary), before)
                    seconds.append(now)
                    samples.append(sample)
                    counting.look(kill=chance if len(samples) % KILL_EVERY == 0 else None)
                    told(now, sample)
                    fleet.pause(max(0.0, every - (time.monotonic() - began - now)))
                    if coordinator.poll() is not None:
                        complaints.append(f"the run ended by itself: {fleet.tail(4)}")
                    elif gone := [each for each in fleet.supervisors if each.poll() is not None]:
                        words = last_words(fleet.log_of(gone[0]))
                        complaints.append(f"a supervisor ended by itself with exit {gone[0].returncode}: {words}")
            except FleetTimeout as error:
                complaints.append(str(error))
            except KeyboardInterrupt:
                interrupted = True
            rounds = fleet.rounds()
            if not complaints and not interrupted:
                complaints += send_home(fleet)
        complaints += fleet.leftovers()
        complaints += [f"left behind: {path}" for path in sorted(Path(temporary).iterdir())]
    slopes = judge(seconds, samples)
    if not complaints and not interrupted and any(math.isinf(slope.low) for slope in slopes.values()):
        complaints.append(
            f"too few samples to tell whether anything grows: {len(samples)} in "
            f"{span(seconds[-1] if seconds else 0.0)}; a soak of {LEAST_MINUTES} minutes has enough"
        )
    complaints += [
        f"{name} grows by {slope.slope:.3g} {QUANTITIES[name].unit} an hour".replace("  ", " ")
        for name, slope in slopes.items()
        if slope.exceeds(QUANTITIES[name].limit)
    ]
    ended = {"processes of devices": counting.ended, "killed from outside": counting.killed}
    times = tuple(seconds[: len(samples)])
    return SoakResult(times, tuple(samples), slopes, rounds, ended, tuple(complaints), interrupted)


def judge(seconds: Sequence[float], samples: Sequence[Sample]) -> dict[str, Slope]:
    """The slope of each quantity, per hour, from the samples after the warm-up. Unknown if too little time counts."""
    begin, end = counts_from(seconds), seconds[-1] if seconds else 0.0
    if end - begin < LEAST_SECONDS:
        return {name: unknown([sample[name] for sample in samples]) for name in QUANTITIES}
    kept = [place for place, moment in enumerate(seconds) if moment >= begin]
    hours = [seconds[place] / 3600 for place in kept]
    return {name: slope_of(hours, [samples[place][name] for place in kept]) for name in QUANTITIES}


def counts_from(seconds: Sequence[float]) -> float:
    """The time in seconds from which samples at these times count."""
    return max(WARM_UP * seconds[-1] if seconds else 0.0, WARM_UP_SECONDS)


def look(fleet: LiveFleet, temporary: Path, before: set[str]) -> dict[str, float]:
    """One sample of everything."""
    assert fleet.coordinator is not None
    coordinator, supervisor = [fleet.coordinator], fleet.supervisors
    kinds = {kind: fleet.processes(kind) for kind in ("zygote", "trainer", "device")}
    of_devices = sorted(_memory(process) for process in kinds["device"])
    return {
        "memory of coordinator": sum(map(_resident, coordinator)),
        "memory of supervisor": sum(map(_memory, supervisor)),
        "memory of zygote": sum(map(_resident, kinds["zygote"])),
        "memory of trainers": sum(map(_resident, kinds["trainer"])),
        "memory of a device": of_devices[len(of_devices) // 2] if of_devices else 0.0,
        "descriptors of coordinator": sum(_number(process, "num_fds") for process in coordinator),
        "descriptors of supervisor": sum(_number(process, "num_fds") for process in supervisor),
        "threads of coordinator": sum(_number(process, "num_threads") for process in coordinator),
        "threads of supervisor": sum(_number(process, "num_threads") for process in supervisor),
        "processes": len(fleet.all_processes()),
        "files of run": _files(fleet.run_directory),
        "files of devices": _files(fleet.state),
        "temporary files": _files(temporary),
        "files in shared memory": len(orphaned_memory(before)),
    }


def write_samples(result: SoakResult, path: Path) -> None:
    """Write all samples as CSV: one line each, its time in seconds first."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["seconds", *QUANTITIES])
    for moment, sample in zip(result.seconds, result.samples, strict=True):
        writer.writerow([f"{moment:.1f}", *(f"{sample[name]:.6g}" for name in QUANTITIES)])
    write_for_people(path, text.getvalue())


class _Deaths:
    """Counts the device processes that end, and kills some."""

    def __init__(self, fleet: LiveFleet) -> None:
        self.ended = 0
        self.killed = 0
        self._fleet = fleet
        self._seen: set[int] = set()

    def look(self, kill: random.Random | None) -> None:
        alive = {process.pid: process for process in self._fleet.processes("device")}
        self.ended += len(self._seen - alive.keys())
        self._seen = set(alive)
        if kill is not None and alive:
            self._fleet.signal(alive[kill.choice(sorted(alive))], signal.SIGKILL)
            self.killed += 1


def _memory(process: psutil.Process) -> float:
    """The memory in MiB that a process shares with no other, 0 if the process has gone."""
    with suppress(psutil.Error):
        return float(process.memory_full_info().uss) / MIB
    return 0.0


def _resident(process: psutil.Process) -> float:
    """The resident memory of a process in MiB, 0 if the process has gone."""
    with suppress(psutil.Error):
        return float(process.memory_info().rss) / MIB
    return 0.0


def _number(process: psutil.Process, of: str) -> int:
    with suppress(psutil.Error):
        return int(getattr(process, of)())
    return 0


def _files(folder: Path) -> int:
    """The number of files and folders below a folder. What goes meanwhile does no harm."""
    return sum(len(folders) + len(files) for _, folders, files in os.walk(folder))
