"""The table of a sweep: the columns of what was varied."""

from __future__ import annotations

import csv
from pathlib import Path

from fedemu.ops.sweeps.plan import Part, runs_of
from fedemu.ops.sweeps.table import write_table


def test_a_value_of_the_grid_keeps_its_column_beside_the_rounds_of_the_run(tmp_path: Path) -> None:
    part = Part(name="part", experiments=["digits"], grid={"local.lr": [0.1], "rounds": [1, 2]})
    runs = runs_of(part)
    done = tmp_path / runs[1].folder
    done.mkdir(parents=True)
    (done / "metrics.jsonl").write_text('{"round": 1, "accuracy": 0.25, "bytes_up": 7}\n')
    heading, *lines = csv.reader(write_table(tmp_path, runs).read_text().splitlines())
    assert len({*heading}) == len(heading)
    rows = [dict(zip(heading, line, strict=True)) for line in lines]
    first = {"part": "part", "experiment": "digits", "seed": "1", "local.lr": "0.1"}
    missing = {"set rounds": "1", "outcome": "missing", "directory": str(runs[0].folder)}
    there = {"set rounds": "2", "rounds": "1", "outcome": "unfinished", "directory": str(runs[1].folder)}
    figures = {"final_accuracy": "0.25", "best_accuracy": "0.25", "bytes_up": "7.0"}
    assert [{key: value for key, value in row.items() if value} for row in rows] == [
        first | missing,
        first | there | figures,
    ]
