"""Class-incremental methods that keep something, on fleets under churn: the final model is that of an undisturbed run.

The coordinator ends when a task begins; devices and a trainer are killed.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tasks_fleet import CHURN, TASKS

from fedemu.coordinator.observer import Observers
from fedemu.coordinator.record.row import COLUMNS, Row, read_rows
from fedemu.coordinator.record.summary import Summary
from fedemu.ops.stress.fleet import LiveFleet
from fedemu.ops.stress.invariants import clock_goes_forward, is_measured, outcomes_add_up

ROUNDS = 4
THIRD_TASK = 3
"""The round of the third task. By then, methods have remembered earlier tasks twice."""
SHORTER = (f"rounds={ROUNDS}", "stream.rounds_per_task=1", "local.batch_size=20")
"""Four tasks of one round each."""
GENERATOR = "algorithm.options={iterations=5, generator_batch=16, synthetic_batch=4}"
SYNTHESIS = (
    "algorithm.options={synthesis_rounds=2, warm_up=1, synthesis_steps=2, generator_batch=16, noise=8, "
    "student_steps=2, student_batch=16, synthetic_batch=4}"
)
METHODS = {
    "mfcl with samples": ("algorithm.name='mfcl'", GENERATOR, "algorithm.options.samples=4"),
    "lander": ("algorithm.name='lander'", SYNTHESIS, "algorithm.options.anchor_width=8"),
    "fedlwf_2t with noted logits": (
        "algorithm.name='fedlwf_2t'",
        "replay={strategy='naive_uniform', capacity=6}",
        "algorithm.terms={der={}}",
    ),
    "fedcil": (
        "algorithm.name='fedcil'",
        "algorithm.options={server_iterations=5, server_samples=8}",
        "local.executor='serial'",
        "local.batch_size=30",
    ),
    "local terms": ("algorithm.name='scaffold'", "algorithm.terms={ewc={samples=20}, lwf={}}"),
    "oracle": ("stream.cumulative=true",),
    "replay": ("replay={strategy='coordinated', capacity=6, iterations=1, restarts=0}",),
    "balanced replay": ("replay={strategy='fedcbdr', budget=3, capacity=6}", "algorithm.loss='task_temperature'"),
}
Play = Callable[..., Summary]


@dataclass(frozen=True)
class Played:
    """A run in one process, and what was on its disk as the third task began."""

    directory: Path
    summary: Summary
    begun: Path

    @property
    def rows(self) -> list[Row]:
        """The rows, without what was measured on the machine."""
        measured: dict[str, Any] = dict.fromkeys(filter(is_measured, COLUMNS))
        return [replace(row, **measured) for row in read_rows(self.directory)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, in_one_process: Play) -> Callable[[str], Played]:
    played: dict[str, Played] = {}

    def run(name: str) -> Played:
        if name not in played:
            folder = tmp_path_factory.mktemp("undisturbed")
            keeps = _Keeps(folder / "run", THIRD_TASK, folder / "begun")
            summary = in_one_process(folder / "run", *settings(name), experiment=TASKS.experiment, observers=[keeps])
            played[name] = Played(folder / "run", summary, folder / "begun")
        return played[name]

    return run


def settings(name: str) -> tuple[str, ...]:
    return (*TASKS.settings, *CHURN, *SHORTER, *METHODS[name])


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_coordinator_that_ends_as_a_task_begins_goes_on_to_the_same_model(
    name: str, in_one_process: Play, undisturbed: Callable[[str], Played]
) -> None:
    """It is gone after the devices replied and stored their own states, before the round is durable."""
    expected = undisturbed(name)
    run = expected.begun
    assert len(read_rows(run)) == THIRD_TASK - 1
    resumed = Played(run, in_one_process(run, *settings(name), experiment=TASKS.experiment), run)
    rows = resumed.rows
    assert (resumed.summary.model_digest, resumed.summary.perturbed) == (expected.summary.model_digest, False)
    assert rows == expected.rows
    assert [row.task for row in rows] == [0, 1, 2, 3]
    assert outcomes_add_up(rows) == clock_goes_forward(rows) == []
    assert len({row.online for row in rows}) > 1, "devices come and go"
    assert sum(row.outcomes["dropped"] for row in rows) > 0, "some drop out"


def test_what_devices_keep_of_earlier_tasks_is_there_still_when_they_and_the_trainer_are_killed(
    new_fleet: Callable[..., LiveFleet], undisturbed: Callable[[str], Played]
) -> None:
    """They keep models of earlier tasks beside a buffer of samples, for each of which a program has noted logits."""
    name = "fedlwf_2t with noted logits"
    fleet = new_fleet(*settings(name), experiment=TASKS.experiment)
    fleet.start_coordinator()
    fleet.start_devices(TASKS.devices, "--trainers", "1")
    fleet.wait_for_round(THIRD_TASK - 1)
    for process in [*fleet.processes("device")[::3], *fleet.processes("trainer")]:
        fleet.signal(process, signal.SIGKILL)
    assert fleet.wait_for_end() == 0, fleet.tail()
    assert (len(fleet.rows()), fleet.summary()["perturbed"]) == (ROUNDS, False)
    assert outcomes_add_up(fleet.rows()) == []
    assert fleet.summary()["model_digest"] == undisturbed(name).summary.model_digest


class _Keeps(Observers):
    """An observer that copies a run just before a round is made durable, as a coordinator leaves it that dies then."""

    def __init__(self, run: Path, round: int, copy: Path) -> None:
        super().__init__()
        self._run, self._round, self._copy = run, round, copy

    def event(self, name: str, **fields: Any) -> None:
        if name == "checkpoint" and fields["round"] == self._round:
            shutil.copytree(self._run, self._copy)
