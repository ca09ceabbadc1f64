"""The runs of a sweep as a table for other programs: ``sweep.csv``, one line for each run."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedemu.coordinator.record.run import read_run
from fedemu.ops.compare.entry import FIGURES, figures_of, outcome_of
from fedemu.ops.experiment.toml_text import toml_value
from fedemu.ops.sweeps.plan import Planned
from fedemu.protocol.errors import FedemuError
from fedemu.protocol.host.files import write_whole

TABLE = "sweep.csv"
_LEFT_OUT = ("rounds_to_50", "rounds_to_75", "rounds_to_95")
"""Figures that need a target, which one run alone has not."""


def write_table(folder: Path, runs: Sequence[Planned]) -> Path:
    """Write ``sweep.csv``: the experiment, the grid's values, the seed, the outcome and the figures of every run.

    Shares are shares of 1. A figure that a run lacks is empty, and a run that is not there is ``missing``. A value of
    the grid stands in the column of its key, or in ``set KEY`` if another column has that name, as ``rounds``.
    """
    figures = [key for key in FIGURES if key not in _LEFT_OUT]
    before, behind = ["part", "experiment"], ["seed", "outcome", "rounds", *figures, "model_digest", "directory"]
    keys = dict.fromkeys(key for run in runs for key, _ in (*run.choices, *run.listed))
    columns = {key: f"set {key}" if key in (*before, *behind) else key for key in keys}
    text = io.StringIO()
    table = csv.DictWriter(text, [*before, *columns.values(), *behind])
    table.writeheader()
    for run in runs:
        choices = {columns[key]: _written(value) for key, value in (*run.choices, *run.listed)}
        named = {"part": run.part, "experiment": run.name or run.experiment, "seed": run.seed, **choices}
        table.writerow({**named, **_of_run(folder / run.folder, figures), "directory": str(run.folder)})
    write_whole(folder / TABLE, text.getvalue())
    return folder / TABLE


def others_in_table(folder: Path, runs: Sequence[Planned]) -> int:
    """The number of runs in an earlier table of this folder that are still there and are none of ``runs``."""
    try:
        with (folder / TABLE).open(newline="", encoding="utf-8") as file:
            earlier = {row.get("directory") or "" for row in csv.DictReader(file)}
    except (OSError, ValueError, csv.Error):  # somebody may have saved it in another form
        return 0
    others = earlier - {str(run.folder) for run in runs} - {""}
    return sum((folder / directory).is_dir() for directory in others)


def _of_run(directory: Path, figures: Sequence[str]) -> Mapping[str, Any]:
    try:
        run = read_run(directory)
    except FedemuError:
        return {"outcome": "damaged" if directory.is_dir() else "missing"}
    values = figures_of([run], None)
    return {
        "outcome": outcome_of(run),
        "rounds": len(run.rows),
        "model_digest": (run.summary or {}).get("model_digest"),
        **{key: values[key].mean for key in figures},
    }


def _written(value: Any) -> str:
    return value if isinstance(value, str) else toml_value(value)
