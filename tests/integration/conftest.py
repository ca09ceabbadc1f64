"""Real fleets on the loopback interface for the tests of whole runs. None may leave a process behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import pytest

from fedemu.coordinator.observer import RunObserver
from fedemu.coordinator.record.summary import Summary
from fedemu.device.compute.trainer import Trainer
from fedemu.ops.assembly import trainer, trial
from fedemu.ops.assembly.computing import Computing
from fedemu.ops.assembly.coordinator import assemble
from fedemu.ops.assembly.parts import Parts
from fedemu.ops.assembly.trainer import open_trainer
from fedemu.ops.assembly.trial import try_out
from fedemu.ops.experiment import Runtime
from fedemu.ops.experiment.sources import load_experiment, write_frozen
from fedemu.ops.running.embedded import serve_embedded
from fedemu.ops.running.launch import free_address
from fedemu.ops.stress.fleet import LiveFleet
from fedemu.ops.stress.scenarios import SHORT
from fedemu.ops.stress.warm import WarmStart
from fedemu.protocol.transport.memory import MemoryNetwork

LONGEST_SECONDS = 900
"""A test of whole runs waits for other processes. On a busy machine it may take so long before it counts as stuck."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONGEST_SECONDS))


@pytest.fixture
def new_fleet(tmp_path: Path, warm: WarmStart) -> Iterator[Callable[..., LiveFleet]]:
    """Makes fleets that are closed at the end, and fails if one of their processes survives."""
    fleets: list[LiveFleet] = []

    def make(*overrides: str, experiment: str = "digits-small") -> LiveFleet:
        directory = tmp_path / f"fleet{len(fleets)}"
        settings = overrides or SHORT.settings
        fleet = LiveFleet(
            directory, address=free_address(), overrides=settings, experiment=experiment, start=warm.start
        )
        fleets.append(fleet)
        return fleet

    yield make
    for fleet in fleets:
        fleet.close()
    assert [complaint for fleet in fleets for complaint in fleet.leftovers()] == []


@pytest.fixture(scope="session")
def in_one_process() -> Callable[..., Summary]:
    """Plays a run in this process, with no other process to kill: ``(directory, *overrides, ...) -> Summary``.

    If the directory holds a run already, that run is continued. The first step of an experiment is tried out once. Two
    runs of one experiment after each other share what their trainers have recorded, of which no result depends.
    """
    tried: dict[tuple[bytes, str], Computing] = {}
    newest = lru_cache(maxsize=1)(lambda folder, experiment, device_type: open_trainer(experiment, device_type))

    def open_once(experiment: bytes, device_type: str) -> Trainer:
        return newest(Path.cwd(), experiment, device_type)  # the working folder may hold the experiment's own code

    def try_once(parts: Parts, began: str = "") -> Computing:
        trial = parts.experiment.to_bytes(), began
        if trial not in tried:
            tried[trial] = try_out(parts, began)
        return tried[trial]

    def play(
        directory: Path, *overrides: str, experiment: str = "digits-small", observers: Sequence[RunObserver] = ()
    ) -> Summary:
        loaded, _ = load_experiment(experiment, list(overrides), {})
        directory.mkdir(exist_ok=True)
        write_frozen(loaded, directory)
        network = MemoryNetwork()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(trial, "try_out", try_once)
                patch.setattr(trainer, "open_trainer", open_once)
                plan = assemble(directory, loaded, network, "inproc://coordinator", observers)
                return asyncio.run(serve_embedded(plan, Runtime(transport="memory")))
        finally:
            network.close()

    return play


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, in_one_process: Callable[..., Summary]) -> Summary:
    """The summary of the scenarios' experiment when it is played in one process, where nothing can disturb it."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    return in_one_process(directory, *SHORT.settings, experiment=SHORT.experiment)
