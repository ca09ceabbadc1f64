"""How a run ended, by its summary, its last row and its settings."""

from __future__ import annotations

from typing import Any

import pytest

from fedemu.coordinator.record.outcome import outcome_of, planned_rounds


@pytest.mark.parametrize(
    ("summary", "last_round", "planned", "outcome"),
    [
        ({"outcome": "completed", "rounds": 3}, 3, 3, "completed"),
        ({"outcome": "completed", "rounds": 3}, 3, 400, "interrupted"),
        ({"outcome": "completed", "rounds": 3}, 5, 400, "interrupted"),
        ({"outcome": "completed", "rounds": 3}, 400, 400, "completed"),
        ({"outcome": "completed", "rounds": 400}, 0, 400, "completed"),
        ({"outcome": "completed", "rounds": 3}, 3, None, "completed"),
        ({"outcome": "completed"}, 3, 400, "completed"),
        ({"outcome": "completed", "rounds": "three"}, 3, 400, "completed"),
        ({"outcome": "diverged", "rounds": 3}, 3, 400, "diverged"),
        ({"outcome": "quorum", "rounds": 3}, 3, 400, "quorum"),
        ({"outcome": "failed", "rounds": 3}, 3, 400, "failed"),
        ({"outcome": 3, "rounds": 3}, 3, 3, None),
        ({}, 3, 3, None),
    ],
)
def test_a_completed_run_whose_settings_ask_for_more_rounds_is_interrupted_until_it_has_them(
    summary: dict[str, Any], last_round: int, planned: int | None, outcome: str | None
) -> None:
    assert outcome_of(summary, last_round, planned) == outcome


def test_the_planned_rounds_are_read_from_the_first_settings_also_of_a_damaged_file() -> None:
    assert planned_rounds('name = "a"\nseed = 3\nrounds = 400\n\n[data]\nrounds = 7\n') == 400
    assert planned_rounds("rounds = 1_000\n\n[data\x00") == 1000
    for without in ("", 'name = "rounds = 3"\n', "[data]\nrounds = 7\n", 'name = "a"\n\n[data]\nrounds = 7\n'):
        assert planned_rounds(without) is None
