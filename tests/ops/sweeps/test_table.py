"""The table of a sweep: the columns of what was varied."""

from __future__ import annotations

import csv
from pathlib import Path

from fedemu.ops.sweeps.plan import Part, runs_of
from fedemu.ops.sweeps.table import others_in_table, write_table


def test_a_value_of_the_grid_keeps_its_column_beside_the_rounds_of_the_run(tmp_path: Path) -> None:
    grid = {"local.lr": [0.1], "data.dataset": ["mnist"], "rounds": [1, 2]}
    part = Part(name="part", presets=["digits"], methods=["own.py:Mine"], grid=grid)
    runs = runs_of(part)
    done = tmp_path / runs[1].folder
    done.mkdir(parents=True)
    (done / "metrics.jsonl").write_text('{"round": 1, "accuracy": 0.25, "bytes_up": 7}\n')
    (done / "summary.json").write_text('{"outcome": "completed", "model_digest": "37eaf5ba"}')
    heading, *lines = csv.reader(write_table(tmp_path, runs).read_text().splitlines())
    assert len({*heading}) == len(heading)
    assert not [column for column in heading if column.startswith("rounds_to_")], "they need a target"
    rows = [dict(zip(heading, line, strict=True)) for line in lines]
    first = {"part": "part", "experiment": "digits+Mine", "seed": "1", "local.lr": "0.1", "data.dataset": "mnist"}
    missing = {"set rounds": "1", "outcome": "missing", "directory": str(runs[0].folder)}
    there = {"set rounds": "2", "rounds": "1", "outcome": "completed", "directory": str(runs[1].folder)}
    figures = {"final_accuracy": "0.25", "best_accuracy": "0.25", "bytes_up": "7.0", "model_digest": "37eaf5ba"}
    assert [{key: value for key, value in row.items() if value} for row in rows] == [
        first | missing,
        first | there | figures,
    ]


def test_what_methods_measure_themselves_has_columns_with_the_last_value_of_each_run(tmp_path: Path) -> None:
    runs = runs_of(Part(name="part", presets=["digits"], seeds=[1, 2, 3]))
    told = [
        ['"device_metrics": {"loss": 2.0, "norm": 1.5}, "remarks": {"norm": 4, "b": 1, "a": 1, "replay": {"kept": 9}}'],
        ['"device_metrics": {"norm": 0.5}', '"device_metrics": {"norm": 0.25}', '"device_metrics": {}'],
        ['"device_metrics": {"loss": 1.0}'],
    ]
    for run, rows in zip(runs, told, strict=True):
        (tmp_path / run.folder).mkdir(parents=True)
        lines = [f'{{"round": {number}, {row}}}\n' for number, row in enumerate(rows, 1)]
        (tmp_path / run.folder / "metrics.jsonl").write_text("".join(lines))
    with write_table(tmp_path, runs).open(newline="") as file:
        found = [*csv.DictReader(file)]
    own = [column for column in found[0] if column.partition(".")[0] in ("device_metrics", "remarks")]
    assert own == ["device_metrics.norm", "remarks.a", "remarks.b", "remarks.norm"]
    assert [row["device_metrics.norm"] for row in found] == ["1.5", "0.25", ""]
    assert [row["remarks.norm"] for row in found] == ["4.0", "", ""]


def test_the_runs_of_an_earlier_sweep_that_are_still_there_are_counted(tmp_path: Path) -> None:
    runs = runs_of(Part(name="part", experiments=["digits"], seeds=[1, 2, 3]))
    assert others_in_table(tmp_path, runs) == 0
    for run in runs[:2]:
        (tmp_path / run.folder).mkdir(parents=True)
    table = write_table(tmp_path, runs)
    with table.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [(row["experiment"], row["outcome"]) for row in rows] == [
        ("digits", "damaged"),
        ("digits", "damaged"),
        ("digits", "missing"),
    ]
    assert (others_in_table(tmp_path, runs), others_in_table(tmp_path, runs[:1])) == (0, 1)
    for content in (b"\xff\xfe", b"part,seed\n1,2\n"):
        table.write_bytes(content)
        assert others_in_table(tmp_path, runs[:1]) == 0, "it is no table of a sweep any more"
