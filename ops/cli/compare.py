"""``fedemu compare``: puts runs side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedemu.ops.cli.shell import complete, options
from fedemu.ops.cli.shell.guarded import guarded
from fedemu.ops.cli.shell.options import ComparisonFormat
from fedemu.ops.pages.paper import FORMATS, paper_of
from fedemu.ops.running.codes import leaving_at_once
from fedemu.ops.running.exits import complain
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.wording import counted


@guarded
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run directories, or folders of run directories.",
            autocompletion=complete.run_directories,
        ),
    ],
    target: Annotated[
        float | None,
        typer.Option(
            metavar="ACCURACY",
            help="Count the rounds until 50, 75 and 95 % of this accuracy, which is between 0 and 1. "
            "Default: the best accuracy of the first row.",
            min=1e-6,
            max=1,
            show_default=False,
        ),
    ] = None,
    last: Annotated[
        int, typer.Option(metavar="ROUNDS", help="Also give the mean accuracy of this number of last rounds.", min=1)
    ] = 100,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The folder for the page, its plots and compare.json. "
            "Default: compare, or none with --figures or --latex.",
            show_default=False,
        ),
    ] = None,
    formats: Annotated[
        list[ComparisonFormat] | None,
        typer.Option(
            "--format",
            metavar="text|json|pdf|svg|png",
            help="The format of the data on stdout, text or json, and those of the figures. Can be repeated. "
            "Default: text and pdf.",
            show_default=False,
        ),
    ] = None,
    latex: Annotated[
        bool,
        typer.Option(
            "--latex",
            help="Print the table for LaTeX (booktabs): the best values in bold, the spread over seeds, paired tests.",
        ),
    ] = False,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="TITLES",
            help='The columns of the table for LaTeX, as in "final accuracy,device_metrics.norm:lower", where lower '
            "values of your own measure are better. Default: all that say how good the models are, without best.",
            show_default=False,
        ),
    ] = None,
    figures: options.Figures = None,
    widths: options.Widths = None,
    font_size: options.FontSize = None,
    titles: options.Titles = False,
) -> int:
    """Put runs in one table and one set of plots. Runs that differ only by their seed are one row, mean ± deviation."""
    named = list(dict.fromkeys(kind.value for kind in formats or ()))
    if {"text", "json"} <= {*named}:
        raise ConfigurationError("--format text and --format json exclude each other; choose what goes to stdout")
    if latex and {"text", "json"} & {*named}:
        raise ConfigurationError("--latex and --format text or json exclude each other; choose what goes to stdout")
    if columns is not None and not latex:
        raise ConfigurationError("--columns needs --latex, whose table it is about")
    paper = paper_of(figures, [kind for kind in named if kind in FORMATS], widths or (), font_size, titles)
    # Importing matplotlib takes a second, for which no other command should have to wait.
    with leaving_at_once():
        from fedemu.ops.compare.compare import compare as side_by_side
        from fedemu.ops.compare.latex.table import latex as table_for_latex
        from fedemu.ops.compare.page.page import all_figures, claim_folder, write_comparison
        from fedemu.ops.compare.text import text, width_of
        from fedemu.ops.pages.files import write_figures

    page = out or (None if paper or latex else Path("compare"))
    comparison = side_by_side(runs, target, last)
    wanted = [title.strip() for title in (columns or "").split(",") if title.strip()]
    table = table_for_latex(comparison, wanted) if latex else ""
    if page is not None:
        claim_folder(page)
    for warning in comparison.warnings:
        complain(f"warning: {warning}")
    told = []
    if page is not None:
        told.append(f"plots and numbers are in {write_comparison(comparison, page)}")
    if paper is not None:
        drawn = write_figures(all_figures(comparison), paper, lambda text: complain(f"warning: {text}"))
        told.append(f"{counted(len(drawn), 'figure')} and the data behind each are in {paper.folder}")
    if latex:
        print(table)
    elif "json" in named:
        print(json.dumps(comparison.table(), allow_nan=False))
    else:
        print(text(comparison, width_of(sys.stdout.isatty())))
    for line in told:
        print(line, file=sys.stderr)
    return 0
