"""The runs of a sweep as a table for other programs: ``sweep.csv``, one line for each run."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedemu.coordinator.record.run import read_run
from fedemu.ops.compare.entry import FIGURES, ROUNDS_TO, figures_of
from fedemu.ops.experiment.toml_text import toml_value
from fedemu.ops.results.own_measures import last_measures
from fedemu.ops.sweeps.plan import Planned
from fedemu.protocol.errors import FedemuError
from fedemu.protocol.host.files import write_whole
from fedemu.protocol.host.paths import is_folder

TABLE = "sweep.csv"


def write_table(folder: Path, runs: Sequence[Planned]) -> Path:
    """Write ``sweep.csv``: the experiment, the grid's values, the seed, the outcome and the figures of every run.

    Shares are shares of 1. A figure that a run lacks is empty, and a run that is not there is ``missing``. A value of
    the grid stands in the column of its key, or in ``set KEY`` if another column has that name, as ``rounds``. What a
    method measures itself has the value of the run's last round with it, in columns such as ``device_metrics.norm``.
    """
    figures = [key for key in FIGURES if key not in ROUNDS_TO]  # one run alone has no target
    found = [_of_run(folder / run.folder, figures) for run in runs]
    own = sorted({column for _, measured in found for column in measured})
    before = ["part", "experiment"]
    behind = ["seed", "outcome", "rounds", *figures, *own, "model_digest", "directory"]
    keys = dict.fromkeys(key for run in runs for key, _ in (*run.choices, *run.listed))
    columns = {key: f"set {key}" if key in (*before, *behind) else key for key in keys}
    text = io.StringIO()
    table = csv.DictWriter(text, [*before, *columns.values(), *behind])
    table.writeheader()
    for run, (told, measured) in zip(runs, found, strict=True):
        choices = {columns[key]: _written(value) for key, value in (*run.choices, *run.listed)}
        named = {"part": run.part, "experiment": run.name or run.experiment, "seed": run.seed, **choices}
        table.writerow({**named, **told, **measured, "directory": str(run.folder)})
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
    return sum(is_folder(folder / directory) for directory in others)


def _of_run(directory: Path, figures: Sequence[str]) -> tuple[Mapping[str, Any], Mapping[str, float]]:
    """The outcome and the figures of a run, and what its method measured itself, by column."""
    try:
        run = read_run(directory)
    except FedemuError:
        return {"outcome": "damaged" if is_folder(directory) else "missing"}, {}
    values = figures_of([run], None)
    told = {
        "outcome": run.outcome,
        "rounds": len(run.rows),
        "model_digest": run.summary.get("model_digest"),
        **{key: values[key].mean for key in figures},
    }
    return told, {measure.column: value for measure, value in last_measures(run.rows).items()}


def _written(value: Any) -> str:
    return value if isinstance(value, str) else toml_value(value)
