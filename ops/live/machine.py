"""The processes of a run on this machine: which there are, which device is in which, and how busy they are."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from fedemu.ops.live.forms import is_crew
from fedemu.ops.live.found import Supervisor, supervisors_of
from fedemu.ops.watching.feed import MACHINE, read_feed

SEARCH_SECONDS: Final = 3.0
"""How often the supervisors are looked for."""
SAMPLE_SECONDS: Final = 1.0
KEPT_SAMPLES: Final = 600
STOP_SECONDS: Final = 5.0
"""How long the kernel may take to stop a process."""


@dataclass
class Crew:
    """The processes of one supervisor, as it told them last."""

    supervisor: psutil.Process
    trainers: dict[int, int] = field(default_factory=dict)
    devices: dict[int, int] = field(default_factory=dict)
    """The process of each device."""
    waiting: int = 0
    """The jobs that wait for a trainer."""
    busy: list[int] = field(default_factory=list)


class Machine:
    """The processes of the run in ``directory``. None of another user or another run is among them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._coordinator: int | None = None
        self._searched = -SEARCH_SECONDS
        self._supervisors: list[Supervisor] = []
        self.crews: list[Crew] = []
        self.frozen: dict[int, tuple[psutil.Process, float]] = {}
        """The processes that the page has stopped, by their ids, and when it did so, by the monotonic clock."""
        self._clocks: dict[tuple[str, int], tuple[float, psutil.Process, float]] = {}
        self._samples: deque[dict[str, Any]] = deque(maxlen=KEPT_SAMPLES)
        self._sampled = 0.0

    @property
    def folders(self) -> list[Path]:
        """The folders in which supervisors tell what they do."""
        return [supervisor.folder for supervisor in self._supervisors]

    def look(self, coordinator: int | None) -> None:
        """Find the supervisors again now and then, and read what they tell.

        None can be found if ``coordinator`` is no process here (None or ``UNNAMED``).
        """
        now = time.monotonic()
        coordinator = coordinator or None
        if coordinator is None:
            self._supervisors = []
        elif coordinator != self._coordinator or now - self._searched >= SEARCH_SECONDS:
            self._supervisors = supervisors_of(coordinator, self._directory)
            self._searched = now
        self._coordinator = coordinator
        self.crews = [_crew(found) for found in self._supervisors if found.process.is_running()]

    def sample(self) -> dict[str, Any]:
        """How busy the processes were since the last sample. Empty if it is too early for another, or none is there."""
        now = time.monotonic()
        if now - self._sampled < SAMPLE_SECONDS or self._coordinator is None:
            return {}
        self._sampled = now
        used = {}
        for name, pid in self._named():
            with suppress(psutil.Error):
                used[name] = self._use(name, pid, now)
        self._clocks = {key: value for key, value in self._clocks.items() if value[2] == now}
        sample = {
            "at": round(time.time(), 1),
            "used": {name: use for name, use in used.items() if use is not None},
            "waiting": sum(crew.waiting for crew in self.crews),
            "busy": sum(len(crew.busy) for crew in self.crews),
            "processes": self.counts(),
        }
        self._samples.append(sample)
        return sample

    def history(self) -> list[dict[str, Any]]:
        """The samples so far."""
        return list(self._samples)

    def counts(self) -> dict[str, int]:
        """The number of processes of each kind."""
        return {
            "coordinator": int(self._coordinator is not None),
            "supervisor": len(self.crews),
            "trainer": sum(len(crew.trainers) for crew in self.crews),
            "device": sum(len(set(crew.devices.values())) for crew in self.crews),
        }

    def process_of(self, device: int) -> int | None:
        """The process of a device, None if it has none on this machine."""
        return next((crew.devices[device] for crew in self.crews if device in crew.devices), None)

    def frozen_devices(self) -> set[int]:
        """The devices in processes that the page has stopped and that still are stopped."""
        now = time.monotonic()
        for pid, (process, since) in list(self.frozen.items()):
            with suppress(psutil.Error):
                stopped = process.status() == psutil.STATUS_STOPPED or now - since < STOP_SECONDS
                if process.is_running() and stopped:
                    continue
            self.frozen.pop(pid, None)
        if not self.frozen:
            return set()
        return {device for crew in self.crews for device, pid in crew.devices.items() if pid in self.frozen}

    def _named(self) -> list[tuple[str, int]]:
        """The processes whose use is shown, each with its name."""
        named = [] if self._coordinator is None else [("coordinator", self._coordinator)]
        several = len(self.crews) > 1
        for place, crew in enumerate(self.crews, 1):
            supervisor = f"supervisor {place}" if several else "supervisor"
            named.append((supervisor, crew.supervisor.pid))
            named += [
                (f"trainer {number + 1}{f' of {supervisor}' if several else ''}", pid)
                for number, pid in crew.trainers.items()
            ]
        return named

    def _use(self, name: str, pid: int, now: float) -> list[float] | None:
        """The share of a core that a process has used since the last sample, and its memory in bytes."""
        before = self._clocks.get((name, pid))
        process = psutil.Process(pid) if before is None else before[1]
        times = process.cpu_times()
        clock = times.user + times.system
        self._clocks[name, pid] = (clock, process, now)
        if before is None:
            return None
        return [round((clock - before[0]) / max(now - before[2], 1e-3), 3), process.memory_info().rss]


def _crew(found: Supervisor) -> Crew:
    feed = read_feed(found.folder / f"{MACHINE}{found.process.pid}")
    crew = Crew(found.process)
    if feed is not None and feed[0].get("pid") == found.process.pid and is_crew(feed[0]):
        told = feed[0]
        crew.trainers = {int(number): pid for number, pid in told.get("trainers", {}).items()}
        crew.devices = {device: pid for pid, devices in told.get("devices", ()) for device in devices}
        crew.waiting, crew.busy = told.get("waiting", 0), told.get("busy", [])
    return crew
