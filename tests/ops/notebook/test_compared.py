"""What a notebook shows of runs side by side."""

from __future__ import annotations

from pathlib import Path

import fedemu
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run_directory import RunDirectory
from fedemu.ops.compare.text import further_tables
from fedemu.ops.experiment.sources import load_experiment, write_frozen


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


def write_run(folder: Path, method: str, seed: int, end: float) -> None:
    """A run of two tasks of one round each. ``end`` is the accuracy after the second one."""
    folder.mkdir()
    experiment = {"seed": seed, "rounds": 2, "algorithm": {"name": method}}
    stream = {"kind": "classes", "tasks": 2, "rounds_per_task": 1}
    write_frozen(load_experiment({**experiment, "stream": stream}, [], {})[0], folder)
    with RunDirectory(folder) as run:
        for task, (accuracy, seen) in enumerate(((0.5, 1.0), (end, end))):
            run.metrics(
                Row(round=task + 1, task=task, accuracy=accuracy, seen_accuracy=seen, period_accuracy=(accuracy, end))
            )
