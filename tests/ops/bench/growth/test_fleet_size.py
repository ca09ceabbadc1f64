"""Fleets that sleep, by size: which fleets are measured, what is seen of a real run, and the table."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
from rich.console import Console

from fedemu.ops.bench.growth import fleet_size
from fedemu.ops.bench.growth.fleet_size import FleetSizes, Point, measure
from fedemu.ops.bench.measuring.measure import QUICK, Effort
from fedemu.ops.bench.measuring.worker import BenchmarkError

SEEN = Point(1_000, 100, 12.0, 0.5, 0.25, None, 300_000_000, 64_000_000, 2, 7_000)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[Effort, int], list[tuple[int, int, int]]]:
    """Which runs (devices, asked, rounds) would be played for an effort and a largest size."""

    def measured(effort: Effort, largest: int) -> list[tuple[int, int, int]]:
        runs = []

        def play(devices: int, asked: int, rounds: int) -> Point:
            runs.append((devices, asked, rounds))
            return replace(SEEN, devices=devices, asked=asked)

        found = [[point.devices for point in made.points] for made in measure(effort, largest, lambda line: None, play)]
        devices = [devices for devices, _, _ in runs]
        assert found == [devices[:count] for count in range(1, len(devices) + 1)]
        return runs

    return measured


def test_sizes_go_up_to_the_largest_that_was_wished(
    played: Callable[[Effort, int], list[tuple[int, int, int]]],
) -> None:
    assert played(Effort(), 1_000_000) == [
        (1_000, 100, 10),
        (10_000, 1_000, 10),
        (100_000, 1_000, 10),
        (1_000_000, 1_000, 10),
    ]
    assert played(Effort(), 30_000) == [(1_000, 100, 10), (10_000, 1_000, 10), (30_000, 1_000, 10)]
    assert played(QUICK, 1_000_000) == [(1_000, 100, 3), (10_000, 1_000, 3)]
    assert played(QUICK, 1_000) == [(1_000, 100, 3)]


def test_the_table_leaves_out_what_could_not_be_read() -> None:
    sizes = FleetSizes((SEEN,), 10)
    shown = io.StringIO()
    Console(file=shown, width=150).print(sizes)
    [line] = [line for line in shown.getvalue().splitlines() if line.split()[:1] == ["1,000"]]
    assert line.split() == ["1,000", "100", "12", "0.5", "0.25", "300", "MB", "64.0", "MB", "2", "7.0", "kB"]
    assert sizes.table()["points"][0]["others_cpu"] is None
    assert sizes.table()["rounds"] == 10


def test_a_real_run_is_watched_from_the_command_to_its_last_checkpoint(forked: Callable[[ModuleType], None]) -> None:
    forked(fleet_size)
    point = fleet_size._played(200, 20, 4)
    assert (point.devices, point.asked) == (200, 20)
    assert 0 < point.round < point.first
    assert point.coordinator_memory > 50e6, "it has imported torch"
    assert 10e6 < point.supervisor_memory < point.coordinator_memory
    assert 1 <= point.packs <= 4, "a pack has fifty devices, and twenty of a round may wake while twenty fall asleep"
    assert point.checkpoint > 1_000


def test_a_run_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, forked: Callable[[ModuleType], None]) -> None:
    forked(fleet_size)
    monkeypatch.setattr(fleet_size, "SETTINGS", ("fleet.nonsense=1",))
    with pytest.raises(BenchmarkError, match=r"200 devices ended with exit 2: .*fleet\.nonsense"):
        fleet_size._played(200, 20, 4)
