"""``fedemu sweep`` and ``fedemu suite``: many experiments by one command, which may be interrupted and repeated."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedemu.ops.cli.shell import complete, options
from fedemu.ops.cli.shell.guarded import guarded
from fedemu.ops.cli.shell.options import given, overrides_of
from fedemu.ops.engines.places import require_engine
from fedemu.ops.experiment.sources import seed_of
from fedemu.ops.experiment.without_effect import WithoutEffect
from fedemu.ops.figures import span
from fedemu.ops.running.folder import RUNS
from fedemu.ops.running.seeds import parse_seeds
from fedemu.ops.sweeps.grid import override_of, parse_grid
from fedemu.ops.sweeps.plan import Part, Planned, chosen, is_sweep, load_sweep, planned, runs_of
from fedemu.ops.sweeps.suite import open_suite, planned_suite, seconds_of, with_data
from fedemu.ops.sweeps.sweep import loaded, prepare, require_folder, run_sweep
from fedemu.ops.terminal import say
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.wording import counted

Out = Annotated[
    Path,
    typer.Option(metavar="DIR", help="The folder for the runs. With the one of an earlier sweep, that sweep goes on."),
]
AtOnce = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="The number of runs at a time. Default: one per core or GPU, as far as the memory reaches.",
        min=1,
        max=256,
        show_default=False,
    ),
]
Only = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN",
        help="Run only the folders that this regular expression finds, as in cifar10/.*seed-1.",
        show_default=False,
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="METHOD",
        help="Add this method: a preset part such as wsm, a TOML file, or module:Name. Can be repeated.",
        show_default=False,
        autocompletion=complete.methods,
    ),
]
ListOnly = Annotated[bool, typer.Option("--list", help="List the runs, and run nothing.")]


@guarded
def sweep(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SWEEP|EXPERIMENT",
            help="A TOML file with the parts of the sweep, a sweep that comes with fedemu, or an experiment.",
            autocompletion=complete.sweeps,
        ),
    ],
    out: Out,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="Try these values of a setting, as in local.lr=0.01,0.1 or model.hidden=[64],[64,64]. "
            "Can be repeated: every combination is run.",
            show_default=False,
            autocompletion=complete.overrides,
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="SEEDS", help="Run with each of these seeds, as in 0,1,2 or 0-4.", show_default=False),
    ] = None,
    method: Methods = None,
    rounds: options.Rounds = None,
    devices: options.Devices = None,
    settings: options.Settings = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=LOW..HIGH",
            help="Let Optuna choose values of a setting, as in local.lr=0.001..1:log, local.epochs=1..5 or "
            "algorithm.loss=cross_entropy,wsm. Can be repeated.",
            show_default=False,
            autocompletion=complete.overrides,
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(metavar="N", help="The number of trials of a search.", min=1, max=100_000)
    ] = 20,
    metric: Annotated[
        str,
        typer.Option(metavar="FIGURE", help="What a search makes best: accuracy, or another figure of sweep.csv."),
    ] = "accuracy",
    at_once: AtOnce = None,
    on: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help="Where runs are started: here, which is this machine, or ray, with one run on each core of the "
            "cluster of RAY_ADDRESS, or of one of its own.",
        ),
    ] = "here",
    only: Only = None,
    list_only: ListOnly = False,
) -> int:
    """Run an experiment with every combination of a grid and every seed, or a list of experiments; and compare them.

    The same command goes on after Ctrl-C or a kill: runs that are done are kept, and the others are resumed. More
    values and seeds add runs. A run that fails does not end the others; the exit code is that of the first that failed.
    """
    _require_place(on)
    for name in ("trials", "metric"):
        if given(context, name) and not search:
            raise ConfigurationError(f"--{name} is for a search; add --search KEY=LOW..HIGH, or leave it out")
    if search:
        if on != "here":
            raise ConfigurationError(f"--search looks at its results here, one after another; leave out --on {on}")
        if grid or method or only or list_only or is_sweep(source):
            raise ConfigurationError(
                "--search goes with one experiment, and not with --grid, --method, --only and --list"
            )
        part = _part(source, None, seeds, None, overrides_of(settings, rounds=rounds, fleet__devices=devices))
        return _search(part, out, search, trials, metric, at_once)
    if is_sweep(source):
        runs = _of_file(source, only, grid, seeds, method, rounds, devices, settings)
    else:
        overrides = overrides_of(settings, rounds=rounds, fleet__devices=devices)
        runs = chosen(runs_of(_part(source, grid, seeds, method, overrides)), only)
    chose = {"grid": grid, "method": method, "set": settings, "seeds": seeds, "rounds": rounds, "devices": devices}
    again = _again("sweep", source, {"out": out, **chose, "at-once": at_once, "only": only})
    experiments = loaded(runs, without_effect := WithoutEffect())
    if on != "here" and any(runtime.device_type == "cuda" for _, runtime in experiments.values()):
        raise ConfigurationError(
            f"runtime.device_type is cuda, but with --on {on} each run of a sweep computes on one core; choose auto"
        )
    if list_only:
        for run in runs:
            print(run.folder)
        return 0
    prepare(out, experiments)
    without_effect.tell(say)
    if on == "here":
        return run_sweep(out, runs, experiments, at_once, again)
    from fedemu.ops.sweeps.on_ray import command_on_ray, slots

    several = min(slots(on), at_once or len(runs))
    return run_sweep(out, runs, experiments, several, f"{again} --on {on}", command=command_on_ray)


def _search(part: Part, out: Path, search: list[str], trials: int, metric: str, at_once: int | None) -> int:
    # Importing numpy takes time, for which no other command should have to wait.
    from fedemu.ops.compare.entry import FIGURES, ROUNDS_TO
    from fedemu.ops.sweeps.search import Study, figure_of, parse_space
    from fedemu.ops.sweeps.searching import run_search

    spaces, figure = parse_space(search), figure_of(metric, [key for key in FIGURES if key not in ROUNDS_TO])
    chose = {"search": search, "trials": trials, "metric": metric, "seeds": ",".join(map(str, part.seeds))}
    again = _again("sweep", part.experiments[0], {**chose, "out": out, "set": part.set, "at-once": at_once})
    tried = [override_of((space.key, space.least)) for space in spaces]
    without_effect = WithoutEffect()
    # A mistake is told before the study begins.
    experiments = loaded(runs_of(part.model_copy(update={"set": [*part.set, *tried]})), without_effect)
    require_folder(out)
    first, _ = next(iter(experiments.values()))
    if not any(space.choices for space in spaces):  # another choice may give an effect to what has none with the first
        without_effect.tell(say)
    searched = {key: value for key, value in first.table().items() if key != "name"}
    begun = partial(Study, out, spaces, figure, part.seeds, searched)
    return run_search(out, part, begun, trials, at_once, again)


def _again(command: str, source: str, options: Mapping[str, object]) -> str:
    """The command with those of its options that were given, by their names. One that is repeated has a list."""
    words = ["fedemu", command, source]
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one is not False:
                words += [f"--{name}"] if one is True else [f"--{name}", str(one)]
    return shlex.join(words)


@guarded
def suite(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SUITE",
            help="A suite that comes with fedemu, such as forgetting, or a sweep file whose parts have sizes.",
            autocompletion=complete.suites,
        ),
    ],
    size: Annotated[
        str,
        typer.Option(metavar="SIZE", help="How much is run: tiny, quick (one seed), small (an hour), full (a night)."),
    ] = "small",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder for the runs. Default: runs/SUITE-SIZE.", show_default=False),
    ] = None,
    method: Methods = None,
    alone: Annotated[bool, typer.Option("--alone", help="Run only the methods that --method names.")] = False,
    at_once: AtOnce = None,
    only: Only = None,
    list_only: ListOnly = False,
) -> int:
    """Run a suite: methods on several streams with several seeds. Prints and saves a table of methods by streams.

    The same command goes on after Ctrl-C or a kill, as with a sweep, and adds what another --method names.
    """
    if alone and not method:
        raise ConfigurationError("--alone runs only the methods that --method names; name one")
    parts = with_data(open_suite(source, size, method or [], alone))
    runs = planned_suite(parts, only)
    experiments = loaded(runs, without_effect := WithoutEffect())
    if list_only:
        for run in runs:
            print(run.folder)
        return 0
    folder = out if out is not None else RUNS / f"{Path(source).stem}-{size}"
    seeds = counted(max(len(part.seeds) for part in parts), "seed")
    methods = counted(len({run.method or run.experiment for run in runs}), "method")
    said = f"{methods}, {counted(len(parts), 'stream')}, {seeds}"
    takes = f"; all of it takes about {span(seconds_of(runs))} of one core" if seconds_of(runs) else ""
    say(f"{source}, {size}: {said}{takes}")
    prepare(folder, experiments)
    without_effect.tell(say)
    chose = {"size": size, "out": folder, "method": method, "alone": alone, "at-once": at_once, "only": only}

    def conclude(folder: Path) -> None:
        # Importing numpy takes time, for which no other command should have to wait.
        from fedemu.ops.sweeps.standing import lines, text, write_standing

        standing = lines(folder, runs)
        say(f"the table is in {write_standing(folder, standing)}")
        print(text(standing))

    return run_sweep(folder, runs, experiments, at_once, _again("suite", source, chose), conclude)


def _require_place(place: str) -> None:
    """Raise ConfigurationError if runs can't be started there."""
    if place == "ray":
        require_engine(place)
    elif place != "here":
        raise ConfigurationError(f"--on {place} is no place for runs; write here, or ray")


def _of_file(source: str, only: str | None, *beside: object) -> list[Planned]:
    names = ("--grid", "--seeds", "--method", "--rounds", "--devices", "--set")
    if given := next((name for name, value in zip(names, beside, strict=True) if value), None):
        raise ConfigurationError(f"{given} goes with an experiment, and {source} is a sweep: write it into its parts")
    return planned(load_sweep(source), only)


def _part(
    source: str, grid: list[str] | None, seeds: str | None, methods: list[str] | None, overrides: list[str]
) -> Part:
    """The only part of the sweep of one experiment. Its runs lie in the folder of the sweep itself."""
    fixed = {override.partition("=")[0].strip() for override in overrides}
    if seeds is not None and "seed" in fixed:
        raise ConfigurationError("--set seed is for one seed, and here are several; leave out --set seed")
    varied = parse_grid(grid or [])
    if both := next((key for key in varied if key in fixed), None):
        raise ConfigurationError(
            f"--grid varies {both}, and another option sets it to one value; leave one of them out"
        )
    return Part.model_construct(
        name="",
        experiments=[] if methods else [source],
        presets=[source] if methods else [],
        methods=methods or [],
        grid=varied,
        seeds=parse_seeds(seeds) if seeds is not None else [seed_of(source, overrides, os.environ)],
        set=overrides,
    )
