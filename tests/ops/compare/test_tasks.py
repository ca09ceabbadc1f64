"""Class-incremental runs are compared by MFCL's measures, and by the costs of the first task and of later ones."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedemu.ops.compare.beside import beside_best
from fedemu.ops.compare.cells import cosine, number, seconds, size
from fedemu.ops.compare.compare import compare
from fedemu.ops.compare.entry import Statistic
from fedemu.ops.compare.page.page import claim_folder, write_comparison
from fedemu.ops.compare.page.tasks import accuracy_by_task
from fedemu.ops.compare.tasks import COSTS, QUALITY, TaskStudy
from fedemu.ops.compare.text import explanation, task_table, text
from fedemu.ops.experiment.toml_text import toml_text
from fedemu.ops.pages.style import drawn


def write_run(
    directory: Path,
    accuracy: Sequence[Sequence[float]],
    *,
    seed: int = 0,
    jobs: Sequence[float] = (),
    dataset: str = "digits",
    kind: str = "classes",
    unknown: Sequence[str] = (),
    **algorithm: Any,
) -> Path:
    """Write a run with two rounds per task and test sets of one size. ``jobs`` are the server seconds by round.

    A device takes 1 and 2 seconds in task 1, and 3 and 4 later; the coordinator 0.5 beside its jobs, and 0.75 later.
    """
    directory.mkdir(parents=True)
    experiment = {
        "name": directory.name,
        "seed": seed,
        "algorithm": {"name": "fedavg", **algorithm},
        "data": {"dataset": dataset},
        "stream": {"kind": kind, "tasks": len(accuracy[0])},
    }
    (directory / "config.toml").write_text(toml_text(experiment))
    rows = []
    for round in range(1, 2 * len(accuracy) + 1):
        task = (round - 1) // 2
        later = task > 0
        values = accuracy[task]
        job = jobs[round - 1] if jobs else 0.0
        row = {
            "round": round,
            "task": task,
            "accuracy": float(np.mean(values)),
            "seen_accuracy": float(np.mean(values[: task + 1])),
            "period_accuracy": list(values),
            "server_seconds": job,
            "coordinator_seconds": job + 0.5 + 0.25 * later,
            "device_seconds": 1.0 + (round - 1) % 2 + 2 * later,
            "selected": 5,
            "accepted": 3,
            "rejected": 1,
            "bytes_down": 5000 * (1 + later),
            "bytes_up": 400 * (1 + later),
        }
        rows.append({key: value for key, value in row.items() if key not in unknown})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "summary.json").write_text(json.dumps({"outcome": "completed"}))
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """FedAvg with two seeds, and MFCL, whose generator is trained in the first round of a task."""
    write_run(tmp_path / "fedavg-0", [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.75]], seed=0)
    write_run(tmp_path / "fedavg-1", [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.25, 0.5]], seed=1)
    jobs = [0.0, 0.0, 30.0, 0.0, 40.0, 0.0]
    write_run(tmp_path / "mfcl", [[1.0, 0.0, 0.0], [0.75, 0.75, 0.0], [0.75, 0.5, 0.25]], jobs=jobs, name="mfcl")
    return tmp_path


def study_of(*paths: Path) -> TaskStudy:
    (study,) = compare(paths).tasks
    return study


def test_the_average_is_over_the_accuracies_on_all_that_was_seen_after_each_task(runs: Path) -> None:
    fedavg, mfcl = study_of(runs).methods
    assert fedavg.seen == pytest.approx(np.array([[1.0, 0.5, 0.25], [1.0, 0.5, 0.25]]))
    assert mfcl.seen == pytest.approx(np.array([[1.0, 0.75, 0.5]]))
    assert mfcl.figures["average_incremental_accuracy"].values == (0.75,)
    # For tasks 1 and 2: the best of earlier models minus the last.
    assert fedavg.figures["average_forgetting"].values == (1.0, (1.0 + 0.25) / 2)
    assert mfcl.figures["average_forgetting"].values == (0.25,)
    write_run(runs / "mfcl-1", [[1.0, 0.0, 0.0]], seed=1, name="mfcl")
    assert study_of(runs).methods[1].table()["seen_accuracy"] == [[1.0, 0.75, 0.5], [1.0, None, None]]


def test_costs_are_those_of_the_first_task_and_of_later_ones(runs: Path) -> None:
    fedavg, mfcl = study_of(runs).methods
    assert {key: figure.values[0] for key, figure in mfcl.costs.items()} == {
        "device_seconds_first": 1.5,
        "device_seconds_later": 3.5,
        "coordinator_seconds_first": 0.5,
        "coordinator_seconds_later": 0.75,
        "server_job_seconds": 35.0,
        "bytes_down_first": 1000.0,
        "bytes_down_later": 2000.0,
        "bytes_up_first": 100.0,
        "bytes_up_later": 200.0,
    }
    assert fedavg.costs["server_job_seconds"].values == (None, None)


def test_a_server_job_of_every_round_is_part_of_the_coordinators_time(tmp_path: Path) -> None:
    (method,) = study_of(write_run(tmp_path / "run", [[1.0, 0.0], [0.5, 0.5]], jobs=[2.0, 2.0, 4.0, 0.0])).methods
    assert method.costs["server_job_seconds"].values == (None,)
    assert method.costs["coordinator_seconds_first"].values == (2.5,)
    assert method.costs["coordinator_seconds_later"].values == (2.75,)


def test_the_time_by_round_is_the_median_which_a_slow_first_round_does_not_change(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [[1.0, 0.0]] + 2 * [[0.5, 0.5]])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[2] |= {"device_seconds": 99.0, "coordinator_seconds": 99.0, "server_seconds": None}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (method,) = study_of(run).methods
    assert method.costs["device_seconds_later"].values == (4.0,)
    assert method.costs["coordinator_seconds_later"].values == (0.75,)


def test_a_run_that_goes_on_or_knows_no_times_has_what_there_is(runs: Path, tmp_path: Path) -> None:
    unknown = ["device_seconds", "coordinator_seconds", "rejected", "bytes_down"]
    write_run(tmp_path / "old", [[1.0, 0.0, 0.0]], name="fedprox", unknown=unknown)
    *_, started = study_of(runs).methods
    assert started.label == "fedprox"
    assert started.seen.tolist() == [[1.0]]
    assert started.figures["average_forgetting"].values == (None,)
    assert started.costs["bytes_up_first"].values == (400 / 3,)
    missing = {key for key, figure in started.costs.items() if figure.values == (None,)}
    assert missing == {key for key in COSTS if "seconds" in key or "later" in key or "bytes_down" in key}
    _, table = task_table(study_of(runs))
    assert table["device, later"][-1] == "–"
    assert table["tasks"] == ["3 of 3", "3 of 3", "1 of 3"]


def test_only_streams_of_classes_are_a_study_and_each_data_set_is_its_own(runs: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "drift", [[1.0, 0.0], [0.5, 0.5]], kind="drift")
    write_run(tmp_path / "mnist", [[1.0, 0.0], [0.5, 0.5]], dataset="mnist", name="mfcl")
    comparison = compare([runs])
    assert [(study.dataset, [method.label for method in study.methods]) for study in comparison.tasks] == [
        ("digits", ["fedavg", "mfcl"]),
        ("mnist", ["mfcl"]),
    ]
    assert compare([tmp_path / "drift"]).tasks == ()


def test_the_table_is_that_of_the_paper_with_the_traffic(runs: Path) -> None:
    comparison = compare([runs])
    title, table = task_table(comparison.tasks[0])
    assert title == "classes of digits, task by task"
    assert list(zip(*table.values(), strict=True)) == [
        ("fedavg", "58.3 %", "81.2 ± 26.5 %", "1.50 s", "3.50 s", "500 ms", "750 ms", "–",
         "1.0 kB", "2.0 kB", "100.0 B", "200.0 B"),
        ("mfcl", "75.0 %", "25.0 %", "1.50 s", "3.50 s", "500 ms", "750 ms", "35.0 s",
         "1.0 kB", "2.0 kB", "100.0 B", "200.0 B"),
    ]  # fmt: skip
    assert "server job" not in task_table(study_of(runs / "fedavg-0"))[1]
    assert any(line.startswith("first and later tasks: ") for line in explanation(comparison))
    assert title in text(comparison, 400).splitlines()


@pytest.mark.parametrize(
    ("kind", "cells"), [("classes", ["-29.2, p 0.258", "best"]), ("drift", None)], ids=["classes", "drift"]
)
def test_the_average_incremental_accuracy_is_tested_where_a_table_shows_it(
    kind: str, cells: list[str] | None, tmp_path: Path
) -> None:
    """The differences are -1/6 and -5/12, so t is -7/3 with one degree of freedom."""
    for seed, second in enumerate(([0.0, 1.0, 0.0], [0.5, 0.5, 0.0])):
        write_run(tmp_path / f"fedavg-{seed}", [[1.0, 0.0, 0.0], second, [0.0, 0.25, 0.5]], seed=seed, kind=kind)
    for seed, kept in enumerate((0.5, 1.0)):
        rows = [[1.0, 0.0, 0.0], [0.5 + kept / 2, 0.5 + kept / 2, 0.0], [kept, kept, kept]]
        write_run(tmp_path / f"mfcl-{seed}", rows, seed=seed, kind=kind, name="mfcl")
    told = beside_best(compare([tmp_path]).entries)
    assert told is not None
    assert told[1].get("average incremental accuracy") == cells
    assert "average accuracy" in told[1]


@pytest.mark.parametrize(
    ("value", "cell"), [(0.0042, "4.2 ms"), (0.045, "45 ms"), (1.204, "1.20 s"), (17.82, "17.8 s"), (330.2, "330 s")]
)
def test_seconds_are_written_with_two_or_three_digits(value: float, cell: str) -> None:
    assert seconds(Statistic((value,))) == cell


@pytest.mark.parametrize(
    ("value", "cell"), [(0.1234, "0.123"), (-9.5, "-9.500"), (10.0, "10.0"), (-999.94, "-999.9"), (1000.0, "1000")]
)
def test_a_perplexity_is_written_with_fewer_decimals_the_larger_it_is(value: float, cell: str) -> None:
    assert number(Statistic((value,))) == cell
    assert cosine(Statistic((value,))) == f"{value:.3f}"


@pytest.mark.parametrize(
    ("value", "cell"), [(999.0, "999.0 B"), (999_949.0, "999.9 kB"), (999_960.0, "1.0 MB"), (5e15, "5000.0 TB")]
)
def test_a_size_is_written_in_the_unit_in_which_it_has_three_digits_at_most(value: float, cell: str) -> None:
    assert size(Statistic((value,))) == cell


def test_a_line_is_the_mean_over_the_seeds_that_have_come_to_a_task_and_a_band_of_one_deviation(tmp_path: Path) -> None:
    write_run(tmp_path / "0", [[1.0, 0.0], [0.5, 0.5]], seed=0)
    write_run(tmp_path / "1", [[0.5, 0.0]], seed=1)
    (write_run(tmp_path / "2", [[0.0, 0.0]], seed=2) / "metrics.jsonl").write_text("")
    figure = accuracy_by_task([study_of(tmp_path)])
    assert figure is not None
    (axes,) = figure.axes
    (line,) = axes.lines
    assert line.get_xdata().tolist() == [1.0, 2.0]
    assert line.get_ydata().tolist() == [0.75, 0.5]
    (band,) = axes.collections
    spread = 0.5 / 2**0.5
    heights = sorted({round(float(y), 6) for _, y in band.get_paths()[0].vertices})
    assert heights == pytest.approx([0.75 - spread, 0.5, 0.75 + spread], abs=1e-6)
    assert drawn(accuracy_by_task, ()) is None


def test_fifteen_methods_on_two_data_sets_have_looks_of_their_own_and_one_legend(tmp_path: Path) -> None:
    for dataset in ("digits", "mnist"):
        for place in range(15):
            write_run(tmp_path / f"{dataset}-{place}", [[1.0]], dataset=dataset, name=f"method_{place}")
    figure = accuracy_by_task(compare([tmp_path]).tasks)
    assert figure is not None
    looks = [
        [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines] for axes in figure.axes
    ]
    assert looks[0] == looks[1]
    assert len({(colour, marker) for colour, _, marker in looks[0]}) == 15
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 15


def test_the_page_and_the_numbers_have_the_tasks(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for plots in ("COMPARISON_PLOTS", "WIDE_COMPARISON_PLOTS"):
        monkeypatch.setattr(f"fedemu.ops.compare.page.page.{plots}", {})
    out = tmp_path / "out"
    claim_folder(out)
    page = write_comparison(compare([runs]), out).read_text()
    assert "<h2>Tasks</h2>" in page
    assert '<td class="number">35.0\N{NO-BREAK SPACE}s</td>' in page
    assert {path.stem for path in (out / "plots").iterdir()} == {"tasks_accuracy"}
    (study,) = json.loads((out / "compare.json").read_text())["tasks"]
    assert study["dataset"] == "digits"
    assert [method["label"] for method in study["methods"]] == ["fedavg", "mfcl"]
    mfcl = study["methods"][1]
    assert mfcl["seen_accuracy"] == [[1.0, 0.75, 0.5]]
    assert mfcl["server_job_seconds"] == {"mean": 35.0, "deviation": None, "values": [35.0]}
    assert mfcl.keys() == {"label", "seen_accuracy", *QUALITY, *COSTS}
    write_comparison(compare([write_run(tmp_path / "static", [[1.0, 0.0]], kind="drift")]), out)
    assert "<h2>Tasks</h2>" not in (out / "compare.html").read_text()
    assert list((out / "plots").iterdir()) == []
