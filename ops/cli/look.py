"""The commands that show something: the report of a run, an experiment, this machine."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedemu.coordinator.record.json_lines import to_line
from fedemu.ops.cli.shell import complete, options
from fedemu.ops.cli.shell.guarded import guarded
from fedemu.ops.cli.shell.options import Format, overrides_of
from fedemu.ops.data.apart import find_data
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.sources import load_experiment, read_frozen
from fedemu.ops.experiment.without_effect import WithoutEffect
from fedemu.ops.pages.paper import paper_of
from fedemu.ops.results.listing import find
from fedemu.ops.running.codes import leaving_at_once
from fedemu.ops.running.exits import complain
from fedemu.ops.track.kinds import check as check_trackers
from fedemu.ops.track.kinds import places
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import write_for_people
from fedemu.protocol.host.streams import printed_for_people
from fedemu.protocol.wording import counted

RunDirectory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="The run directory of a finished or unfinished run.",
        autocompletion=complete.run_directories,
    ),
]


@guarded
def report(
    directory: RunDirectory,
    curves: Annotated[
        int | None,
        typer.Option(
            metavar="DEVICES",
            help="Let this number of devices train once more from the run's last model, and draw their accuracy after "
            "each epoch. The training takes as long as that of several rounds.",
            min=1,
            show_default=False,
        ),
    ] = None,
    figures: options.Figures = None,
    formats: options.FigureFormats = None,
    widths: options.Widths = None,
    font_size: options.FontSize = None,
    titles: options.Titles = False,
) -> int:
    """Draw the plots of a run and write its report.html. Prints the path of the page.

    With --figures it writes figures for a paper instead, with the data behind each, and prints their folder.
    """
    paper = paper_of(figures, [kind.value for kind in formats or ()], widths or (), font_size, titles)
    # Importing matplotlib takes a second, for which no other command should have to wait.
    with leaving_at_once():
        from fedemu.ops.pages.files import write_figures
        from fedemu.ops.report.figures import LOCAL_CURVES, all_figures
        from fedemu.ops.report.report import require_writable, write_report
        from fedemu.ops.results.words import without_settings

    if (runs := [*find(directory)]) and runs != [directory]:
        one = f"fedemu report {shlex.quote(str(runs[0]))}"
        if len(runs) == 1:
            raise ConfigurationError(f"{directory} is no run directory, but holds one; write {one}")
        raise ConfigurationError(
            f"{directory} holds {counted(len(runs), 'run')}; compare them with fedemu compare "
            f"{shlex.quote(str(directory))}, or write the report of one with {one}"
        )
    if curves is not None:
        frozen = read_frozen(directory)
        require_writable(directory)
        with leaving_at_once():
            from fedemu.ops.assembly.local_curves import local_curves

        found = local_curves(directory, frozen, curves)
        write_for_people(directory / LOCAL_CURVES, to_line(found))
        if (drawn := len(found["devices"])) < curves:
            complain(f"warning: --curves {curves} is more than the {counted(drawn, 'device')} with samples; all train")
    if paper is None:
        print(write_report(directory))
        if lacking := without_settings(directory):
            complain(f"warning: {lacking}")
        return 0
    names = write_figures(all_figures(directory), paper, lambda text: complain(f"warning: {text}"))
    print(f"{counted(len(names), 'figure')} with the data behind each: {', '.join(names)}", file=sys.stderr)
    print(paper.folder)
    return 0


@guarded
def watch(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Run directories, or folders of runs. The runs may go on, or be over.",
            autocompletion=complete.run_directories,
        ),
    ],
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", help="The port of the page. Default: a free one.", min=1, max=65535, show_default=False
        ),
    ] = None,
) -> int:
    """Serve a page that shows runs as they go on. Prints its address, and a token for the buttons that break things.

    Only this machine reaches the page. Several runs stand side by side; those of a folder are found up to six levels
    below it, also when they begin later. Ctrl-C ends it, and the runs go on.
    """
    # The other commands do not need what this imports.
    from fedemu.ops.live.serving import serve_page
    from fedemu.ops.live.starting import announce

    def there() -> list[Path]:
        return [run.resolve() for directory in directories for run in find(directory)]

    runs = dict.fromkeys(run.resolve() for directory in directories for run in ([*find(directory)] or [directory]))
    serve_page(_readable([*runs]), port, announce, find=there)
    return 0


def _readable(runs: list[Path]) -> list[Path]:
    """The runs whose settings can be read. The others are told, unless there is only one: then this raises."""
    readable = []
    for run in runs:
        try:
            read_frozen(run)
        except ConfigurationError as error:
            if len(runs) == 1:
                raise
            complain(f"warning: {error}; this run is left out")
        else:
            readable.append(run)
    if not readable:
        raise ConfigurationError("none of these runs can be read")
    return readable


@guarded
def export(
    directory: RunDirectory,
    to: Annotated[
        list[str],
        typer.Option(
            metavar="tensorboard|mlflow|wandb|MODULE:NAME",
            help="The tracker: one that comes with fedemu as an extra, or your own. Can be repeated.",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|ADDRESS",
            help="Where the tracker writes. Several write into FOLDER/NAME each. Default: DIR/track/.",
            show_default=False,
        ),
    ] = None,
    project: Annotated[
        str, typer.Option(metavar="NAME", help="The project, or MLflow's experiment, to which the run belongs.")
    ] = "fedemu",
) -> int:
    """Tell trackers of a run: settings, rows, figures, model and digest. What they know already is not told again."""
    from fedemu.ops.track.export import export as tell

    check_trackers(to, out or "")
    for name, place in places(to, out or "").items():
        print(tell(directory, name, place, project))
    return 0


@guarded
def validate(
    experiment: options.Experiment = None,
    seed: options.Seed = None,
    rounds: options.Rounds = None,
    devices: options.Devices = None,
    settings: options.Settings = None,
    log_level: options.LogLevelOption = None,
    format: options.FormatOption = Format.TEXT,
) -> int:
    """Check an experiment without running it: its settings, data, model, method, partition and first training step."""
    overrides = overrides_of(settings, seed=seed, rounds=rounds, fleet__devices=devices, runtime__log_level=log_level)
    without_effect = WithoutEffect()
    checked, runtime = load_experiment(experiment, overrides, os.environ, without_effect)
    logging.getLogger().setLevel(runtime.log_level.upper())
    check_trackers(runtime.track.to, runtime.track.out)
    place = find_data(checked)
    without_effect.tell(complain)
    facts = _facts(checked, runtime) | {"data": f"{checked.data.dataset} ({place.kind.replace('_', ' ')})"}
    # Importing torch takes seconds, and the error of a wrong setting should not wait for it.
    with leaving_at_once():
        from fedemu.ops.assembly.rehearsal import rehearse

    with printed_for_people():  # what somebody's own code prints is for people
        facts |= rehearse(checked, complain)
    if format is Format.JSON:
        print(json.dumps({"ok": True, "digest": checked.digest, "experiment": checked.table(), "facts": facts}))
        return 0
    print(f"{checked.name}: ok")
    for key, value in facts.items():
        print(f"  {key:<13}{value}")
    return 0


def _facts(experiment: Experiment, runtime: Runtime) -> dict[str, Any]:
    """What an experiment is, for people, by subject."""
    fleet, replay, local = experiment.fleet, experiment.replay, experiment.local
    amount = counted(local.steps, "step") if local.steps else counted(local.epochs, "epoch")
    return {
        "rounds": f"{experiment.rounds}, seed {experiment.seed}, {experiment.clock.kind} clock",
        "fleet": f"{counted(fleet.devices, 'device')}, {fleet.per_round} a round, "
        f"over-selection {fleet.over_selection:g}, deadline {fleet.deadline:g} s, quorum {fleet.quorum:g}",
        "partition": _kind(experiment.data.partition.model_dump()),
        "stream": _kind(experiment.stream.model_dump()),
        "replay": f"{replay.strategy}, {counted(replay.kept, 'sample')} a device" if replay.kept else "none",
        "model": _with_options(experiment.model.name, experiment.model.options),
        "algorithm": _with_options(experiment.algorithm.name, experiment.algorithm.options)
        + f", loss {experiment.algorithm.loss}"
        + "".join(f", term {_with_options(name, options)}" for name, options in experiment.algorithm.terms.items()),
        "local": f"{amount}, batch {local.batch_size}, lr {local.lr:g}",
        "availability": _kind(experiment.availability.model_dump()),
        "faults": ", ".join(
            f"{key.removesuffix('_rate')} {value:g}"
            for key, value in experiment.faults.model_dump().items()
            if key.endswith("_rate") and value
        )
        or "none",
        "address": runtime.bind,
        "digest": experiment.digest,
    }


def _kind(table: dict[str, Any]) -> str:
    """The kind of a table, and its settings in brackets."""
    return _with_options(table["kind"], {key: value for key, value in table.items() if key != "kind"})


def _with_options(name: str, options: Mapping[str, Any]) -> str:
    listed = ", ".join(f"{key} {value}" for key, value in options.items())
    return f"{name} ({listed})" if listed else name


@guarded
def doctor(format: options.FormatOption = Format.TEXT) -> int:
    """Check that this machine can run a fleet: Python, packages, limits, memory, data."""
    # Imported here, because it needs numpy, for which no other command should have to wait.
    from fedemu.ops import doctor as examination

    findings = examination.examine(os.environ)
    if format is Format.JSON:
        print(json.dumps([finding._asdict() for finding in findings]))
    else:
        for finding in findings:
            print(f"{finding.verdict:<4}  {finding.subject:<16} {finding.detail}")
    return 2 if any(finding.verdict == "bad" for finding in findings) else 0
