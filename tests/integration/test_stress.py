"""Every stress scenario in its short form, but for those of single kills: ``test_campaign.py`` plays more of these.

``test_tasks_generator.py`` has the scenario that trains generators, and ``test_strangers.py`` throws garbage, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fedemu.coordinator.record.row import Row
from fedemu.ops.stress.play import play
from fedemu.ops.stress.scenarios import SHORT, Scenario, scenarios
from fedemu.ops.stress.undisturbed import Undisturbed
from fedemu.ops.stress.warm import WarmStart

ELSEWHERE = {
    "garbage",
    "training-kills",
    "coordinator-restarts",
    "trainer-kills",
    "device-kills",
    "zygote-kills",
    "supervisor-restarts",
}
ONE = ("--trainers", "1")
"""One trainer: nothing happens to trainers here."""
SCENARIOS = {name: scenario for name, scenario in scenarios(SHORT).items() if name not in ELSEWHERE}


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_the_scenario_passes_in_its_short_form(name: str, tmp_path: Path, warm: WarmStart) -> None:
    result = play(SCENARIOS[name], SHORT, tmp_path, options=ONE, seconds=300.0, start=warm.start)
    assert result.complaints == ()
    assert result.rounds == SHORT.rounds


def test_a_scenario_fails_whose_run_diverges_or_is_not_the_expected_one(tmp_path: Path, warm: WarmStart) -> None:
    scenario = Scenario("diverging", "the model is not finite after a step", ("local.lr=1e30",))
    another = Undisturbed("f" * 64, (Row(round=1),))
    result = play(scenario, SHORT, tmp_path, expected=another, options=ONE, seconds=300.0, start=warm.start)
    assert result.complaints == (
        "metrics.jsonl has 0 rows, undisturbed 1",
        "the outcome of the run is diverged, and not completed",
        f"the model's digest is {result.digest[:16]}, undisturbed ffffffffffffffff",
    )
