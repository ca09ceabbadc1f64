"""The rows that a viewer of the live page gets."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from fedemu.ops.live import rows as rows_module
from fedemu.ops.live.rows import Rows


def played(rounds: int, evaluated_every: int) -> Rows:
    found = Rows()
    for round in range(1, rounds + 1):
        line = {"round": round, "accepted": 5}
        if round % evaluated_every == 0:
            line |= {"accuracy": round / 1000, "class_accuracy": [0.5, 0.25]}
        found.add(line)
    return found


@pytest.mark.parametrize("rounds", range(21, 41))
def test_rows_that_are_thinned_out_keep_those_that_were_evaluated_and_the_last(
    monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    monkeypatch.setattr(rows_module, "MOST_POINTS", 20)
    found = played(rounds, 4).thinned()
    assert len(found) <= 21
    assert found[-1]["round"] == rounds
    assert [row["round"] for row in found if row["accuracy"] is not None] == [*range(4, rounds + 1, 4)]
    assert [row["round"] for row in found] == sorted({row["round"] for row in found})


def test_lists_of_classes_are_thinned_out_among_the_rows_that_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MOST_CELLS", 5)
    found = played(13, 3).thinned()
    assert [row["round"] for row in found] == [*range(1, 14)]
    assert [row["round"] for row in found if row["class_accuracy"]] == [6, 12]
    assert [row["accuracy"] for row in found if row["round"] == 9] == [0.009]


def test_few_rows_are_shown_as_they_are() -> None:
    assert Rows().thinned() == []
    assert [row["class_accuracy"] for row in played(3, 1).thinned()] == [[0.5, 0.25]] * 3


def test_the_rows_of_a_very_long_run_take_no_more_memory_and_the_latest_tell_its_pace(
    monkeypatch: pytest.MonkeyPatch, entries: Callable[[object], int]
) -> None:
    monkeypatch.setattr(rows_module, "MOST_POINTS", 20)
    kept = [entries(played(rounds, 4)) for rounds in (200, 10_000)]
    assert kept[1] < 2 * kept[0]
    found = played(10_000, 4)
    assert [row["round"] for row in found.latest] == [*range(9991, 10_001)]
    shown = found.thinned()
    assert 10 <= len(shown) <= 21
    assert shown[-1]["round"] == 10_000
    assert all(row["accuracy"] is not None for row in shown)
    assert len({after["round"] - before["round"] for before, after in itertools.pairwise(shown[:-1])}) == 1
    assert found.totals["accepted"] == 50_000


def test_rows_have_the_numbers_that_devices_and_the_method_tell_the_first_eight_by_name() -> None:
    rows = Rows()
    told = {"loss": 0.5, "norm": 2, "none": None, "far": 10**400, "odd": float("inf")}
    remarks = {"norm": {"top": -1.5}, "text": "none", "yes": True}
    first = rows.add({"round": 1, "device_metrics": told, "remarks": remarks})
    assert first["own"] == {"device_metrics.norm": 2.0, "remarks.norm.top": -1.5}
    assert rows.add({"round": 2, "device_metrics": None})["own"] == {}
    many = {f"m{digit}": digit for digit in range(9)}
    more = rows.add({"round": 3, "device_metrics": many, "remarks": {"a": 1, "z": 1}})
    assert more["own"] == {"remarks.a": 1.0} | {f"device_metrics.m{digit}": float(digit) for digit in range(7)}
    assert [row["own"] for row in rows.thinned()] == [first["own"], {}, more["own"]]
