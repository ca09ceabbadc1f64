"""The generator is trained once per task, and the final model is that of an undisturbed run.

The coordinator, or the process that trains its generator, is killed or interrupted in the middle of the training. The
first round of a task has to be tried again.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tasks_fleet import TASKS

from fedemu.algorithms.incremental.remembering import RememberingFedAvg, RememberingState
from fedemu.algorithms.interface import Ask, Context, Forest, Script, Tree
from fedemu.algorithms.models.growing import SEEN
from fedemu.algorithms.trees import flatten, model_digest
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.record.checkpoint import load_job
from fedemu.coordinator.record.row import read_rows
from fedemu.coordinator.record.summary import Summary
from fedemu.ops.running.launch import free_address
from fedemu.ops.stress.fleet import LiveFleet
from fedemu.ops.stress.play import play
from fedemu.ops.stress.scenarios import scenarios
from fedemu.ops.stress.undisturbed import Undisturbed
from fedemu.ops.stress.warm import Started, WarmStart

Play = Callable[..., Summary]
SCALE = replace(TASKS, rounds=4, disturbances=1)
"""Two tasks of two rounds. The generator is trained once, and the test interrupts that training."""
KILLS = scenarios(SCALE)["training-kills"]
BEGINS, STEPS, CHECKPOINT = 3, 20, 10
"""The first round of the second task, the steps of its generator training, and the steps between two checkpoints."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, in_one_process: Play) -> Undisturbed:
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    in_one_process(directory, *KILLS.settings(SCALE), experiment=SCALE.experiment)
    return Undisturbed.read(directory)


def test_kills_inside_the_training_of_the_generator_leave_the_model_as_it_would_be(
    tmp_path: Path, undisturbed: Undisturbed, warm: WarmStart
) -> None:
    result = play(
        KILLS, SCALE, tmp_path, expected=undisturbed, options=("--trainers", "1"), seconds=300.0, start=warm.start
    )
    assert result.complaints == ()
    log = (tmp_path / "run" / "logs" / "coordinator.log").read_text()
    first, second = _steps_by_coordinator(log)
    assert max(first) < STEPS, "it was killed before the training was over"
    assert log.count("server_job_died") == 1, "and so was the process of the training, which was replaced"
    assert (second[0], second[-1]) == (CHECKPOINT + 1, STEPS), "the next one goes on from the checkpoint"


def test_a_machine_behind_an_edge_leaves_the_model_as_it_would_be(
    undisturbed: Undisturbed, new_fleet: Callable[..., LiveFleet]
) -> None:
    fleet = new_fleet(*KILLS.settings(SCALE), experiment=SCALE.experiment)
    place = free_address()
    fleet.start_coordinator()
    fleet.start_edge(place)
    fleet.start_devices(SCALE.devices, "--trainers", "1", address=place)
    assert fleet.wait_for_end() == 0, fleet.tail()
    assert fleet.summary()["model_digest"] == undisturbed.digest
    assert not fleet.summary()["perturbed"]


def test_ctrl_c_during_the_training_of_the_generator_leaves_a_run_that_goes_on_inside_it(
    tmp_path: Path, undisturbed: Undisturbed, in_one_process: Play, warm: WarmStart
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    arguments = [word for setting in KILLS.settings(SCALE) for word in ("--set", setting)]
    command = ["run", SCALE.experiment, *arguments, "--transport", "memory", "--out", str(run)]
    process = warm.start(command, log, os.environ)
    _wait_for(lambda: load_job(run / "checkpoint", BEGINS, 0) is not None, process)
    process.send_signal(signal.SIGINT)
    code, told = process.wait(300), log.read_text()
    assert code == 4, told
    assert f"fedemu run --transport memory --resume {run}" in told
    kept = load_job(run / "checkpoint", BEGINS, 0)
    assert kept is not None
    assert (kept.step, kept.finished) == (CHECKPOINT, False)
    assert [row.round for row in read_rows(run)] == [1, 2]
    watcher = _Watcher()
    resumed = in_one_process(run, *KILLS.settings(SCALE), experiment=SCALE.experiment, observers=[watcher])
    assert (resumed.model_digest, resumed.perturbed) == (undisturbed.digest, False)
    assert (watcher.steps[0], watcher.steps[-1]) == ((BEGINS, CHECKPOINT + 1), (BEGINS, STEPS))


SHORT_OF_REPLIES = (
    *TASKS.settings,
    "rounds=3",
    "stream={kind='classes', tasks=3, rounds_per_task=1}",
    "faults.crash_rate=0.3",
    "fleet.per_round=5",
    "fleet.over_selection=1.0",
    "fleet.quorum=1.0",
    "fleet.attempts=30",
    "algorithm.name='mfcl'",
    "algorithm.options={iterations=40, generator_batch=16, synthetic_batch=4}",
)
"""Every round is the first round of a task, and most attempts get too few replies."""


def test_a_first_round_of_a_task_that_is_tried_again_trains_no_generator_again(
    tmp_path: Path, in_one_process: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[int, list[Forest]] = defaultdict(list)
    begun: dict[int, Tree] = {}
    original = RememberingFedAvg.round

    def overheard(method: RememberingFedAvg, state: RememberingState, context: Context) -> Script[RememberingState]:
        script, answer = original(method, state, context), None
        begun[context.round] = method.variables(state)
        with closing(script):
            while True:
                try:
                    request = script.send(answer)
                except StopIteration as stop:
                    return stop.value
                if isinstance(request, Ask):
                    asked[context.round].append(request.shared)
                answer = yield request

    monkeypatch.setattr(RememberingFedAvg, "round", overheard)
    watcher = _Watcher()
    in_one_process(tmp_path / "run", *SHORT_OF_REPLIES, experiment=TASKS.experiment, observers=[watcher])
    tries = [row.attempts for row in read_rows(tmp_path / "run")]
    assert min(tries[1:]) > 1, "both rounds that train a generator are tried again"
    assert [watcher.steps.count((round, 1)) for round in (2, 3)] == [1, 1]
    assert Counter(watcher.finished) == {2: tries[1], 3: tries[2]}, "each try has the job's result"
    assert [len(asked[round]) for round in (2, 3)] == tries[1:]
    for round in (2, 3):
        first, *later = (model_digest(flatten(shared)) for shared in asked[round])
        assert set(later) == {first}, "every try sends the same"
        assert model_digest(asked[round][0]["previous"]) == model_digest(begun[round])
        assert int(asked[round][0]["model"][SEEN].sum()) > int(begun[round][SEEN].sum()), "with rows for new classes"


class _Watcher(Observers):
    """An observer that remembers server jobs: (round, step) of each finished step, and the rounds of finished jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, int]] = []
        self.finished: list[int] = []

    def server_job(self, name: str, round: int, step: int, steps: int) -> None:
        if step:
            self.steps.append((round, step))

    def event(self, name: str, **fields: Any) -> None:
        if name == "server_job":
            self.finished.append(fields["round"])


def _steps_by_coordinator(log: str) -> list[list[int]]:
    """The training steps that each coordinator process logged as done, in order."""
    steps: dict[str, list[int]] = {}
    for process, step in re.findall(rf" (\d+) INFO .* round {BEGINS}, server job generator: step (\d+) of", log):
        steps.setdefault(process, []).append(int(step))
    return [[step for step in done if step] for done in steps.values()]


def _wait_for(condition: Callable[[], bool], process: Started) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
