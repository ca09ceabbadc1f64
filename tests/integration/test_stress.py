"""Every stress scenario in its short form, but for those of single kills: ``test_campaign.py`` plays more of these.

``test_tasks_generator.py`` has the scenario that trains generators, and ``test_strangers.py`` throws garbage, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fedemu.ops.stress.play import play
from fedemu.ops.stress.scenarios import SHORT, Scenario, scenarios
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
    assert not SCENARIOS[name].same_digest, "a scenario that must leave the digest is played beside an undisturbed run"
    result = play(SCENARIOS[name], SHORT, tmp_path, options=ONE, seconds=300.0, start=warm.start)
    assert result.complaints == ()
    assert result.rounds == SHORT.rounds


def test_a_scenario_whose_run_diverges_fails(tmp_path: Path, warm: WarmStart) -> None:
    scenario = Scenario("diverging", "the model is not finite after a step", ("local.lr=1e30",))
    result = play(scenario, SHORT, tmp_path, options=ONE, seconds=300.0, start=warm.start)
    assert result.complaints == ("the run did not come to its end: its outcome is diverged",)
