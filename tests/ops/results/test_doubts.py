"""A run that learnt nothing, or lost many replies, is told to be doubted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedemu.coordinator.record.row import Row
from fedemu.ops.results.doubts import doubts


def rows(*accuracies: float | None, samples: int = 360, **outcomes: int) -> list[Row]:
    return [
        Row(round=number, accuracy=accuracy, test_samples=None if accuracy is None else samples, **outcomes)
        for number, accuracy in enumerate(accuracies, 1)
    ]


@pytest.mark.parametrize(
    ("accuracy", "samples", "chance", "told"),
    [
        (0.1, 360, 0.1, True),
        (0.131, 360, 0.1, True),  # two standard errors above 10 % are 13.2 %
        (0.133, 360, 0.1, False),
        (0.131, 10_000, 0.1, False),
        (0.0, 360, 0.1, True),
        (0.9, 100, 0.9, True),
        (0.1, 360, None, False),
    ],
)
def test_a_last_accuracy_at_chance_is_told(accuracy: float, samples: int, chance: float | None, told: bool) -> None:
    found = doubts(rows(0.9, accuracy, None, samples=samples), {"chance_accuracy": chance})
    assert bool(found) == told
    if told and accuracy == 0.131:
        assert found == [
            "the model has learnt nothing: with an accuracy of 13.1 % it is no better than answering always with the "
            "most frequent class, which is right for 10.0 % of the test samples"
        ]


@pytest.mark.parametrize(("rejected", "failed", "told"), [(1, 1, False), (2, 1, True), (0, 10, True)])
def test_more_than_a_fifth_of_rejected_and_failed_replies_is_told(rejected: int, failed: int, told: bool) -> None:
    found = doubts(rows(0.9, 0.9, accepted=8, rejected=rejected, failed=failed, dropped=90, late=90), {})
    assert bool(found) == told
    if (rejected, failed) == (2, 1):
        assert found == [
            "many devices are missing from the model: of 22 that did their work 4 sent replies that were rejected, and "
            "2 failed; that is 27.3 %, and the events of the run say why"
        ]


@pytest.mark.parametrize("outcome", ["quorum", "interrupted", "completed"])
def test_a_last_model_that_was_not_tested_because_the_run_ended_early_is_told(outcome: str) -> None:
    tested = [replace(row, class_accuracy=(row.accuracy,)) for row in rows(0.8, 0.9)]
    early, partly = [*tested, *rows(None, None, None)[2:]], [*tested, *rows(0.8, 0.9, 0.9, samples=20)[2:]]
    found = [doubts(each, {"outcome": outcome}) for each in (tested, early, partly)]
    if outcome == "completed":
        assert found == [[], [], []]
    else:
        assert found == [
            [],
            ["the accuracy is that after round 2 of 3, and not that of the last model"],
            ["the accuracy is that after round 3 of 3 on 20 test samples, and not that of the last model"],
        ]


@pytest.mark.parametrize("summary", [{}, {"chance_accuracy": 0.1}])
def test_a_run_without_rounds_leaves_no_doubt(summary: dict[str, Any]) -> None:
    assert doubts([], summary) == []


def test_machines_that_compute_differently_are_named_once_each() -> None:
    compute = {"mixed": True, "coordinator": [{"host": "a"}], "machines": [{"host": "a"}, {"host": "b"}]}
    assert doubts([], {"compute": {**compute, "mixed": False}}) == []
    assert doubts([], {"compute": compute}) == [
        "machines that compute differently took part (a, b; summary.json says how each computes), so the same "
        "experiment may end otherwise"
    ]
