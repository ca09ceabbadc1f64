"""``fedemu sweep``: runs many experiments, one command for all, which may be interrupted and repeated."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedemu.ops.cli.guarded import guarded
from fedemu.ops.data.apart import find_data
from fedemu.ops.experiment.sources import CONFIG_FILE, load_experiment
from fedemu.ops.experiment.sweeps import Planned, load_sweep, planned
from fedemu.ops.running.launch import child_command
from fedemu.ops.running.sweep import run_sweep
from fedemu.protocol.errors import ConfigurationError


@guarded
def sweep(
    source: Annotated[
        str,
        typer.Argument(metavar="SWEEP", help="A TOML file with the parts of the sweep, or a sweep that comes with it."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder for the runs. With an existing one the sweep goes on.")
    ],
    at_once: Annotated[int, typer.Option(metavar="N", help="The number of runs at a time.", min=1, max=256)] = 1,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Run only the folders that this regular expression finds, as in cifar10/.*seed-1.",
            show_default=False,
        ),
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the runs, and run nothing.")] = False,
) -> int:
    """Run a list of experiments with several seeds, into DIR/PART/EXPERIMENT/seed-N, and compare each part.

    The same command goes on after Ctrl-C or a kill: runs that are done are kept, and the others are resumed.
    """
    runs = planned(load_sweep(source), only)
    checked = {}
    for run in runs:
        key = (run.experiment, run.overrides)
        if key not in checked:
            checked[key], _ = load_experiment(run.experiment, run.overrides, os.environ)
    if list_only:
        for run in runs:
            print(run.folder)
        return 0
    for experiment in checked.values():
        find_data(experiment)
    if out.is_file():
        raise ConfigurationError(f"{out} is a file; name a folder with --out")
    words = [source, "--out", str(out), "--at-once", str(at_once), *(["--only", only] if only else [])]
    return run_sweep(out, runs, at_once, _command, shlex.join(["fedemu", "sweep", *words]))


def _command(directory: Path, planned: Planned) -> list[str]:
    """The command of a run: of a new one, or of one that goes on in its directory."""
    begun = (directory / CONFIG_FILE).is_file()
    source = ["--resume", str(directory)] if begun else [planned.experiment, "--out", str(directory)]
    overrides = [f"seed={planned.seed}", *planned.overrides, "runtime.transport=memory", "runtime.report=false"]
    settings = [word for override in overrides for word in ("--set", override)]
    return child_command("fedemu-run", "fedemu.ops.cli.__main__", "run", *source, *settings)
