"""The picture and the tables in which a comparison shows what methods of one's own measure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedemu.ops.compare.compare import compare
from fedemu.ops.compare.page.measures import measures
from fedemu.ops.compare.page.page import write_comparison
from fedemu.ops.compare.text import further_tables
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import write_frozen
from fedemu.ops.pages.behind import data_behind
from fedemu.ops.pages.style import drawn


def write_run(directory: Path, drifts: Sequence[float | None], lr: float, seed: int) -> None:
    directory.mkdir(parents=True)
    write_frozen(Experiment.parse({"name": "run", "local": {"lr": lr}, "seed": seed}), directory)
    rows = [
        {
            "round": round,
            "accuracy": 0.5,
            "device_metrics": {"loss": 1.0, **({} if drift is None else {"drift": drift})},
            "remarks": {"replay": {"devices": 3}, **({"moved": 2.0 * round} if lr == 0.1 else {})},
        }
        for round, drift in enumerate(drifts, 1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "summary.json").write_text(json.dumps({"outcome": "completed"}))


def shown(folders: Sequence[Path]) -> tuple[Any, ...]:
    figure = drawn(measures, compare(folders))
    assert figure is not None
    named = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    data = [(datum.panel, datum.series, datum.x, datum.y, datum.low, datum.high) for datum in data_behind(figure)]
    return named, data


def test_each_measure_is_compared_as_mean_and_band_over_the_seeds(tmp_path: Path) -> None:
    write_run(tmp_path / "slow" / "seed-1", [1.0, 3.0], 0.1, 1)
    write_run(tmp_path / "slow" / "seed-2", [1.0, 3.0], 0.1, 2)
    write_run(tmp_path / "fast" / "seed-1", [5.0, None, 7.0], 0.5, 1)
    named, data = shown([tmp_path / "slow", tmp_path / "fast"])
    slow, fast = named
    assert data == [
        ("drift", slow, 1, 1.0, None, None),
        ("drift", slow, 2, 3.0, None, None),
        ("drift", fast, 1, 5.0, None, None),
        ("drift", fast, 3, 7.0, None, None),
        ("moved", slow, 1, 2.0, None, None),
        ("moved", slow, 2, 4.0, None, None),
    ]


def test_the_band_is_one_deviation_of_the_seeds(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "seed-1", [1.0, 3.0], 0.5, 1)
    write_run(tmp_path / "runs" / "seed-2", [3.0, 3.0], 0.5, 2)
    _, data = shown([tmp_path / "runs"])
    assert [(x, y) for _, _, x, y, _, _ in data] == [(1, 2.0), (2, 3.0)]
    assert data[0][4:] == (2.0 - 2**0.5, 2.0 + 2**0.5)
    figure = drawn(measures, compare([tmp_path / "runs"]))
    assert figure is not None
    assert {datum.y_name for datum in data_behind(figure)} == {"drift"}, "a single measure names the axis"


def test_the_last_values_of_measures_are_a_table_for_people_and_numbers_for_programs(tmp_path: Path) -> None:
    write_run(tmp_path / "slow" / "seed-1", [1.0, 3.0], 0.1, 1)
    write_run(tmp_path / "slow" / "seed-2", [1.0, 5.0, None], 0.1, 2)
    write_run(tmp_path / "fast" / "seed-1", [5.0, None, 2.5e-7], 0.5, 1)
    comparison = compare([tmp_path / "slow", tmp_path / "fast"])
    ((title, table),) = [each for each in further_tables(comparison) if "measured" in each[0]]
    assert title == "what devices and methods measured, in the last round that has it"
    assert {name: column for name, column in table.items() if name != "experiment"} == {
        "device_metrics.drift": ["4.000 ± 1.414", "2.50 · 10^-7"],
        "remarks.moved": ["5.000 ± 1.414", "–"],
    }
    slow, fast = comparison.table()["rows"]
    assert slow["measures"]["device_metrics.drift"] == {"mean": 4.0, "deviation": 2**0.5, "values": [3.0, 5.0]}
    assert slow["measures"]["remarks.moved"]["values"] == [4.0, 6.0]
    assert fast["measures"]["remarks.moved"] == {"mean": None, "deviation": None, "values": [None]}


def test_the_page_shows_picture_and_table_only_where_something_was_measured(tmp_path: Path) -> None:
    write_run(tmp_path / "told", [1.0, 3.0], 0.5, 1)
    write_run(tmp_path / "silent", [None, None], 0.5, 1)
    for name, there in (("told", True), ("silent", False)):
        out = tmp_path / f"{name}-compare"
        (out / "plots").mkdir(parents=True)
        page = write_comparison(compare([tmp_path / name]), out).read_text()
        assert (out / "plots" / "measures.png").exists() is there
        assert ("measures" in page) is there
        assert ("device_metrics.drift" in page) is there
