"""A run whose processes are killed again and again: when it goes on, and what counts as lost."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedemu.ops.stress.recovery import play
from fedemu.ops.stress.recovery.play import VICTIMS, RecoveryResult, recover
from fedemu.ops.stress.undisturbed import Undisturbed, undisturbed
from fedemu.ops.stress.warm import WarmStart

FEW = ("--trainers", "1", "--per-process", "4")
"""The devices are in few processes."""


def test_a_run_goes_on_after_each_kill_and_loses_nothing(tmp_path: Path, warm: WarmStart) -> None:
    killed: list[str] = []
    result = recover(
        "both", tmp_path / "run", 4.0, random.Random(1), warm, options=FEW, told=lambda kill: killed.append(kill.victim)
    )
    assert result.complaints == ()
    assert killed == [kill.victim for kill in result.kills]
    assert killed
    assert {*killed} <= {*VICTIMS}
    assert result.rounds >= play.ROUNDS_AFTER * len(killed)
    assert all(0.0 < kill.seconds < play.MOST_SECONDS for kill in result.kills)


def test_a_run_that_does_not_go_on_and_one_with_another_model_have_failed(
    tmp_path: Path, warm: WarmStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another(*arguments: Any) -> Undisturbed:
        return replace(undisturbed(*arguments), digest="f" * 64)

    monkeypatch.setattr(play, "undisturbed", another)

    def result(name: str, seconds: float, most_seconds: float) -> RecoveryResult:
        chance = random.Random(1)
        how = {"victims": ["coordinator"], "options": FEW, "most_seconds": most_seconds}
        return recover("as by default", tmp_path / name, seconds, chance, warm, **how)

    (stuck,) = result("stuck", 60.0, 0.0).complaints
    assert "after the coordinator was killed, did not happen within 0 s" in stuck
    (differs,) = result("differs", 0.0, 60.0).complaints
    assert differs.endswith(", undisturbed ffffffffffffffff")
