"""Plays a scenario with a real fleet, and compares what happened with a run that nothing disturbs."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fedemu.coordinator.record.row import Row
from fedemu.ops.running.launch import free_address
from fedemu.ops.stress.fleet import FleetTimeout, LiveFleet, Start, start_interpreter
from fedemu.ops.stress.invariants import Usage, ended_as_undisturbed, nothing_counted_twice
from fedemu.ops.stress.scenarios import Scale, Scenario
from fedemu.ops.stress.undisturbed import Undisturbed, undisturbed

SAMPLE_SECONDS = 0.25
SETTLED_ROUNDS = 3
"""The rounds between the first sight of a process and its first sample. By then the process has loaded everything."""


@dataclass(frozen=True)
class ScenarioResult:
    """The result of a scenario. It passed if there are no complaints. ``facts`` are sums over the rows."""

    name: str
    what: str
    seconds: float
    rounds: int
    complaints: tuple[str, ...]
    digest: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether there are no complaints."""
        return not self.complaints


class _Watch(threading.Thread):
    """Samples memory and descriptors of the fleet's long-lived processes until it is stopped."""

    def __init__(self, fleet: LiveFleet) -> None:
        super().__init__(daemon=True)
        self._fleet = fleet
        self._done = threading.Event()
        self._first_seen: dict[int, int] = {}
        self.usage: dict[int, Usage] = {}

    def run(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            rounds = self._fleet.rounds()
            for name, processes in (
                ("coordinator", [self._fleet.coordinator]),
                ("supervisor", self._fleet.supervisors),
                ("trainer", self._fleet.processes("trainer")),
            ):
                for process in processes:
                    if process is None:
                        continue
                    if rounds >= self._first_seen.setdefault(process.pid, rounds) + SETTLED_ROUNDS:
                        self._sample(name, process)

    def _sample(self, name: str, process: psutil.Process) -> None:
        try:
            resident, descriptors = process.memory_info().rss, process.num_fds()
        except psutil.Error:
            return
        usage = self.usage.setdefault(process.pid, Usage(f"{name} {process.pid}"))
        usage.resident.append(resident)
        usage.descriptors.append(descriptors)

    def stop(self) -> None:
        self._done.set()
        self.join(5)


def play(
    scenario: Scenario,
    scale: Scale,
    directory: Path,
    *,
    seed: int = 1,
    expected: Undisturbed | None = None,
    options: Sequence[str] = (),
    seconds: float = 300.0,
    start: Start = start_interpreter,
) -> ScenarioResult:
    """Run one scenario from start to end in ``directory``, and compare its model and rows with the ``expected`` ones.

    Without ``expected`` a run of one process is played first, which tells them. A wait that takes longer than
    ``seconds`` ends with a complaint. ``start`` starts the processes.
    """
    began = time.monotonic()
    complaints: list[str] = []
    rows: tuple[Row, ...] = ()
    summary: dict[str, Any] = {}
    per_round = 0
    settings = scenario.settings(scale)
    with LiveFleet(
        directory, address=free_address(), overrides=settings, experiment=scale.experiment, start=start
    ) as fleet:
        watch = _Watch(fleet)
        watch.start()
        try:
            if expected is None:
                alone = scenario.settings_alone(scale)
                expected = undisturbed(scale.experiment, alone, directory / "undisturbed", start)
            fleet.start_devices(scale.devices, *options)
            fleet.start_coordinator()
            if scenario.disturb is not None:
                scenario.disturb(fleet, random.Random(seed))
            code = fleet.wait_for_end(seconds)
            if code != 0:
                complaints.append(f"the coordinator ended with exit {code}: {fleet.tail(4)}")
            for supervisor in fleet.supervisors:
                code = supervisor.wait(30)
                if code != 0:
                    complaints.append(f"a supervisor ended with exit {code}: {fleet.tail(4)}")
            rows, summary = fleet.rows(), fleet.summary() if not complaints else {}
            per_round = fleet.setting("fleet", "per_round")
        except (FleetTimeout, psutil.TimeoutExpired, psutil.NoSuchProcess) as error:
            complaints.append(str(error))
        finally:
            watch.stop()
    complaints += fleet.leftovers()
    for usage in watch.usage.values():
        complaints += usage.grows()
    if summary and expected is not None:
        complaints += ended_as_undisturbed(rows, summary, expected.digest, expected.rows)
        complaints += nothing_counted_twice(rows, per_round)
        complaints += scenario.shows(rows) if scenario.shows is not None else []
    return ScenarioResult(
        name=scenario.name,
        what=scenario.what,
        seconds=time.monotonic() - began,
        rounds=len(rows),
        complaints=tuple(complaints),
        digest=str(summary.get("model_digest", "")),
        facts={name: sum(row.outcomes[name] for row in rows) for name in ("accepted", "dropped", "late", "rejected")},
    )
