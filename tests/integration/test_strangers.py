"""Strangers attack runs without and with keys. The model is the same, and memory is bounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedemu.coordinator.record.summary import Summary
from fedemu.ops.stress.strangers.play import SETTINGS, Calm, play
from fedemu.ops.stress.undisturbed import Undisturbed
from fedemu.ops.stress.warm import WarmStart

ROUNDS = 8
BEGIN = 2
"""The round after which attacks begin."""
FEW = ("--trainers", "1", "--per-process", "10")
"""The devices of these runs are in few processes."""
USUAL_MEMORY = 500 * 2**20
"""What the coordinator of a small run holds, with torch."""


@pytest.fixture(scope="module")
def calm(in_one_process: Callable[..., Summary], tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The run that nobody attacks. Its pace is not compared, because other processes may need this machine."""
    run = tmp_path_factory.mktemp("calm") / "run"
    in_one_process(run, *SETTINGS[:-1], f"rounds={ROUNDS}")
    end = Undisturbed.read(run)
    return Calm(ROUNDS, BEGIN, end, pace=1.0, change=1.0, memory=USUAL_MEMORY, processors=1.0)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("attacks", "keys", "edge", "counted"),
    [
        (("garbage", "endless-message"), False, False, "unknown_peer"),
        (("garbage", "stolen-lease", "bundles", "channels"), True, False, "too_much"),
        (("garbage", "endless-message"), False, True, "unfinished"),
        (("garbage", "stolen-lease"), True, True, "lease_unknown"),
    ],
)
def test_attacks_change_no_model_and_fill_no_memory(
    attacks: tuple[str, ...], keys: bool, edge: bool, counted: str, calm: Calm, tmp_path: Path, warm: WarmStart
) -> None:
    result = play(
        attacks, calm, tmp_path, keys=keys, edge=edge, noticed=counted, options=FEW, seconds=180.0, start=warm.start
    )
    assert result.complaints == ()
    assert result.counted[counted] >= 1
