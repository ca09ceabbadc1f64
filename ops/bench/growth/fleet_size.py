"""What a fleet costs that sleeps until it is asked: time and memory of whole runs with 1,000 to 1,000,000 devices."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console, Group
from rich.table import Table

from fedemu.coordinator.record.row import read_rows
from fedemu.ops.bench.measuring.measure import Effort, Tell
from fedemu.ops.bench.measuring.processes import cpu_seconds, end
from fedemu.ops.bench.measuring.worker import BenchmarkError
from fedemu.ops.figures import readable_bytes
from fedemu.ops.stress.fleet import finished_rounds
from fedemu.protocol.code.source import interpreter

SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)
ROUNDS: Final = 10
MOST_ASKED: Final = 1_000
"""The most devices of a round. Of a small fleet it is a tenth."""
SETTINGS: Final = (
    "fleet.over_selection=1",
    "fleet.link=shared",
    "fleet.wake=on-demand",
    "fleet.start_timeout=600",
    "data.partition={kind='resampled',samples=4}",
    "availability={kind='always'}",
    "runtime.trainers=1",
    "runtime.report=false",
)
_RUN_SECONDS: Final = 1800.0
_POLL_SECONDS: Final = 0.02
_COORDINATOR: Final = "fedemu-coordina"  # the kernel keeps 15 characters of a name
_SUPERVISOR: Final = "fedemu-devices"

EXPLANATION: Final = (
    "Each line is a run of fedemu run digits with a process for the coordinator, one for the supervisor, packs and a "
    "trainer. The first round counts from the command; seconds and CPU are those of a later round, CPU of the "
    "coordinator and of all others. Memory is the peak of the resident size. The checkpoint is that of the last round."
)


@dataclass(frozen=True)
class Point:
    """A run with so many ``devices``. Times are seconds, sizes are bytes.

    ``first`` is the time until the first round is over, ``round`` the mean of the later ones. The CPU of a later round
    is None if all were over before it could be read. ``packs`` is the most device processes at a time.
    """

    devices: int
    asked: int
    first: float
    round: float
    coordinator_cpu: float | None
    others_cpu: float | None
    coordinator_memory: int
    supervisor_memory: int
    packs: int
    checkpoint: int


@dataclass(frozen=True)
class FleetSizes:
    """All points, from the smallest fleet to the largest, each of so many ``rounds``."""

    points: tuple[Point, ...]
    rounds: int

    def table(self) -> dict[str, Any]:
        """The points for JSON."""
        return {"points": [asdict(point) for point in self.points], "rounds": self.rounds}

    def __rich_console__(self, console: Console, options: Any) -> Iterator[Group]:
        drawn = Table(box=None, pad_edge=False)
        for title in ("devices", "asked", "first s", "round s", "CPU s", "others' CPU s"):
            drawn.add_column(title, justify="right")
        for title in ("coordinator", "supervisor", "packs", "checkpoint"):
            drawn.add_column(title, justify="right")
        for one in self.points:
            times = (one.first, one.round, one.coordinator_cpu, one.others_cpu)
            sizes = (one.coordinator_memory, one.supervisor_memory)
            drawn.add_row(
                f"{one.devices:,}",
                f"{one.asked:,}",
                *("" if seconds is None else f"{seconds:.3g}" for seconds in times),
                *map(readable_bytes, sizes),
                str(one.packs),
                readable_bytes(one.checkpoint),
            )
        yield Group("[bold]devices that sleep until they are asked[/]", drawn, EXPLANATION)


def measure(
    effort: Effort, largest: int, tell: Tell, play: Callable[[int, int, int], Point] | None = None
) -> Iterator[FleetSizes]:
    """Measure fleets of up to ``largest`` devices. What was measured so far, after each of them.

    ``play`` (devices, asked, rounds) measures one of them.

    With less effort only 1,000 and 10,000 devices are measured, in three rounds.
    """
    most = largest if effort.scale >= 1 else min(largest, SIZES[1])
    rounds = ROUNDS if effort.scale >= 1 else 3
    sizes = [size for size in SIZES if size <= most]
    if most not in sizes and effort.scale >= 1:
        sizes.append(most)
    points: list[Point] = []
    for size in sizes:
        asked = max(1, min(MOST_ASKED, size // 10))
        tell(f"fleet-size: {size:,} devices, {rounds} rounds with {asked:,} each")
        points.append((play or _played)(size, asked, rounds))
        yield FleetSizes(tuple(points), rounds)


def _played(devices: int, asked: int, rounds: int) -> Point:
    """Play a run under observation. Raises BenchmarkError if it fails or takes too long."""
    chosen = [f"fleet.devices={devices}", f"fleet.per_round={asked}", f"rounds={rounds}", *SETTINGS]
    settings = [f"--set={setting}" for setting in chosen]
    with tempfile.TemporaryDirectory(prefix="fedemu-bench-") as folder:
        directory, log = Path(folder) / "run", Path(folder) / "log"
        began = time.monotonic()
        with log.open("wb") as terminal:
            run = subprocess.Popen(
                [*interpreter(), "-m", "fedemu.ops.cli", "run", "digits", "--out", str(directory), *settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=terminal,
            )
        watch = _Watch(run.pid, directory, rounds)
        try:
            while run.poll() is None and time.monotonic() < began + _RUN_SECONDS:
                watch.look(time.monotonic() - began)
                time.sleep(_POLL_SECONDS)
            if run.poll() != 0:
                how = "did not end in time" if run.poll() is None else f"ended with exit {run.returncode}"
                said = " ".join(log.read_text(errors="replace").split())[-500:]
                raise BenchmarkError(f"fedemu run with {devices:,} devices {how}: {said}")
        finally:
            end(run)
        return watch.point(devices, asked)


class _Watch:
    """Looks at the processes of a run again and again, because those that have ended tell nothing."""

    def __init__(self, pid: int, directory: Path, rounds: int) -> None:
        self._run = psutil.Process(pid)
        self._directory = directory
        self._rounds = rounds
        self._first = 0.0
        self._cpu: dict[int, dict[bool, float]] = {}
        """CPU seconds so far, of the coordinator (True) and of all others, by the number of rounds that are over."""
        self._memory = {_COORDINATOR: 0, _SUPERVISOR: 0}
        self._packs = 0

    def look(self, elapsed: float) -> None:
        """Take in how the run stands ``elapsed`` seconds after its beginning."""
        over = finished_rounds(self._directory)
        self._first = self._first or (elapsed if over else 0.0)
        processes = self._named()
        for name, process in processes:
            if name in self._memory:
                with suppress(OSError):
                    self._memory[name] = max(self._memory[name], _peak(process.pid))
        self._packs = max(self._packs, sum(name == "fedemu-device" for name, _ in processes))
        if 0 < over < self._rounds and over not in self._cpu:
            used = {True: 0.0, False: 0.0}
            for name, process in processes:
                with suppress(psutil.Error):
                    used[name == _COORDINATOR] += cpu_seconds(process)
            self._cpu[over] = used

    def point(self, devices: int, asked: int) -> Point:
        """What was seen of a run that has ended."""
        rows = read_rows(self._directory)
        walls = [row.wall_time or 0.0 for row in rows]
        since, until = min(self._cpu, default=0), max(self._cpu, default=0)
        used: dict[bool, float | None] = {True: None, False: None}
        if since < until:
            used = {who: (self._cpu[until][who] - self._cpu[since][who]) / (until - since) for who in (True, False)}
        newest = max((self._directory / "checkpoint").glob("record-*.json"), key=lambda path: path.stat().st_mtime)
        state = newest.with_name(newest.name.replace("record-", "state-").replace(".json", ""))
        files: Sequence[Path] = [newest, *newest.parent.glob(f"{state.name}.*")]
        return Point(
            devices=devices,
            asked=asked,
            first=self._first,
            round=(walls[-1] - walls[0]) / (len(walls) - 1),
            coordinator_cpu=used[True],
            others_cpu=used[False],
            coordinator_memory=self._memory[_COORDINATOR],
            supervisor_memory=self._memory[_SUPERVISOR],
            packs=self._packs,
            checkpoint=sum(path.stat().st_size for path in files),
        )

    def _named(self) -> list[tuple[str, psutil.Process]]:
        found = []
        with suppress(psutil.NoSuchProcess):
            for process in self._run.children(recursive=True):
                with suppress(psutil.Error):
                    found.append((process.name(), process))
        return found


def _peak(pid: int) -> int:
    """The largest resident size that a process has had, in bytes. Raises OSError if it is gone."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    peaks = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")]
    return peaks[0] if peaks else 0  # a process that has ended has no memory
