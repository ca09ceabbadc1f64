"""How many runs a machine bears at a time, by its cores, its memory and its GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.sweeps import machine
from fedemu.ops.sweeps.machine import default_at_once

GIB = 2**30


def experiment(threads: int) -> Experiment:
    return load_experiment("digits-small", [f"server.threads={threads}"], {})[0]


@pytest.fixture
def this(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with 8 cores, memory for many runs, and no GPU. Tests change it."""
    made = SimpleNamespace(memory=64 * GIB, cores=8, gpus=[])
    monkeypatch.setattr(machine, "this_machine", lambda: made)
    monkeypatch.setattr(machine, "cores", lambda: made.cores)
    monkeypatch.setattr(machine, "usable_gpus", lambda kind: [] if kind == "cpu" else made.gpus)
    return made


@pytest.mark.parametrize(("threads", "runs"), [([], 8), ([1], 8), ([1, 3], 2), ([9], 1)])
def test_runs_share_the_cores_by_the_threads_that_they_compute_with(
    this: SimpleNamespace, threads: list[int], runs: int
) -> None:
    assert default_at_once(map(experiment, threads), "auto") == (runs, "8 cores, 64.0 GiB free")


def test_runs_share_the_memory_and_one_is_always_tried(this: SimpleNamespace) -> None:
    for memory, runs in ((3 * GIB, 3), (GIB // 2, 1)):
        this.memory = memory
        assert default_at_once([], "cpu") == (runs, f"8 cores, {memory / GIB:.1f} GiB free")
    this.memory = None
    assert default_at_once([], "cpu") == (8, "8 cores")


def test_a_gpu_has_one_run_unless_the_runs_compute_on_the_processor(this: SimpleNamespace) -> None:
    this.gpus = ["0", "1"]
    assert [default_at_once([], kind) for kind in ("auto", "cuda")] == [(2, "2 GPUs")] * 2
    assert default_at_once([], "cpu")[0] == 8
