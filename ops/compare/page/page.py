"""Writes a comparison to a folder: a self-contained page, its pictures, and the numbers for other programs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedemu.ops.compare.beside import beside_best
from fedemu.ops.compare.compare import Comparison
from fedemu.ops.compare.measured import measured_table
from fedemu.ops.compare.page.experiments import COMPARISON_PLOTS, WIDE_COMPARISON_PLOTS
from fedemu.ops.compare.page.head import head, swatches
from fedemu.ops.compare.page.measures import MEASURE_PLOTS
from fedemu.ops.compare.page.replay import REPLAY_PLOTS, WIDE_REPLAY_PLOTS
from fedemu.ops.compare.page.tasks import WIDE_TASK_PLOTS
from fedemu.ops.compare.text import TO_THE_LEFT, columns, explanation, replay_tables, task_table
from fedemu.ops.pages.head import Fact
from fedemu.ops.pages.page import render
from fedemu.ops.pages.parts import Draw, Kind, Table, bound, draw_all
from fedemu.ops.results.words import command_again, date_of, table_of
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import usable, whole_name, write_for_people
from fedemu.protocol.host.paths import exists, is_file, is_folder

NUMBERS, PAGE = "compare.json", "compare.html"
_WIDE_PLOTS: Mapping[str, Callable[[Comparison], Figure | None]] = {**WIDE_COMPARISON_PLOTS, **MEASURE_PLOTS}
_PLOTS = (*COMPARISON_PLOTS, *_WIDE_PLOTS, *REPLAY_PLOTS, *WIDE_REPLAY_PLOTS, *WIDE_TASK_PLOTS)
"""The names of all plots of a comparison. Those of one of several have its name before them."""

Columns = Mapping[str, list[str]]
"""A table by column: each title with one cell per row."""


def claim_folder(out: Path) -> None:
    """Make the folder ``out`` ready. Raises ConfigurationError if it holds anything but an earlier comparison.

    The earlier one may have been ended before it was whole.
    """
    with usable(out, "choose another folder with --out"):
        if exists(out) and not (is_folder(out) and (is_file(out / NUMBERS) or _is_begun(out))):
            raise ConfigurationError(f"{out} exists and holds no comparison; choose another folder with --out")
        (out / "plots").mkdir(parents=True, exist_ok=True)
        for place in (out, out / "plots"):
            if not os.access(place, os.W_OK):
                raise ConfigurationError(f"{place} is read-only; choose another folder with --out")


def all_figures(comparison: Comparison) -> dict[str, Draw]:
    """All figures of a comparison by name. It need not have data for all of them."""
    return {
        **bound({**COMPARISON_PLOTS, **_WIDE_PLOTS}, comparison),
        **bound(WIDE_TASK_PLOTS, comparison.tasks),
        **bound({**REPLAY_PLOTS, **WIDE_REPLAY_PLOTS}, comparison.replay),
    }


def write_comparison(comparison: Comparison, out: Path) -> Path:
    """Write ``compare.html``, ``compare.json`` and ``plots/*.png`` into a folder that ``claim_folder`` made ready.

    Returns the path of the page. Raises FedemuError if the disk does not take a file.
    """
    _remove_stale(out, "")
    shown = _shown(comparison, out / "plots", head(comparison, out))
    return _write(out, comparison.table(), {"parts": [shown], "overview": None})


def write_parts(parts: Mapping[str, Comparison], overview: Columns, note: str, out: Path) -> Path:
    """Write one page that holds several comparisons, each by its name, after a table of them all and a note on it.

    ``compare.json`` has them by their names. Otherwise as ``write_comparison``.
    """
    shown = []
    for name, comparison in parts.items():
        _remove_stale(out, f"{name}-")
        facts = head(comparison, out.parent / name / "compare")
        shown.append({"name": name, **_shown(comparison, out / "plots", facts, f"{name}-")})
    numbers = {name: comparison.table() for name, comparison in parts.items()}
    return _write(out, {"parts": numbers}, {"parts": shown, "overview": ("All parts", _table(overview), note)})


def _write(out: Path, numbers: Mapping[str, Any], context: Mapping[str, Any]) -> Path:
    write_for_people(out / NUMBERS, json.dumps(numbers, indent=2, allow_nan=False) + "\n")
    write_for_people(out / PAGE, render("comparison.html", context))
    return out / PAGE


def _is_begun(out: Path) -> bool:
    """Whether a folder is empty, or holds nothing but what a comparison writes before its numbers."""
    for path in out.iterdir():
        if path.name == "plots" and is_folder(path):
            names = (whole_name(each.name) for each in path.iterdir())
            if not all(name.endswith(tuple(f"{plot}.png" for plot in _PLOTS)) for name in names):
                return False
        elif path.name == NUMBERS or whole_name(path.name) != NUMBERS:
            return False
    return True


def _remove_stale(out: Path, prefix: str) -> None:
    for stale in _PLOTS:
        (out / "plots" / f"{prefix}{stale}.png").unlink(missing_ok=True)


def _shown(comparison: Comparison, plots: Path, facts: Sequence[Fact], prefix: str = "") -> dict[str, Any]:
    """What the page shows of one comparison. ``prefix`` begins the names of its pictures."""
    tests = {
        "heading": "Paired tests",
        "pictures": [],
        "large_pictures": [],
        "tables": _tables(filter(None, [beside_best(comparison.entries)])),
    }
    own = {
        "heading": "Measures of methods",
        "pictures": [],
        "large_pictures": [],
        "tables": _tables(filter(None, [measured_table(comparison.entries)])),
    }
    tasks = {
        "heading": "Tasks",
        "pictures": [],
        "large_pictures": draw_all(bound(WIDE_TASK_PLOTS, comparison.tasks), plots, prefix),
        "tables": _tables(task_table(study) for study in comparison.tasks),
    }
    replay = {
        "heading": "Replay",
        "pictures": draw_all(bound(REPLAY_PLOTS, comparison.replay), plots, prefix),
        "large_pictures": draw_all(bound(WIDE_REPLAY_PLOTS, comparison.replay), plots, prefix),
        "tables": _tables(table for study in comparison.replay for table in replay_tables(study)),
    }
    return {
        "experiments": len(comparison.entries),
        "runs": sum(len(entry.runs) for entry in comparison.entries),
        "head": facts,
        "swatches": swatches(comparison),
        "warnings": comparison.warnings,
        "table": _table(columns(comparison)),
        "notes": "; ".join(explanation(comparison)),
        "sections": [tests, own, tasks, replay],
        "pictures": draw_all(bound(COMPARISON_PLOTS, comparison), plots, prefix),
        "large_pictures": draw_all(bound(_WIDE_PLOTS, comparison), plots, prefix),
        "every_run": _runs(comparison),
    }


def _tables(told: Iterable[tuple[str, Columns]]) -> list[tuple[str, Table]]:
    return [(title, _table(columns)) for title, columns in told]


def _table(columns: Columns) -> Table:
    return Table(
        [(title, "words" if title in TO_THE_LEFT else "number") for title in columns],
        [*zip(*columns.values(), strict=True)],
    )


def _runs(comparison: Comparison) -> Table:
    """A line for each run."""
    columns: list[tuple[str, Kind]] = [
        ("experiment", "words"),
        ("seed", "number"),
        ("rounds", "number"),
        ("outcome", "words"),
        ("date", "date"),
        ("run again", "code"),
        ("model digest", "code"),
        ("directory", "code"),
    ]
    lines = [
        (
            entry.label,
            "–" if seed is None else f"{seed}",
            f"{len(run.rows):,}",
            run.outcome,
            date_of(run),
            command_again(table_of(run), run.path) if run.config else "–",
            str(run.summary.get("model_digest") or "–")[:16],
            str(run.path),
        )
        for entry in comparison.entries
        for run, seed in zip(entry.runs, entry.seeds, strict=True)
    ]
    return Table(columns, lines)
