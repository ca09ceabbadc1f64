"""What must hold of every run: each check finds what it is made for, and passes what is right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from fedemu.coordinator.record.json_lines import plain
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.summary import summarize
from fedemu.ops.stress.invariants import (
    Usage,
    clock_goes_forward,
    ended_as_undisturbed,
    nothing_counted_twice,
    outcomes_add_up,
    same_rows,
    totals_are_right,
)

SOUND = [
    Row(1, virtual_time=1.0, selected=3, accepted=2, late=1, attempts=1),
    Row(2, virtual_time=1.0, selected=5, accepted=4, rejected=1, attempts=2),
]
DIGEST = "a" * 64


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """The summary of a completed run with these rows, as ``summary.json`` has it."""
    summary = summarize(rows, name="digits", outcome="completed", seed=1, model_digest=DIGEST, data_digest="")
    whole: dict[str, Any] = json.loads(json.dumps(plain(asdict(summary))))
    return whole


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


def test_a_run_that_was_perturbed_or_has_another_model_or_outcome_has_not_ended_as_undisturbed() -> None:
    assert ended_as_undisturbed(SOUND, summary_of(SOUND), DIGEST, SOUND) == []
    summary = summary_of(SOUND) | {"perturbed": True, "outcome": "interrupted"}
    perturbed = "the run was perturbed: an unplanned absence decided an outcome"
    assert ended_as_undisturbed(SOUND, summary, DIGEST, outcome="interrupted") == [perturbed]
    unfinished = "the outcome of the run is interrupted, and not completed"
    other = f"the model's digest is {'a' * 16}, undisturbed {'b' * 16}"
    assert ended_as_undisturbed(SOUND, summary, "b" * 64) == [unfinished, perturbed, other]
    back = [SOUND[0], replace(SOUND[1], rejected=0, virtual_time=0.5)]
    assert ended_as_undisturbed(back, summary_of(back), DIGEST) == [*outcomes_add_up(back), *clock_goes_forward(back)]


def test_the_first_value_that_differs_from_the_undisturbed_run_is_told() -> None:
    rows = [SOUND[0], replace(SOUND[1], accuracy=0.5, bytes_down=400)]
    assert ended_as_undisturbed(rows, summary_of(rows), DIGEST, SOUND) == [
        "round 2: accuracy is 0.5, undisturbed None",
    ]
    rows = [replace(SOUND[0], bytes_down=400), replace(SOUND[1], accuracy=0.5)]
    assert same_rows(rows, [SOUND[0], replace(SOUND[1], bytes_down=1)]) == [
        "round 1: bytes_down is 400, undisturbed None"
    ]
    measured = dict.fromkeys(("wall_time", "round_seconds", "device_seconds", "wire_bytes_down", "wire_bytes_up"), 7)
    rows = [replace(row, **measured) for row in SOUND]
    assert ended_as_undisturbed(rows, summary_of(rows), DIGEST, SOUND) == [], "times and traffic are measured"


@pytest.mark.parametrize("count", [0, 1])
def test_rows_that_are_missing_are_found(count: int) -> None:
    rows = SOUND[:count]
    assert ended_as_undisturbed(rows, summary_of(rows), DIGEST, SOUND) == [
        f"metrics.jsonl has {count} rows, undisturbed 2"
    ]
    complaints = ended_as_undisturbed(rows, summary_of(SOUND), DIGEST)
    assert complaints[0] == f"the summary's rounds is 2, but the rows of metrics.jsonl give {count}"


def test_a_summary_with_other_sums_than_its_rows_is_found() -> None:
    rows = [replace(SOUND[0], accuracy=0.25, bytes_down=3), replace(SOUND[1], accuracy=0.5, bytes_down=4)]
    summary = summary_of(rows)
    assert totals_are_right(rows, summary) == []
    wrong = summary["totals"] | {"bytes_down": 8}
    assert totals_are_right(rows, summary | {"final_accuracy": 0.25, "totals": wrong}) == [
        "the summary's final_accuracy is 0.25, but the rows of metrics.jsonl give 0.5",
        f"the summary's totals is {wrong}, but the rows of metrics.jsonl give {summary['totals']}",
    ]


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
