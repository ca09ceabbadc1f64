"""A run as one self-contained page: the facts, the plots, the events and the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedemu.coordinator.record.json_lines import read_object
from fedemu.coordinator.record.run import Run, read_generated, read_run
from fedemu.ops.pages.page import render
from fedemu.ops.pages.parts import Picture, draw_all
from fedemu.ops.report.facts import cards, events_table, facts_table, outcomes_table
from fedemu.ops.report.generated import generated_plots, generator_table, missing_pictures
from fedemu.ops.report.periods import period_table
from fedemu.ops.report.plots.diagnosis import DIAGNOSIS_PLOTS, of_rounds
from fedemu.ops.report.plots.generated import is_broad
from fedemu.ops.report.plots.local_curves import LOCAL_PLOTS
from fedemu.ops.report.plots.periods import PERIOD_PLOTS
from fedemu.ops.report.plots.replay import REPLAY_PLOTS
from fedemu.ops.report.plots.rounds import PLOTS
from fedemu.ops.results.periods import PeriodResults, period_results
from fedemu.protocol.host.files import write_whole

LOCAL_CURVES = "local_curves.json"
"""The file of a run directory that ``fedemu report --curves`` writes."""


def write_report(directory: Path) -> Path:
    """Draw ``plots/*.png`` and ``report.html`` from what the run directory holds, also of an unfinished run.

    Returns the path of the page. Raises ConfigurationError if the directory holds no run, or a file that cannot be
    read, and FedemuError if the disk does not take the page.
    """
    run, made = read_run(directory), read_generated(directory)
    results = period_results(run)
    folder = directory / "plots"
    folder.mkdir(exist_ok=True)
    plots = {
        "Periods": draw_all(PERIOD_PLOTS, results, folder) if results else [],
        "Replay": draw_all(REPLAY_PLOTS, run.rows, folder),
        "Plots": draw_all(PLOTS, run.rows, folder),
        "Local training": draw_all(LOCAL_PLOTS, _local_curves(directory), folder),
        "Diagnosed rounds": draw_all(DIAGNOSIS_PLOTS, of_rounds(run.diagnosis), folder),
    }
    generated = {
        "generated": draw_all(generated_plots(made), made, folder),
        "generated_is_broad": any(map(is_broad, made.values())),
        "generators": generator_table(run.rows),
        "missing": missing_pictures(run.events),
    }
    page = directory / "report.html"
    write_whole(page, render("report.html", _context(directory.name, run, results, plots) | generated))
    return page


def _local_curves(directory: Path) -> Mapping[str, object]:
    """What ``local_curves.json`` holds, empty if there is no such file."""
    file = directory / LOCAL_CURVES
    return read_object(file.read_bytes(), file) if file.is_file() else {}


def _context(
    directory: str, run: Run, results: PeriodResults | None, plots: Mapping[str, list[Picture]]
) -> dict[str, object]:
    """The values that the template shows of every run. ``plots`` are pictures by the heading of their section."""
    summary = run.summary or {}
    return {
        "name": str(summary.get("name") or directory),
        "outcome": str(summary.get("outcome") or "unfinished"),
        "perturbed": bool(summary.get("perturbed")),
        "directory": directory,
        "cards": cards(run.rows, summary, results),
        "plots": plots,
        "periods": period_table(results) if results else None,
        "outcomes": outcomes_table(run.rows),
        "events": events_table(run.events),
        "facts": facts_table(summary),
        "configuration": run.config,
    }
