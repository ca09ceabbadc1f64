"""Every benchmark at a tiny size: it comes to its end and reports what it promises."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedemu.ops.bench.aggregation import aggregation
from fedemu.ops.bench.fleet import sides
from fedemu.ops.bench.fleet.sides import BareFleet, OurFleet
from fedemu.ops.bench.measuring.measure import Effort, Figure, Sample
from fedemu.ops.bench.measuring.processes import memory_of
from fedemu.ops.bench.measuring.worker import BenchmarkError
from fedemu.ops.bench.system import run, system
from fedemu.ops.bench.system.sides import plain as plain_system
from fedemu.ops.bench.training.sides import ours, plain
from fedemu.ops.bench.wire import wire
from fedemu.ops.bench.wire.sides import CASES

TINY = Effort(pairs=2, scale=0.001, seconds=5.0)


class Here:
    """A worker within this process, which has imported torch already."""

    def __init__(self, factory: str, arguments: dict[str, Any]) -> None:
        module, _, name = factory.partition(":")
        self.measure: Callable[[], Sample] = getattr(import_module(module), name)(**arguments)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ready(self) -> Here:
        return self


def measured(figure: Figure) -> bool:
    """Whether both sides did something."""
    assert figure.floor is not None
    assert figure.ratio is not None
    return figure.ours.least > 0 and figure.floor.least > 0 and figure.ratio.least > 0


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("case", ["scheduled", "blob"])
def test_the_wire_is_measured_in_both_directions(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(wire, "CASES", {case: replace(CASES[case], count=CASES[case].window)})
    (figure,) = wire.figures(TINY, lambda line: None)
    assert measured(figure)
    assert figure.unit == ("MB/s" if case == "blob" else "messages/s")
    assert (figure.reach, figure.cpu_ratio is not None) == (0.5, True)


def test_aggregation_is_measured_against_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregation, "Worker", Here)
    monkeypatch.setattr(aggregation, "CASES", (aggregation.Case("40 kB", 10_000, 1, 0.3),))
    told: list[str] = []
    (figure,) = aggregation.figures(TINY, told.append)
    assert measured(figure)
    assert (figure.name, figure.reach) == ("30 replies of 40 kB, weighted mean", 0.3)
    assert told == ["aggregation: 30 replies of 40 kB, weighted mean"]


@pytest.mark.parametrize(("workload", "size", "updates"), [("digits", 1, 30), ("cifar", 2, 2)])
def test_both_sides_of_training_make_the_same_number_of_updates(workload: str, size: int, updates: int) -> None:
    for side in (ours, plain):
        halves = [side(workload, size, part, 2)() for part in range(2)]
        assert sum(half.work for half in halves) == updates
        assert all(half.wall > 0 for half in halves)


def test_a_fleet_of_ours_and_a_bare_one_attach_and_answer(
    tmp_path_factory: pytest.TempPathFactory, forked: Callable[[ModuleType], None]
) -> None:
    forked(sides)
    folder = tmp_path_factory.mktemp("bench") / "fleet"
    with OurFleet(folder, 3) as fleet, BareFleet(3) as bare:
        for each in (fleet.attach(), bare.attach()):
            assert len(each.pids) == 3
            assert 0 < each.attach_seconds < 60
            assert all(0.1 < megabytes < 50 for megabytes in memory_of(each.pids))
            each.sweep()
    assert memory_of([*fleet.pids, *bare.pids]) == []


def test_a_machine_that_ends_before_its_devices_attach_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "interpreter", lambda: ["sh", "-c", "echo no room; exit 7"])
    with (
        OurFleet(tmp_path / "fleet", 3) as fleet,
        pytest.raises(BenchmarkError, match="ended with code 7 before all attached: no room"),
    ):
        fleet.attach()


def test_the_plain_loop_makes_every_update_of_every_cohort() -> None:
    assert plain_system("digits", [[0, 1, 2], [2, 3]], [])().work == 5
    cnn = system.CNN
    assert plain_system(cnn.preset, [[0]], [f"fleet.devices={cnn.devices}", *cnn.overrides])().work == 1


@pytest.mark.timeout(240)
def test_the_whole_system_is_measured_against_the_very_updates_that_it_accepts(
    monkeypatch: pytest.MonkeyPatch, forked: Callable[[ModuleType], None]
) -> None:
    for module in (system, run):
        forked(module)
    monkeypatch.setattr(system, "Worker", Here)
    # 40 rounds at this scale: if there are few, a busy machine may look at the run only when all of them are over.
    work = replace(system.DIGITS, last=40_000, arrangements=(system.Arrangement(3, "shared", 3.0),))
    monkeypatch.setattr(system, "WORKS", [work])
    rate, *costs = system.figures(TINY, lambda line: None)
    assert measured(rate)
    assert rate.reach == 3.0
    assert rate.name.rpartition(", rounds")[0] == "digits, 4 processes, shared connection"
    kinds = [figure.name.rpartition(": ")[2] for figure in costs]
    assert kinds == ["coordinator", "supervisor", "device processes", "trainers"]


def test_a_run_that_is_over_at_the_first_look_has_no_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play = """
import pathlib, sys
directory = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
directory.mkdir()
(directory / "summary.json").write_text('{"model_digest": ""}')
rows = "".join(f'{{"round": {number + 1}, "accepted": 3}}\\n' for number in range(8))
(directory / "metrics.jsonl").write_text(rows)
"""
    monkeypatch.setattr(run, "interpreter", lambda: (sys.executable, "-c", play))
    with pytest.raises(BenchmarkError, match=r"^the rounds of fedemu run were over before they could be measured$"):
        run.run_observed("digits", tmp_path / "run", [], first=5, last=8)
