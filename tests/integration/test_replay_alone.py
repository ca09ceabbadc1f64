"""Streams and replay in whole runs: each strategy, both forms of the targets, and arrivals by the clock.

The coordinator also fails in the middle of an exchange, with methods whose devices keep an own state.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_fleet import (
    ARRIVING,
    BUDGET,
    CHURN,
    EXCHANGES,
    STEADY,
    contents,
    newest_versions,
    published_plan,
)

from fedemu.coordinator.observer import Observers
from fedemu.coordinator.record.row import read_rows
from fedemu.coordinator.record.summary import Summary
from fedemu.device.memory.replay_buffer import split_own
from fedemu.device.memory.store import read_own
from fedemu.ops.stress.fleet import LiveFleet
from fedemu.ops.stress.invariants import clock_goes_forward
from fedemu.protocol.ids import AskId

ROUNDS, DEVICES = STEADY.rounds, STEADY.devices
FEW = (
    *STEADY.settings,
    "rounds=3",
    "local.epochs=1",
    "fleet.devices=8",
    "stream={kind='drift', periods=3, rounds_per_period=1, alpha=0.5}",
)
SLOW = (
    "local.epochs=1",
    "profile.seconds_per_sample=1.0",
    "profile.latency=60.0",
    "profile.down_kbps=1e9",
    "profile.up_kbps=1e9",
    "fleet.deadline=5000.0",
    f"fleet.per_round={DEVICES}",
    "fleet.over_selection=1.0",
)
QUICK = ("replay.iterations=1", "replay.restarts=0")
METHODS = {
    "moon": ("algorithm.name='moon'",),
    "flashback": (
        "algorithm.name='flashback'",
        "algorithm.options.server_epochs=1",
        "data.public={fraction=0.1}",
    ),
}

Play = Callable[..., Summary]


# The next test has diversity.
@pytest.mark.parametrize("strategy", ["naive_uniform", "reservoir", "herding", "gss_greedy"])
def test_a_device_that_chooses_alone_chooses_the_same_again(
    strategy: str, tmp_path: Path, in_one_process: Play
) -> None:
    settings = (*FEW, f"replay={{strategy='{strategy}', capacity={BUDGET}}}")
    runs = [in_one_process(tmp_path / name, *settings).model_digest for name in ("first", "second")]
    assert runs[0] == runs[1]
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    assert first == second
    assert {len(indices) for _, indices, _ in first.values()} == {BUDGET}


def test_a_device_that_chooses_alone_chooses_the_same_in_any_process(
    tmp_path: Path, in_one_process: Play, new_fleet: Callable[..., LiveFleet]
) -> None:
    settings = (*FEW, f"replay={{strategy='diversity', capacity={BUDGET}}}")
    expected = in_one_process(tmp_path / "undisturbed", *settings)
    fleet = new_fleet(*settings)
    fleet.start_coordinator()
    fleet.start_devices(8, "--trainers", "2", "--per-process", "3")
    assert fleet.wait_for_end() == 0, fleet.tail()
    assert fleet.summary()["model_digest"] == expected.model_digest
    chosen = contents(tmp_path / "undisturbed")
    assert contents(fleet.run_directory.parent) == chosen
    assert {len(indices) for _, indices, _ in chosen.values()} == {BUDGET}


def test_targets_by_mean_and_for_each_device_lead_to_the_same_choice(tmp_path: Path, in_one_process: Play) -> None:
    objectives = []
    for form in ("mean", "each"):
        in_one_process(tmp_path / form, *STEADY.settings, *CHURN, f"rounds={EXCHANGES[0]}", f"replay.targets='{form}'")
        last = read_rows(tmp_path / form)[-1]
        objectives.append(last.remarks["coordination"]["objective"])
    assert contents(tmp_path / "mean") == contents(tmp_path / "each")
    assert objectives[0] == pytest.approx(objectives[1], rel=1e-5)


@pytest.mark.parametrize("method", ["moon", "flashback"])
def test_a_coordinator_that_fails_in_an_exchange_goes_on_with_own_states_and_buffers(
    method: str, tmp_path: Path, in_one_process: Play
) -> None:
    settings = (*STEADY.settings, *CHURN, f"rounds={EXCHANGES[1] + 1}", *QUICK, *METHODS[method])
    expected = in_one_process(tmp_path / "undisturbed", *settings)
    resumed = tmp_path / "resumed"
    with pytest.raises(_Unplugged):
        in_one_process(resumed, *settings, observers=[_Unplugs(EXCHANGES[1])])
    assert len(read_rows(resumed)) == EXCHANGES[1] - 1
    summary = in_one_process(resumed, *settings)
    assert (summary.model_digest, summary.perturbed) == (expected.model_digest, False)
    assert contents(resumed) == contents(tmp_path / "undisturbed")
    own = {name for path in newest_versions(resumed).values() for name in split_own(read_own(path))[0]}
    assert bool(own) == (method == "moon")


def test_samples_arrive_as_the_clock_goes_and_a_period_begins_in_time(tmp_path: Path, in_one_process: Play) -> None:
    """The clock shows what an ask takes: two minutes of latency, and one second per sample of the largest device."""
    settings = (*STEADY.settings, ARRIVING, *SLOW, f"replay={{strategy='reservoir', capacity={BUDGET}}}")
    in_one_process(tmp_path / "run", *settings, f"rounds={ROUNDS}")
    plan, rows = published_plan(tmp_path / "run"), read_rows(tmp_path / "run")
    assert clock_goes_forward(rows) == []
    kept, time, arrived = np.zeros(DEVICES, np.int64), 0.0, []
    for row in rows:
        time = max(time, plan.begins(row.task or 0))
        held = np.array([len(plan.held(device, row.round, time)) for device in range(DEVICES)])
        time += 120 + float(np.max(held + kept))
        arrived.append(held.sum())
        if row.round in EXCHANGES:
            at_the_end = [len(plan.held(device, row.round, time)) for device in range(DEVICES)]
            kept = np.minimum(BUDGET, kept + at_the_end)
            time += 120
        assert row.virtual_time == pytest.approx(time, abs=1e-3)
    assert all(arrived[round - 2] < arrived[round - 1] for round in (*EXCHANGES, ROUNDS)), "X_t grows in its period"
    assert [row.task for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]


class _Unplugged(Exception):
    pass


class _Unplugs(Observers):
    """An observer that fails at the first drop-out within the exchange that ends a round."""

    def __init__(self, round: int) -> None:
        super().__init__()
        self._round = round

    def event(self, name: str, **fields: Any) -> None:
        if name == "dropout":
            ask = AskId.parse(fields["ask"])
            if ask.round == self._round and ask.ordinal > 0:
                raise _Unplugged
