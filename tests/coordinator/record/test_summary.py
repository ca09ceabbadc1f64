"""The summary of a run, made from its rows."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.summary import TOTALS, accuracy_of_last, graphics, machine, summarize, versions

FACTS = {"name": "digits", "outcome": "completed", "seed": 3, "model_digest": "00", "data_digest": "11"}


def test_a_summary_adds_up_rows_and_finds_the_best():
    rows = [
        {"round": 1, "accuracy": 0.5, "class_accuracy": [0.5, 0.5], "selected": 3, "late": 1, "bytes_up": 10},
        {"round": 2, "accuracy": None, "selected": 3, "late": 0, "bytes_up": 10},
        {"round": 3, "accuracy": 0.75, "class_accuracy": [1.0, 0.5], "selected": 4, "bytes_up": 5},
        {"round": 4, "accuracy": 0.25, "class_accuracy": [0.5, None], "virtual_time": 60.0, "wall_time": 1.5},
    ]
    summary = summarize(tuple(map(Row.read, rows)), **FACTS, perturbed=True, chance=0.1, compute={"trainers": 2})
    assert {key: getattr(summary, key) for key in FACTS} == FACTS
    assert (summary.perturbed, summary.chance_accuracy, summary.compute) == (True, 0.1, {"trainers": 2})
    assert (summary.rounds, summary.final_accuracy, summary.best_accuracy) == (4, 0.25, 0.75)
    assert summary.forgetting == 0.5
    assert {key: summary.totals[key] for key in ("selected", "late", "bytes_up")} == {
        "selected": 10,
        "late": 1,
        "bytes_up": 25,
    }
    assert set(summary.totals) == set(TOTALS)
    assert (summary.virtual_time, summary.wall_time) == (60.0, 1.5)


def test_a_summary_of_no_rounds_knows_nothing():
    summary = summarize([], **FACTS)
    assert (summary.rounds, summary.final_accuracy, summary.best_accuracy, summary.forgetting) == (0, None, None, None)
    assert (summary.virtual_time, summary.wall_time) == (0.0, 0.0)


def period_row(round: int, task: int, accuracy: list, loss: list | None = None, **more) -> Row:
    return Row(round, task, period_accuracy=accuracy, period_loss=loss or [1.0] * len(accuracy), **more)


PERIODS = [
    period_row(1, 0, [0.1, 0.1, 0.1]),
    period_row(2, 0, [0.8, 0.2, 0.1], seen_accuracy=0.8),
    Row(round=3, task=1),
    period_row(4, 1, [0.7, 0.9, 0.3], [2.0, 0.5, 3.0], seen_accuracy=0.85),
    period_row(5, 2, [0.6, 0.8, 0.5]),
    period_row(6, 2, [0.5, 0.6, 0.6], [3.0, None, 1.0], seen_accuracy=0.5),
]


def test_periods_are_summarised_by_the_last_evaluated_round_of_each():
    found = summarize(PERIODS, **FACTS).periods
    assert found["rounds"] == [2, 4, 6]
    assert found["accuracy"].tolist() == [[0.8, 0.2, 0.1], [0.7, 0.9, 0.3], [0.5, 0.6, 0.6]]
    assert found["loss"][:2].tolist() == [[1.0, 1.0, 1.0], [2.0, 0.5, 3.0]]
    assert np.isnan(found["loss"][2]).tolist() == [False, True, False]
    assert found["seen_accuracy"].tolist() == [0.8, 0.85, 0.5]
    assert found["average_accuracy"] == pytest.approx((0.5 + 0.6 + 0.6) / 3)
    assert found["average_incremental_accuracy"] == pytest.approx((0.8 + 0.85 + 0.5) / 3)
    assert found["average_forgetting"] == pytest.approx(((0.8 - 0.5) + (0.9 - 0.6)) / 2)
    assert found["backward_transfer"] == pytest.approx(((0.5 - 0.8) + (0.6 - 0.9)) / 2)
    assert found["forgetting"] == pytest.approx([0.3, 0.3, 0.3 - 0.6])
    assert not found.keys() & {"perplexity", "all_period_perplexity", "relative_forgetting"}


def test_forward_transfer_is_what_earlier_periods_taught_about_the_next_one():
    """(0.2 - 0.25 + 0.3 - 0.05) / 2: each period just before it began, minus the untrained model."""
    first = period_row(1, 0, [0.1, 0.1, 0.1], untrained_period_accuracy=[None, 0.25, 0.05])
    found = summarize([Row(round=0, task=0), first, *PERIODS[1:]], **FACTS).periods
    assert found["forward_transfer"] == pytest.approx(0.1)
    assert found["untrained_accuracy"] == (None, 0.25, 0.05)
    assert summarize(PERIODS, **FACTS).periods["forward_transfer"] is None
    assert math.isnan(summarize([first], **FACTS).periods["forward_transfer"])


def test_the_accuracy_of_the_last_rounds_is_the_mean_of_those_that_were_evaluated():
    rows = [Row(round=n, accuracy=None if n % 2 else n / 200) for n in range(1, 121)]
    assert accuracy_of_last(rows, 4) == pytest.approx((118 + 120) / 400)
    assert accuracy_of_last(rows, 120) == pytest.approx(0.305)
    assert accuracy_of_last(rows, 121) is None
    assert accuracy_of_last(rows, 1) == 0.6
    assert accuracy_of_last(rows[:-1], 1) is None
    assert summarize(rows, **FACTS).last_accuracy == pytest.approx(np.mean(np.arange(22, 121, 2)) / 200)
    assert summarize(rows[:99], **FACTS).last_accuracy is None


def test_forgetting_and_backward_transfer_are_avalanches_if_each_period_is_best_just_after_it_was_learnt():
    matrix = [row.period_accuracy for row in PERIODS if row.round in (2, 4, 6)]
    # StreamForgetting takes for each earlier experience the accuracy just after training on it minus the last one.
    stream_forgetting = np.mean([matrix[k][k] - matrix[-1][k] for k in range(2)])
    found = summarize(PERIODS, **FACTS).periods
    assert found["average_forgetting"] == pytest.approx(stream_forgetting)
    assert found["backward_transfer"] == pytest.approx(-stream_forgetting)


def test_a_run_that_ended_early_is_summarised_by_the_periods_that_it_reached():
    found = summarize(PERIODS[:4], **FACTS).periods
    assert (found["rounds"], found["accuracy"].shape) == ([2, 4], (2, 3))
    assert found["average_accuracy"] == pytest.approx((0.7 + 0.9) / 2)
    assert found["average_forgetting"] == pytest.approx(0.8 - 0.7)
    orders = [replace(row, period_since=(1, 0, 0)) for row in PERIODS[:4]]  # devices meet tasks in their own orders
    assert summarize(orders, **FACTS).periods["average_accuracy"] == pytest.approx((0.7 + 0.9 + 0.3) / 3)
    first = summarize(PERIODS[:3], **FACTS).periods
    assert first["rounds"] == [2]
    assert math.isnan(first["average_forgetting"])
    assert math.isnan(first["backward_transfer"])


def test_a_run_without_periods_has_none():
    assert summarize([Row(round=1, task=0, accuracy=0.5)], **FACTS).periods is None


def test_language_is_summarised_by_perplexity():
    rows = [
        period_row(2, 0, [0.5, 0.1], [math.log(4), math.log(20)], perplexity=9.0),
        period_row(4, 1, [0.4, 0.4], [math.log(6), math.log(8)], perplexity=7.0),
    ]
    found = summarize(rows, **FACTS).periods
    assert found["perplexity"] == pytest.approx(np.array([[4.0, 20.0], [6.0, 8.0]]))
    assert found["all_period_perplexity"] == [9.0, 7.0]
    assert found["relative_forgetting"] == pytest.approx([6 / 4 - 1, 8 / 20 - 1])


def test_versions_and_machine_are_told(monkeypatch):
    monkeypatch.setattr("fedemu.coordinator.record.summary.cores", lambda: 3)  # such as those that a container may use
    assert versions()["torch"].partition("+")[0] == torch.__version__.partition("+")[0]  # PyPI names no CUDA
    assert machine()["cores"] == 3
    assert machine()["memory_bytes"] > 2**20


def test_gpus_are_named_with_their_driver(tmp_path: Path) -> None:
    assert graphics(tmp_path) == {}
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12.2.0\n"
    )
    for place, model in (("0000:41:00.0", "NVIDIA H100 80GB HBM3"), ("0000:01:00.0", "NVIDIA A100-PCIE-40GB")):
        folder = tmp_path / "gpus" / place
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 137\n")
    found = graphics(tmp_path)
    assert found["gpus"] == ["NVIDIA A100-PCIE-40GB", "NVIDIA H100 80GB HBM3"]
    assert found["driver"] == "550.54.15"
