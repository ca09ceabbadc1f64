"""Runs with replay are compared with the run without, seed by seed, by strategy and by the samples kept."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedemu.ops.compare.compare import compare
from fedemu.ops.compare.entry import Statistic
from fedemu.ops.compare.page.page import claim_folder, write_comparison
from fedemu.ops.compare.page.replay import (
    REPLAY_PLOTS,
    WIDE_REPLAY_PLOTS,
    accuracy_by_size,
    objective_by_size,
    perplexity_by_size,
)
from fedemu.ops.compare.replay import ACCURACY, FORGETTING, LOSS, OBJECTIVE, PERPLEXITY, ReplayStudy
from fedemu.ops.compare.replay_label import replay_label, samples_kept, strategy_label
from fedemu.ops.compare.text import columns, replay_tables, text
from fedemu.ops.experiment.toml_text import toml_text
from fedemu.ops.pages.style import drawn, saved

PLOTS = {**REPLAY_PLOTS, **WIDE_REPLAY_PLOTS}


def write_run(
    directory: Path,
    accuracy: Sequence[Sequence[float]],
    *,
    perplexity: Sequence[float] | None = None,
    seed: int = 0,
    stream: str = "drift",
    **replay: Any,
) -> Path:
    """Write a run with one round per period, whose loss is 1 minus the accuracy.

    With ``perplexity``, which is that over all periods, it is a run of language data.
    """
    directory.mkdir(parents=True)
    experiment = {
        "name": directory.name,
        "seed": seed,
        "rounds": 9,
        "algorithm": {"name": "fedavg"},
        "stream": {"kind": stream, "column": "label", "periods": len(accuracy[0])},
        "replay": replay or {"strategy": "none"},
    }
    (directory / "config.toml").write_text(toml_text(experiment))
    rows = []
    for round, values in enumerate(accuracy, 1):
        loss = float(np.mean([1 - value for value in values]))
        row = {"round": round, "task": round - 1, "accuracy": float(np.mean(values)), "loss": loss}
        row |= {"period_accuracy": list(values), "period_loss": [1 - value for value in values], "bytes_down": 1}
        if perplexity is not None:
            row |= {"perplexity": perplexity[round - 1], "loss": math.log(perplexity[round - 1])}
        rows.append(row)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "summary.json").write_text(json.dumps({"outcome": "completed"}))
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs of two periods and two seeds: without replay, and with 5 and 20 samples."""
    write_run(tmp_path / "none-0", [[0.5, 0.0], [0.25, 0.75]], seed=0)
    write_run(tmp_path / "none-1", [[0.5, 0.0], [0.0, 0.5]], seed=1)
    write_run(tmp_path / "five-0", [[0.5, 0.0], [0.5, 0.75]], seed=0, strategy="reservoir", capacity=5)
    write_run(tmp_path / "five-1", [[0.5, 0.0], [0.5, 0.5]], seed=1, strategy="reservoir", capacity=5)
    write_run(tmp_path / "twenty-0", [[0.5, 0.0], [0.5, 1.0]], seed=0, strategy="reservoir", capacity=20)
    return tmp_path


def study_of(*paths: Path) -> ReplayStudy:
    (study,) = compare(paths).replay
    return study


def test_changes_are_taken_seed_by_seed_and_then_averaged(runs: Path) -> None:
    study = study_of(runs)
    assert study.reference is not None
    assert study.reference.label == "fedavg, no replay"
    ((line, (five, twenty)),) = study.lines.items()
    assert (line, five.samples, twenty.samples) == ("reservoir", 5, 20)
    # The values are 0.625 against 0.5, and 0.5 against 0.25.
    assert study.value(five, ACCURACY) == Statistic((0.125, 0.25))
    assert study.value(five, LOSS).values == pytest.approx((0.375 / 0.5 - 1, 0.5 / 0.75 - 1))
    assert study.value(twenty, ACCURACY) == Statistic((0.25,))
    assert five.by_period.tolist() == [[0.25, 0.0], [0.5, 0.0]]


def with_data(run: Path, digest: str) -> Path:
    """The run, whose data set has this digest."""
    (run / "summary.json").write_text(json.dumps({"outcome": "completed", "data_digest": digest}))
    return run


def test_a_change_is_not_taken_between_runs_on_data_of_other_content(runs: Path) -> None:
    for name in ("none-0", "five-0", "twenty-0"):
        with_data(runs / name, "a" * 64)
    other = with_data(write_run(runs / "other", [[0.5, 0.0], [1.0, 1.0]], strategy="reservoir", capacity=50), "b" * 64)
    same, alone = compare([runs]).replay
    assert [point.samples for point in same.points] == [5, 20]
    assert same.value(same.points[0], ACCURACY) == Statistic((0.125, 0.25)), "seed 1 does not tell its data"
    assert (alone.reference, alone.unpaired) == (None, 0)
    (point,) = alone.points
    assert [run.path for run in point.entry.runs] == [other]
    assert alone.value(point, ACCURACY) == Statistic((1.0,))
    assert same.label != alone.label


def test_forgetting_is_given_as_it_is(runs: Path) -> None:
    study = study_of(runs)
    forgetting = FORGETTING[False]
    five, _ = study.points
    assert study.value(five, forgetting) == Statistic((0.0, 0.0))
    assert study.reference is not None
    assert study.reference.figures[forgetting.key] == Statistic((0.25, 0.5))
    assert study.reference.figures[FORGETTING[True].key].known == [], "it is that of perplexities"


def test_the_objective_of_the_kept_samples_is_their_median_over_periods_where_it_was_measured(runs: Path) -> None:
    directory = write_run(
        runs / "many", [[0.5, 0.0], [0.5, 0.75]], strategy="diversity", capacity=5, objective="always"
    )
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for row, objective in zip(rows, (8.0, 4.0), strict=True):
        row["remarks"] = {"replay": {"period": row["task"], "samples": 4, "objective": objective}}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    study = study_of(runs)
    title, table = replay_tables(study)[-1]
    assert title == "fedavg: objective of the kept samples, by sample"
    assert table == {"replay": ["reservoir", "diversity"], "N 5": ["–", "1.500"], "N 20": ["–", "–"]}
    by_line = {point["strategy"]: point["kept_objective"]["mean"] for point in study.table()["points"]}
    assert by_line == {"reservoir": None, "diversity": 1.5}
    figure = objective_by_size([study])
    assert figure is not None
    assert figure.axes[0].get_title() == "Objective of the kept samples, by sample"
    assert OBJECTIVE in study.measures


def test_the_change_of_language_runs_is_in_the_perplexity_over_all_periods(tmp_path: Path) -> None:
    matrix = [[0.5, 0.0, 0.0], [0.25, 0.75, 0.0], [0.25, 0.75, 0.5]]
    kept = {"strategy": "coordinated", "iterations": 4, "capacity": 10}
    write_run(tmp_path / "none", matrix, perplexity=[90.0, 70.0, 80.0])
    write_run(tmp_path / "kept", [*matrix[:2], [0.5, 0.75, 0.5]], perplexity=[90.0, 70.0, 60.0], **kept)
    study = study_of(tmp_path)
    (point,) = study.points
    assert point.line == "coordinated, 4 iterations"
    assert study.value(point, PERPLEXITY).mean == pytest.approx(-0.25)
    assert point.by_period == pytest.approx(np.array([[math.exp(0.5 - 0.75) - 1, 0.0, 0.0]]))
    titles = [title for title, _ in replay_tables(study)]
    assert titles[0] == "fedavg: perplexity over all periods, change against no replay (80.0)"
    # On period 0 the loss rose from 0.5 to 0.75, and on period 1 it stayed: half of exp(0.25) - 1.
    assert titles[1] == "fedavg: relative forgetting of perplexity; 14.2 % without replay"
    assert columns(compare([tmp_path]))["perplexity"] == ["60.0", "80.0"]


def test_a_run_without_a_counterpart_is_left_out_of_the_changes_and_counted(runs: Path) -> None:
    write_run(runs / "five-2", [[0.5, 0.0], [0.5, 0.5]], seed=2, strategy="reservoir", capacity=5)
    write_run(runs / "twenty-1", [[0.5, 0.0]], seed=1, strategy="reservoir", capacity=20)
    comparison = compare([runs])
    (study,) = comparison.replay
    assert study.unpaired == 2
    five, twenty = study.points
    assert study.value(five, ACCURACY).values == (0.125, 0.25, None)
    assert set(study.value(twenty, ACCURACY).values) == {0.25, None}
    told = [point["by_period"] for point in study.table()["points"]]
    assert [None, None] in told[0], "JSON has no word for numbers that are none"
    assert (
        "fedavg: runs without a counterpart that has no replay, the same seed and as many periods are left out of the "
        "changes (2)"
    ) in text(comparison, 400)


def test_without_a_run_without_replay_the_figures_stand_for_themselves(runs: Path) -> None:
    study = study_of(*(runs / name for name in ("five-0", "five-1", "twenty-0")))
    assert study.reference is None
    assert study.table()["reference"] is None
    five, _ = study.points
    assert study.value(five, ACCURACY) == Statistic((0.625, 0.5))
    assert five.by_period.tolist() == [[0.5, 0.75], [0.5, 0.5]]
    (title, table), *_ = replay_tables(study)
    assert title == "fedavg: average accuracy; no run without replay to set it against"
    assert table == {"replay": ["reservoir"], "N 5": ["56.2 ± 8.8 %"], "N 20": ["75.0 %"]}
    figure = accuracy_by_size([study])
    assert figure is not None
    assert figure.axes[0].get_title() == "Average accuracy (no run without replay)"


def test_a_run_without_replay_of_other_seeds_is_no_reference(runs: Path) -> None:
    study = study_of(runs / "none-1", runs / "five-0")
    assert study.reference is None
    assert study.unpaired == 0
    assert (study.points[0].line, study.points[0].samples) == ("reservoir", 5)
    assert study.points[0].by_period.tolist() == [[0.5, 0.75]]


def test_a_period_without_test_samples_is_unknown_and_its_runs_are_paired_all_the_same(tmp_path: Path) -> None:
    for name, kept in (("none", {}), ("kept", {"strategy": "reservoir", "capacity": 5})):
        rows = write_run(tmp_path / name, [[0.5, 0.25], [0.75, 0.25]], **kept) / "metrics.jsonl"
        rows.write_text(rows.read_text().replace("0.25]", "null]"))
    study = study_of(tmp_path)
    assert (study.reference is not None, study.unpaired) == (True, 0)
    assert np.isnan(study.points[0].by_period).tolist() == [[False, True]]


def test_a_change_is_unknown_where_a_figure_is_and_a_relative_one_where_the_loss_without_replay_is_0(
    tmp_path: Path,
) -> None:
    """The last but one run with replay has no row yet, nor has the last one without."""
    losses = {"none": (None, 0.0, 0.5, 0.5, ()), "kept": (0.5, 0.5, None, (), 0.5)}
    for name, replay in (("none", {}), ("kept", {"strategy": "reservoir", "capacity": 5})):
        accuracy = [[0.5, 0.5], [0.5, 0.5]] if replay else [[0.0, 0.0], [0.0, 0.0]]
        for seed, loss in enumerate(losses[name]):
            rows = write_run(tmp_path / f"{name}-{seed}", accuracy, seed=seed, **replay) / "metrics.jsonl"
            told = [json.dumps(json.loads(line) | {"loss": loss}) + "\n" for line in rows.read_text().splitlines()]
            rows.write_text("" if loss == () else "".join(told))
    study = study_of(tmp_path)
    (point,) = study.points
    assert point.changes["all_period_loss"].values == (None,) * 5
    assert point.changes["average_accuracy"].values == (0.5, 0.5, 0.5, None, None)
    assert study.unpaired == 2
    assert np.isnan(point.by_period).all(axis=1).tolist() == [False, False, False, True, True]


def test_only_experiments_that_differ_in_nothing_but_replay_are_set_against_each_other(runs: Path) -> None:
    other = write_run(
        runs / "apart" / "run", [[0.5, 0.0], [0.5, 0.75]], stream="window", strategy="herding", capacity=5
    )
    first, second = compare([runs, other]).replay
    assert [len(first.points), len(second.points)] == [2, 1]
    assert second.reference is None
    assert first.label != second.label
    assert saved(drawn(accuracy_by_size, [first, second]), "png")


def test_runs_without_replay_or_without_periods_are_no_study(runs: Path, tmp_path: Path) -> None:
    assert compare([runs / "none-0"]).replay == ()
    static = write_run(tmp_path / "static" / "run", [[0.5]], strategy="reservoir", capacity=5)
    (static / "metrics.jsonl").write_text('{"round":1,"task":0,"accuracy":0.5}\n')
    assert compare([static]).replay == ()


def test_the_tables_have_a_line_per_strategy_and_a_column_per_size(runs: Path) -> None:
    write_run(runs / "uniform", [[0.5, 0.0], [0.25, 0.5]], strategy="naive_uniform", capacity=50, budget=5)
    (title, table), (_, loss), (_, forgetting) = replay_tables(study_of(runs))
    assert title == "fedavg: average accuracy, difference in percentage points against no replay (37.5 ± 17.7 %)"
    assert table == {
        "replay": ["naive uniform", "reservoir"],
        "N 5": ["-12.5", "+18.8 ± 8.8"],
        "N 20": ["–", "+25.0"],
    }
    assert loss["N 20"] == ["–", "-50.0 %"]
    assert forgetting["N 5"] == ["25.0 %", "0.0 %"]


def test_the_tables_are_parted_where_the_terminal_is_narrow(runs: Path) -> None:
    lines = text(compare([runs]), 60).splitlines()
    titles = ("fedavg: ", "changes", "mean ±", "rounds to")
    assert max(len(line) for line in lines if not line.startswith(titles)) <= 60
    assert "…" not in "".join(lines)


def test_rows_are_named_by_their_replay_where_it_differs(runs: Path) -> None:
    assert [entry.label for entry in compare([runs]).entries] == [
        "fedavg, reservoir, N 5",
        "fedavg, no replay",
        "fedavg, reservoir, N 20",
    ]
    assert [entry.label for entry in compare([runs / "five-0"]).entries] == ["fedavg"]


def test_rows_with_the_same_line_and_size_are_told_apart(runs: Path) -> None:
    write_run(runs / "large", [[0.5, 0.0], [0.5, 0.5]], strategy="reservoir", capacity=50, budget=5)
    study = study_of(runs)
    assert [point.samples for point in study.points] == [5, 5, 20]
    assert len(study.lines) == 2


@pytest.mark.parametrize(
    ("replay", "label", "kept"),
    [
        ({}, "none", 0),
        ({"strategy": "none", "capacity": 9}, "none", 0),
        ({"strategy": "naive_uniform", "capacity": 9, "budget": 4}, "naive uniform", 4),
        ({"strategy": "fixed_proportion", "capacity": 9, "proportion": 0.25}, "fixed proportion 0.25", 9),
        ({"strategy": "diversity", "capacity": 9, "restarts": 5, "iterations": 7}, "diversity, 5 restarts", 9),
        ({"strategy": "diversity_convex", "capacity": 9, "restarts": 5}, "diversity convex", 9),
        ({"strategy": "coordinated", "capacity": 9, "restarts": 5}, "coordinated, 1 iteration, 5 restarts", 9),
        (
            {
                "strategy": "coordinated", "capacity": 9, "iterations": 4, "targets": "each", "final": "convex",
                "restarts": 5,
            },
            "coordinated, 4 iterations, targets each, final convex",
            9,
        ),
    ],
)  # fmt: skip
def test_a_strategy_is_named_with_the_options_that_matter_to_it(replay: Any, label: str, kept: int) -> None:
    assert strategy_label(replay) == label
    assert samples_kept(replay) == kept
    assert replay_label(replay) == (f"{label}, N {kept}" if kept else "no replay")


def test_points_stand_at_their_size_with_the_deviation_over_the_seeds(runs: Path) -> None:
    figure = accuracy_by_size([study_of(runs)])
    assert figure is not None
    (axes,) = figure.axes
    (bars,) = axes.containers
    line, _, _ = bars.lines
    assert line.get_xdata().tolist() == [5.0, 20.0]
    assert line.get_ydata().tolist() == [0.1875, 0.25]
    assert axes.get_xscale() == "log"
    assert axes.get_ylabel() == "percentage points against no replay"
    assert perplexity_by_size([study_of(runs)]) is None


def test_the_page_and_the_numbers_have_the_replay(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedemu.ops.compare.page.page.COMPARISON_PLOTS", {})
    monkeypatch.setattr("fedemu.ops.compare.page.page.WIDE_COMPARISON_PLOTS", {})
    out = tmp_path / "out"
    claim_folder(out)
    comparison = compare([runs])
    page = write_comparison(comparison, out).read_text()
    assert "<h2>Replay</h2>" in page
    kept = page.replace("\N{NO-BREAK SPACE}", " ")
    assert '<td class="words">reservoir</td><td class="number">+18.8 ± 8.8</td><td class="number">+25.0</td>' in kept
    assert {path.stem for path in (out / "plots").iterdir()} == {
        "replay_accuracy",
        "replay_loss",
        "replay_forgetting",
        "replay_by_period",
    }
    (replay,) = json.loads((out / "compare.json").read_text())["replay"]
    assert (replay["reference"], replay["language"], replay["unpaired"]) == ("fedavg, no replay", False, 0)
    first, _ = replay["points"]
    assert (first["label"], first["strategy"], first["samples"]) == ("fedavg, reservoir, N 5", "reservoir", 5)
    assert first["average_accuracy_change"]["values"] == [0.125, 0.25]
    assert first["by_period"] == [[0.25, 0.0], [0.5, 0.0]]


def test_a_comparison_without_replay_has_no_section_of_it(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.ops.compare.page.page.COMPARISON_PLOTS", {})
    out = tmp_path / "out"
    claim_folder(out)
    comparison = compare([runs / "none-0"])
    assert "<h2>Replay</h2>" not in write_comparison(comparison, out).read_text()
    assert [name for name, draw in PLOTS.items() if draw(comparison.replay) is not None] == []
