"""The fleet: how fast it attaches, how fast all its devices answer a message, and how much memory a device takes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fedemu.ops.bench.fleet.sides import BareFleet, OurFleet
from fedemu.ops.bench.measuring import processes
from fedemu.ops.bench.measuring.measure import Effort, Figure, Tell, cost
from fedemu.ops.running.launch import free_address
from fedemu.ops.stress.fleet import LiveFleet

ATTACH_SECONDS_FOR_300 = 2.0
ATTACH_SECONDS_FOR_1000 = 10.0
MEGABYTES_PER_DEVICE = 8.0
_SWEEPS = 20
_ROUND = 5
"""Memory is measured after this round of a real run."""


def figures(effort: Effort, tell: Tell) -> Iterator[Figure]:
    """Seconds to attach, seconds for a message to all devices, and memory per device."""
    for devices in (300, 1000) if effort.large else (effort.count(300),):
        with tempfile.TemporaryDirectory(prefix="fedemu-bench-") as folder:
            yield from _membership(Path(folder), devices, effort, tell)
            yield from _memory(Path(folder) / "memory", devices, tell)


def _membership(folder: Path, devices: int, effort: Effort, tell: Tell) -> Iterator[Figure]:
    """Seconds to attach, and for a message to every device and its answer.

    The fleets attach one after the other. Then both live at once, and exchange messages in turns.
    """
    ours_attached: list[float] = []
    bare_attached: list[float] = []
    ours_swept: list[float] = []
    bare_swept: list[float] = []
    for number in range(2 if effort.pairs > 2 else 1):
        tell(f"fleet: {devices} devices attach")
        with OurFleet(folder / f"attach-{number}", devices) as ours, BareFleet(devices) as bare:
            ours_attached.append(ours.attach().attach_seconds)
            ours.rest()
            bare_attached.append(bare.attach().attach_seconds)
            tell(f"fleet: a message to {devices} devices, and back")
            for _ in range(effort.count(_SWEEPS)):
                ours_swept.append(_seconds(ours.sweep))
                bare_swept.append(_seconds(bare.sweep))
    limit = ATTACH_SECONDS_FOR_300 if devices <= 300 else ATTACH_SECONDS_FOR_1000
    yield cost("fleet", f"{devices} devices attach", "s", ours_attached, bare_attached, limit)
    yield cost("fleet", f"a message to {devices} devices, and back", "s", ours_swept, bare_swept)


def _memory(folder: Path, devices: int, tell: Tell) -> Iterator[Figure]:
    """The private memory of the device processes of a real run, and of bare children."""
    tell(f"fleet: private memory of {devices} device processes in a run")
    overrides = [f"fleet.devices={devices}", "rounds=100000", f"fleet.per_round={max(1, devices // 10)}"]
    with BareFleet(devices) as bare:
        bare.attach()
        floor = processes.memory_of(bare.pids)
    with LiveFleet(folder, address=free_address(), overrides=overrides) as fleet:
        fleet.start_devices(devices)
        fleet.start_coordinator()
        fleet.wait_for_round(_ROUND)
        ours = processes.memory_of(process.pid for process in fleet.processes("device"))
    yield cost("fleet", f"private memory per device, {devices} in a run", "MB", ours, floor, MEGABYTES_PER_DEVICE)


def _seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
