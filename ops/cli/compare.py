"""``fedemu compare``: puts runs side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedemu.ops.cli import complete, options
from fedemu.ops.cli.guarded import guarded
from fedemu.ops.cli.options import Format
from fedemu.ops.running.exits import complain


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
        Path, typer.Option(metavar="DIR", help="The folder for the page, its plots and compare.json.")
    ] = Path("compare"),
    format: options.FormatOption = Format.TEXT,
) -> int:
    """Put runs in one table and one set of plots. Runs that differ only by their seed are one row, mean ± deviation."""
    # Importing matplotlib takes a second, for which no other command should have to wait.
    from fedemu.ops.compare.compare import compare as side_by_side
    from fedemu.ops.compare.page.page import claim_folder, write_comparison
    from fedemu.ops.compare.text import text, width_of

    comparison = side_by_side(runs, target, last)
    claim_folder(out)
    for warning in comparison.warnings:
        complain(f"warning: {warning}")
    page = write_comparison(comparison, out)
    if format is Format.JSON:
        print(json.dumps(comparison.table(), allow_nan=False))
    else:
        print(text(comparison, width_of(sys.stdout.isatty())))
    print(f"plots and numbers are in {page}", file=sys.stderr)
    return 0
