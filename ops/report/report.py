"""A run as one self-contained page: the facts, the plots, the events and the configuration."""

from __future__ import annotations

import os
from pathlib import Path

from fedemu.coordinator.record.run import Run, read_generated, read_run
from fedemu.ops.pages.page import render
from fedemu.ops.pages.parts import draw_all
from fedemu.ops.report.facts import cards, events_table, facts_table, outcomes_table
from fedemu.ops.report.figures import GENERATED, ROUNDS, figures
from fedemu.ops.report.generated import generator_table, missing_pictures
from fedemu.ops.report.head import head, swatches
from fedemu.ops.report.periods import period_table
from fedemu.ops.report.plots.generated import is_broad
from fedemu.ops.results.doubts import cause_of, doubts
from fedemu.ops.results.periods import PeriodResults, period_results
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import write_for_people


def write_report(directory: Path) -> Path:
    """Draw ``plots/*.png`` and ``report.html`` from what the run directory holds, also of an unfinished run.

    Returns the path of the page. Raises ConfigurationError if the directory holds no run, or a file that cannot be
    read, and FedemuError if the disk does not take the page.
    """
    run, made = read_run(directory), read_generated(directory)
    folder = directory / "plots"
    require_writable(directory)
    folder.mkdir(exist_ok=True)
    require_writable(folder)
    sections = figures(directory, run, made)
    plots = {heading: draw_all(draws, folder) for heading, draws in sections.items()}
    above = list(plots)[: list(plots).index(ROUNDS)]
    pictures = {
        "generated": plots.pop(GENERATED),
        "rounds": plots.pop(ROUNDS),
        "before": {heading: plots.pop(heading) for heading in above},
        "after": plots,
        "generated_is_broad": any(map(is_broad, made.values())),
        "generators": generator_table(run.rows),
        "missing": missing_pictures(run),
    }
    page = directory / "report.html"
    write_for_people(page, render("report.html", _context(run, period_results(run)) | pictures))
    return page


def require_writable(folder: Path) -> None:
    """Raise ConfigurationError if what a report shows cannot be written into a folder, before it is computed."""
    if not os.access(folder, os.W_OK):
        raise ConfigurationError(f"{folder} is read-only; make it writable, or write the report of a copy of the run")


def _context(run: Run, results: PeriodResults | None) -> dict[str, object]:
    """The values that the template shows of every run, apart from its pictures."""
    summary = run.summary
    name = run.path.resolve().name
    return {
        "name": str(summary.get("name") or name),
        "outcome": run.outcome,
        "cause": cause_of(run.events, summary),
        "doubts": doubts(run.rows, summary),
        "perturbed": bool(summary.get("perturbed")),
        "directory": name,
        "head": head(run),
        "swatches": swatches(run, results is not None),
        "cards": cards(run.rows, results),
        "periods": period_table(results) if results else None,
        "outcomes": outcomes_table(run.rows),
        "events": events_table(run.events),
        "facts": facts_table(summary),
        "configuration": run.config,
    }
