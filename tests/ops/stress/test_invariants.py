"""What must hold of every run: each check finds what it is made for, and passes what is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedemu.coordinator.record.row import Row
from fedemu.ops.stress.invariants import (
    Usage,
    clock_goes_forward,
    ended_as_undisturbed,
    nothing_counted_twice,
    outcomes_add_up,
)

SOUND = [
    Row(1, virtual_time=1.0, selected=3, accepted=2, late=1, attempts=1),
    Row(2, virtual_time=1.0, selected=5, accepted=4, rejected=1, attempts=2),
]


def test_sound_rows_raise_no_complaints() -> None:
    assert outcomes_add_up(SOUND) + nothing_counted_twice(SOUND, 2) + clock_goes_forward(SOUND) == []


def test_a_device_without_an_outcome_is_found() -> None:
    rows = [SOUND[0], replace(SOUND[1], rejected=0)]
    assert outcomes_add_up(rows) == ["round 2: 5 devices selected but 4 outcomes"]


@pytest.mark.parametrize("rounds", [[1, 3], [2, 1], [1, 1], [2, 3]])
def test_a_round_that_is_missing_or_out_of_order_is_found(rounds: list[int]) -> None:
    rows = [replace(row, round=round) for row, round in zip(SOUND, rounds, strict=True)]
    assert outcomes_add_up(rows) == [f"the rounds are {rounds}, not 1 to 2 in order"]


def test_more_replies_than_the_attempts_wanted_are_found() -> None:
    assert nothing_counted_twice(SOUND, 1) == [
        "round 1: 2 replies accepted in 1 attempts of 1",
        "round 2: 4 replies accepted in 2 attempts of 1",
    ]


def test_a_clock_that_goes_back_is_found() -> None:
    rows = [SOUND[0], replace(SOUND[1], virtual_time=0.5)]
    assert clock_goes_forward(rows) == ["the clock went back from 1.000 to 0.500"]


def test_a_run_that_was_perturbed_or_has_another_model_has_not_ended_as_undisturbed() -> None:
    summary = {"perturbed": True, "model_digest": "a" * 64}
    assert ended_as_undisturbed(SOUND, summary | {"perturbed": False}, "a" * 64) == []
    perturbed = "the run was perturbed: an unplanned absence decided an outcome"
    assert ended_as_undisturbed(SOUND, summary, None) == [perturbed]
    other = f"the model's digest is {'a' * 16}, undisturbed {'b' * 16}"
    assert ended_as_undisturbed(SOUND, summary, "b" * 64) == [perturbed, other]
    back = [SOUND[0], replace(SOUND[1], rejected=0, virtual_time=0.5)]
    assert ended_as_undisturbed(back, summary, None) == [*outcomes_add_up(back), *clock_goes_forward(back), perturbed]


def test_only_lasting_growth_is_a_complaint() -> None:
    steady, start = [100] * 16, [100] * 8
    assert Usage("trainer 7", steady, steady).grows(slack_bytes=10, slack_descriptors=5) == []
    assert Usage("trainer 7", [*start, 900, *start[:7]], steady).grows(slack_bytes=10, slack_descriptors=5) == []
    grown = Usage("trainer 7", [*start, *[111] * 8], [*start, *[106] * 8])
    assert grown.grows(slack_bytes=10, slack_descriptors=5) == [
        "trainer 7: resident bytes grew from 100 to 111",
        "trainer 7: file descriptors grew from 100 to 106",
    ]
    assert Usage("trainer 7", [100] * 7 + [900] * 8, steady[:15]).grows() == []
