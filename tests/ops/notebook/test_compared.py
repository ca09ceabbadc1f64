"""What a notebook shows of runs side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedemu
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run_directory import RunDirectory
from fedemu.ops.compare.text import further_tables
from fedemu.ops.experiment.sources import load_experiment, write_frozen
from fedemu.protocol.errors import ConfigurationError


def test_a_notebook_shows_the_paired_tests_and_the_table_of_tasks_as_a_terminal_does(tmp_path: Path) -> None:
    for method, ends in {"fedavg": (0.25, 0.5), "fedntd": (0.5, 0.625)}.items():
        for seed, end in enumerate(ends):
            write_run(tmp_path / f"{method}-{seed}", method, seed, end)
    compared = fedemu.compare(tmp_path)
    html = compared._repr_html_()
    assert [title for title, _ in further_tables(compared.comparison)] == [
        "difference to the best in percentage points, over 2 shared seeds, and p of a paired t-test (Holm)",
        "classes of digits, task by task",
    ]
    for title, columns in further_tables(compared.comparison):
        assert title in repr(compared)
        assert f">{title}</div>" in html
        for cells in columns.values():
            assert all(f">{cell}</td>" in html for cell in cells)
    assert html.count("<table>") == 3
    assert html.endswith("stands apart</div>"), "the notes come last"


def test_the_frame_of_a_comparison_has_own_measures(tmp_path: Path) -> None:
    for seed, distance in enumerate((1.0, 3.0)):
        own = Row(round=3, device_metrics={"distance": distance}, remarks={"norm": {"first": 2.0, "phase": "warm"}})
        write_run(tmp_path / f"mine-{seed}", "fedntd", seed, 0.5, own)
    write_run(tmp_path / "fedavg-0", "fedavg", 0, 0.5)
    frame = fedemu.compare(tmp_path / "mine-0", tmp_path / "mine-1", tmp_path / "fedavg-0").frame()
    names = [name for name in frame if name.startswith(("device_metrics.", "remarks."))]
    measured = {name: frame[name][0] for name in names}
    assert measured == {"device_metrics.distance": 2.0, "device_metrics.distance_sd": 2**0.5} | {
        "remarks.norm.first": 2.0,
        "remarks.norm.first_sd": 0.0,
    }
    assert frame[names].iloc[1].isna().all(), "FedAvg has none of these"


def test_a_notebook_shows_the_warnings_of_a_comparison(tmp_path: Path) -> None:
    for folder in ("one", "again"):
        write_run(tmp_path / folder, "fedavg", 0, 0.5)
    compared = fedemu.compare(tmp_path / "one", tmp_path / "again")
    warning = f"warning: {tmp_path / 'again'} is left out: it is the same experiment and seed as {tmp_path / 'one'}"
    assert repr(compared).splitlines()[0] == warning
    assert compared._repr_html_().startswith(f"<div>{warning}</div>")
    assert warning not in compared.to_text(), "the tables alone, as the command prints them to stdout"


def test_a_page_that_cannot_be_written_advises_an_argument(tmp_path: Path) -> None:
    write_run(tmp_path / "one", "fedavg", 0, 0.5)
    with pytest.raises(ConfigurationError, match=r"one exists and holds no comparison; choose .* with out$"):
        fedemu.compare(tmp_path / "one").page(tmp_path / "one")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"choose another folder with out$"):
        fedemu.compare(tmp_path / "one").page(tmp_path / "file" / "page")


def write_run(folder: Path, method: str, seed: int, end: float, own: Row | None = None) -> None:
    """A run of two tasks of one round each. ``end`` is the accuracy after the second one; ``own`` is one more row."""
    folder.mkdir()
    experiment = {"seed": seed, "rounds": 2, "algorithm": {"name": method}}
    stream = {"kind": "classes", "tasks": 2, "rounds_per_task": 1}
    write_frozen(load_experiment({**experiment, "stream": stream}, [], {})[0], folder)
    with RunDirectory(folder) as run:
        for task, (accuracy, seen) in enumerate(((0.5, 1.0), (end, end))):
            run.metrics(
                Row(round=task + 1, task=task, accuracy=accuracy, seen_accuracy=seen, period_accuracy=(accuracy, end))
            )
        if own is not None:
            run.metrics(own)
