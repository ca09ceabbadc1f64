"""What a device has for its work: the period's samples, its replay buffer, and sealed periods."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedemu.algorithms.replay.buffer import Buffer
from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.device.memory.holding import Holding
from fedemu.device.memory.replay_buffer import buffer_leaves
from fedemu.device.memory.store import write_own
from fedemu.device.memory.stream import DeviceStream

# Samples 1 to 3 arrive in period 0, sample 4 in period 1, samples 5 and 6 in period 2, the last one after 60 seconds.
ARRIVALS = Arrivals(
    offsets=np.array([0, 6]),
    indices=np.array([1, 2, 3, 4, 5, 6]),
    periods=np.array([0, 0, 0, 1, 2, 2]),
    seconds=np.array([0.0, 0.0, 0.0, 0.0, 0.0, 60.0]),
    period_count=3,
)


def holding(
    version: Path | None = None, budget: int = 0, time: float = 200.0, round: int = 3, alone: int | None = None
) -> Holding:
    plan = StreamPlan(ARRIVALS, 1, 100.0, budget=budget, alone=alone)
    return Holding.at(DeviceStream(plan, 0), version, round, time)


def sealed(held: Holding) -> dict[int, list[int]]:
    return {period: indices.tolist() for period, indices in held.sealed.items()}


def test_without_a_replay_buffer_a_device_has_the_periods_samples_alone() -> None:
    held = holding()
    assert (held.fresh.tolist(), held.kept, sealed(held), len(held)) == ([5], 0, {}, 1)


def test_a_device_that_never_selected_has_every_earlier_period_sealed() -> None:
    held = holding(budget=9)
    assert sealed(held) == {0: [1, 2, 3], 1: [4]}
    assert (held.kept, len(held)) == (4, 5)


def test_the_buffer_takes_no_more_than_its_budget() -> None:
    held = holding(budget=2, time=260.0)
    assert held.fresh.tolist() == [5, 6]
    assert (held.kept, len(held)) == (2, 4)


def test_a_device_that_selects_alone_keeps_no_more_than_its_share_of_a_common_budget(tmp_path: Path) -> None:
    held = holding(budget=9, alone=2)
    assert (held.kept, len(held)) == (2, 3)
    # After an exchange it may hold more.
    write_own(tmp_path / "own", buffer_leaves(Buffer(np.arange(5), np.zeros(5, np.int64), period=2, seen=8)))
    assert holding(tmp_path / "own", budget=9, alone=2).kept == 5


def test_periods_that_the_version_has_selected_from_are_gone(tmp_path: Path) -> None:
    write_own(tmp_path / "own", buffer_leaves(Buffer(np.array([2]), np.array([0]), period=1, seen=3)))
    held = holding(tmp_path / "own", budget=9)
    assert sealed(held) == {1: [4]}
    assert (held.kept, len(held)) == (2, 3)


@pytest.mark.parametrize("asked", [0, 2])
def test_only_samples_that_a_question_was_about_are_sealed_in_its_period_and_all_in_later_ones(
    tmp_path: Path, asked: int
) -> None:
    write_own(tmp_path / "own", buffer_leaves(Buffer(asked=asked)))
    held = holding(tmp_path / "own", budget=9)
    assert sealed(held) == {0: [1, 2, 3][:asked], 1: [4]}
    assert held.kept == asked + 1
