"""The scenarios, as far as they can be looked at without a fleet."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fedemu.ops.stress.fleet import FleetTimeout, LiveFleet
from fedemu.ops.stress.scenarios import SHORT, scenarios


class Deserted(LiveFleet):
    """A fleet that has none of the processes that a scenario kills."""

    def wait_for_round(self, round: int, seconds: float = 120.0) -> None:
        """Every round is over."""

    def processes(self, kind: str) -> list[psutil.Process]:
        return []

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        super().wait_until(condition, what, seconds=0.0)


@pytest.mark.parametrize("name", ["trainer-kills", "device-kills", "zygote-kills"])
def test_a_scenario_that_finds_nothing_to_kill_does_not_pass(name: str, tmp_path: Path) -> None:
    disturb = scenarios(SHORT)[name].disturb
    assert disturb is not None
    with pytest.raises(FleetTimeout, match=f"the arrival of a {name.removesuffix('-kills')} to kill did not happen"):
        disturb(Deserted(tmp_path, address="tcp://127.0.0.1:1"), random.Random(1))
