"""One point of a curve: a run in one process, of which some rounds are measured."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fedemu.coordinator.observer import Observers
from fedemu.coordinator.record.row import Row
from fedemu.ops.assembly.coordinator import assemble
from fedemu.ops.bench.measuring.measure import Sample
from fedemu.ops.experiment import Runtime
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.running.embedded import serve_embedded
from fedemu.ops.running.folder import claim
from fedemu.protocol.host.garbage import settle
from fedemu.protocol.host.kernel import keep_one_heap
from fedemu.protocol.transport.memory import MemoryNetwork

SAMPLES = 150_000
FEATURES = 8
COMMON = (
    "data.dataset=fedemu.ops.bench.growth.point:samples",
    "data.partition={kind='iid'}",
    "local.steps=5",
    "local.batch_size=5",
    "evaluate.every=1000000",
    "fleet.over_selection=1",
    "fleet.start_timeout=86400",
)
"""Settings of all points. A device takes the same steps however many samples it holds."""


def samples() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32 | np.int64]]]:
    """Random vectors of two classes. ``data.dataset`` names this function."""
    random = np.random.default_rng(0)
    y = np.arange(SAMPLES + 100) % 2
    x = (random.standard_normal((len(y), FEATURES)) + y[:, None]).astype(np.float32)
    return {"x": x[:SAMPLES], "y": y[:SAMPLES], "test_x": x[SAMPLES:], "test_y": y[SAMPLES:]}


class _Stopwatch(Observers):
    """Notes the time and the CPU time of this process at the end of each round."""

    def __init__(self) -> None:
        super().__init__()
        self.stamps: list[tuple[float, float]] = []

    def round_finished(self, row: Row) -> None:
        self.stamps.append((time.perf_counter(), time.process_time()))


def rounds(overrides: Sequence[str], warm: int, measured: int) -> Callable[[], Sample]:
    """A measurement of ``measured`` rounds after ``warm`` ones, whose work is these rounds."""
    keep_one_heap()  # as every command does when it begins
    settings = [*COMMON, *overrides, f"rounds={warm + measured}"]
    experiment, _ = load_experiment("digits", settings, {})
    settle()  # as a command does when it has imported all that it needs

    def measure() -> Sample:
        watch = _Stopwatch()
        asyncio.run(_play(watch))
        (since, used), (until, after) = watch.stamps[warm - 1], watch.stamps[warm + measured - 1]
        return Sample(measured, until - since, after - used)

    async def _play(watch: _Stopwatch) -> None:
        network = MemoryNetwork()
        with tempfile.TemporaryDirectory(prefix="fedemu-bench-") as folder:
            directory = claim(experiment, Path(folder) / "run")
            try:
                await serve_embedded(assemble(directory, experiment, network, "memory", [watch]), Runtime())
            finally:
                network.close()

    return measure
