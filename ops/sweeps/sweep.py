"""``fedemu sweep``: runs what is left of a sweep, and puts it into one table and on one page."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedemu.coordinator.record.run import read_run
from fedemu.device.host.processors import usable_gpus
from fedemu.ops.assembly.named_code import changed_code
from fedemu.ops.data.apart import decode_apart, find_data
from fedemu.ops.data.corpora import source_of
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.sources import CONFIG_FILE, load_experiment
from fedemu.ops.experiment.without_effect import WithoutEffect
from fedemu.ops.running.codes import INTERRUPTED, leaving_at_once
from fedemu.ops.running.exits import complain
from fedemu.ops.sweeps.hold import await_left, held
from fedemu.ops.sweeps.machine import default_at_once
from fedemu.ops.sweeps.plan import Planned
from fedemu.ops.sweeps.runs import TRANSPORT, Command, Failed, Progress, has_nothing_left, play, require_same, told
from fedemu.ops.terminal import say
from fedemu.ops.track.kinds import check as check_trackers
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.paths import is_file
from fedemu.protocol.wording import counted

Loaded = Mapping[Path, tuple[Experiment, Runtime]]
"""The experiment and the machine's settings of each run, by its folder."""
Conclude = Callable[[Path], None]


def loaded(
    runs: Sequence[Planned], without_effect: WithoutEffect | None = None
) -> dict[Path, tuple[Experiment, Runtime]]:
    """The experiment of every run. Raises ConfigurationError for the first that is wrong, with the run's folder.

    ``without_effect`` gathers what somebody has set.
    """
    known: dict[tuple[str, tuple[str, ...]], tuple[Experiment, Runtime]] = {}
    found = {}
    for run in runs:
        key = (run.experiment, run.overrides)
        if key not in known:
            try:
                overrides = [*run.overrides, TRANSPORT]
                known[key] = load_experiment(run.experiment, overrides, os.environ, without_effect)
            except ConfigurationError as error:
                raise ConfigurationError(f"{run.group}: {error}") from None
        experiment, runtime = known[key]
        found[run.folder] = (experiment.model_copy(update={"seed": run.seed}), runtime)
    return found


def prepare(folder: Path, experiments: Loaded) -> None:
    """Check that data and trackers are there, and that no folder holds the run of another experiment.

    Models, methods and local terms have to take the options that they get. Runs whose own code has changed since are
    told.
    """
    require_folder(folder)
    for place, (experiment, runtime) in experiments.items():
        check_trackers(runtime.track.to, runtime.track.out)
        find_data(experiment)
        require_same(folder / place, experiment)
    require_fitting_options(experiments)
    tell_changed_code(folder, experiments)


def require_folder(folder: Path) -> None:
    """Raise ConfigurationError if runs cannot lie in a folder: it is a file, or a run directory itself."""
    if is_file(folder):
        raise ConfigurationError(f"{folder} is a file; name a folder with --out")
    if is_file(folder / CONFIG_FILE):
        raise ConfigurationError(f"{folder} is a run directory, in which nobody looks for runs; choose another --out")


def tell_changed_code(folder: Path, experiments: Loaded) -> None:
    """Tell a line for each module and file of a user's own that has another content than it had for runs here."""
    changed: dict[str, list[Path]] = {}
    for place, (experiment, _) in experiments.items():
        for module in changed_code(folder / place, experiment):
            changed.setdefault(module, []).append(folder / place)
    for module, runs in changed.items():
        complain(
            f"warning: {module} is not what it was for {counted(len(runs), 'run')} in this folder (such as {runs[0]}): "
            "what is done is kept, and what is not goes on with what it is now; to run one anew, remove its folder"
        )


def require_fitting_options(experiments: Loaded) -> None:
    """Raise ConfigurationError, with the group of the run, for an option that would end the run as it begins."""
    with leaving_at_once():  # this imports torch
        from fedemu.ops.assembly import learning

    seen = set()
    for place, (experiment, _) in experiments.items():
        key = (experiment.model.model_dump_json(), experiment.algorithm.model_dump_json())
        if key not in seen:
            seen.add(key)
            try:
                learning.require_fitting_options(experiment)
            except ConfigurationError as error:
                raise ConfigurationError(f"{place.parent}: {error}") from None


def run_sweep(
    folder: Path,
    runs: Sequence[Planned],
    experiments: Loaded,
    at_once: int | None,
    resume: str,
    conclude: Conclude | None = None,
    command: Command | None = None,
) -> int:
    """Run what is left of ``runs``, then write the table and the page. Returns the exit code.

    A run that fails does not end the others; the exit code is then that of the first one that failed. ``at_once`` is
    the number of runs at a time, None for as many as the machine can play. ``resume`` is the command that goes on with
    the sweep, for people. ``conclude`` is called in the end, and then the comparisons are not shown, only written.
    ``command`` makes the command of a run that is played elsewhere; None: it is played here.
    """
    try:
        with held(folder):
            left = unfinished(folder, runs, experiments)
            done = f"sweep: {counted(len(runs), 'run')}, {len(runs) - len(left)} of them done already"
            progress = Progress(left, begin(folder, done, experiments, at_once))
            require_own_ports(experiments, left, progress.at_once)
            decode_first(experiments[run.folder][0] for run in left if run.folder in experiments)
            await_left([folder / run.folder for run in left])
            gpus = usable_gpus(device_type_of(experiments)) if command is None else []
            failed = play(folder, left, progress, command, gpus)
            return finish(folder, runs, failed, conclude)
    except KeyboardInterrupt:
        say(f"sweep interrupted; go on with what is left by\n{resume}")
        return INTERRUPTED


def unfinished(folder: Path, runs: Iterable[Planned], experiments: Loaded) -> list[Planned]:
    """The runs that are not over, each with its planned number of rounds among its overrides if it could be read.

    The file, or the preset, may have got more rounds since a run began, and one that goes on does not read it.
    """
    left = []
    for run in runs:
        experiment = experiments[run.folder][0] if run.folder in experiments else None
        if has_nothing_left(folder / run.folder, experiment):
            continue
        rounds = () if experiment is None else (f"rounds={experiment.rounds}",)
        left.append(replace(run, overrides=(*run.overrides, *rounds)))
    return left


def begin(folder: Path, done: str, experiments: Loaded, at_once: int | None) -> int:
    """Say how much there is to do, of which ``done`` tells. Returns the number of runs at a time."""
    why = ""
    if at_once is None:
        device_type = device_type_of(experiments)
        at_once, why = default_at_once((experiment for experiment, _ in experiments.values()), device_type)
        why = f" ({why}; --at-once says another number)"
    say(f"{done}, {counted(at_once, 'run')} at a time{why}, in {folder}")
    return at_once


def device_type_of(experiments: Loaded) -> str:
    """Where the runs compute: ``auto``, ``cpu`` or ``cuda``."""
    return next((runtime.device_type for _, runtime in experiments.values()), "auto")


def require_own_ports(experiments: Loaded, left: Sequence[Planned], at_once: int) -> None:
    """Raise ConfigurationError if runs at the same time would have to serve their metrics on the same port."""
    ports = [experiments[run.folder][1].metrics_port for run in left if run.folder in experiments]
    if at_once > 1 and (port := next((port for port in ports if port and ports.count(port) > 1), 0)):
        raise ConfigurationError(
            f"runtime.metrics_port = {port} serves the metrics of one run, and {min(at_once, len(left))} are to run at "
            "a time; choose --at-once 1, or --set runtime.metrics_port=0"
        )


def decode_first(experiments: Iterable[Experiment]) -> None:
    """Decode every data set once, so that runs that begin together do not all do it. A mistake is left to the runs."""
    seen = set()
    for experiment in experiments:
        source = source_of(experiment.data, experiment.stream)
        if source not in seen:
            seen.add(source)
            try:
                decode_apart(experiment, say)
            except FedemuError:
                continue


def finish(folder: Path, runs: Sequence[Planned], failed: Sequence[Failed], conclude: Conclude | None = None) -> int:
    """Compare what there is, write the table, and name the runs that failed. Returns the exit code."""
    # These import matplotlib and numpy, for which no run should have to wait.
    from fedemu.ops.sweeps.table import others_in_table, write_table

    code = failed[0].code if failed else 0
    try:
        _compare(folder, runs, quiet=conclude is not None)
        if conclude is not None:
            conclude(folder)
        others = others_in_table(folder, runs)
        say(f"one line for each run is in {write_table(folder, runs)}")
        if others:
            say(
                f"{counted(others, 'run')} of another sweep, or of another --only, in {folder} "
                f"{'is' if others == 1 else 'are'} left out of the comparison and the table"
            )
    except FedemuError as error:
        complain(str(error))
        code = code or error.exit_code
    if failed:
        say(told(failed, len(runs)))
    return code


def _compare(folder: Path, runs: Sequence[Planned], *, quiet: bool) -> None:
    """Compare the runs of each part on one page, if any has a row. If ``quiet``, only where the page is is told."""
    from fedemu.ops.compare.compare import compare
    from fedemu.ops.compare.page.page import claim_folder, write_comparison, write_parts
    from fedemu.ops.compare.runs import find_runs
    from fedemu.ops.compare.text import text, width_of
    from fedemu.ops.sweeps.standing import EXPLANATION, lines, overview

    groups: dict[tuple[str, Path], set[Path]] = {}
    for run in runs:
        groups.setdefault((run.part, folder / run.group), set()).add(folder / run.folder)
    paths: dict[str, list[Path]] = {}
    for (part, group), planned in groups.items():
        if _can_be_read(group, planned):
            there = find_runs(group)
            own = [run for run in there if run in planned]  # other seeds in the folder are those of another sweep
            paths.setdefault(part, []).extend([group] if own == there else own)
    if not paths:
        return
    parts = {part: compare(of_part) for part, of_part in paths.items()}
    claim_folder(folder / "compare")
    for part, comparison in parts.items():
        for warning in comparison.warnings:
            complain(f"warning: {f'{part}: ' if part else ''}{warning}")
        if not quiet:
            say(f"\n{part or folder.resolve().name}\n{text(comparison, width_of(sys.stderr.isatty()))}")
    if len(parts) == 1:
        (comparison,) = parts.values()
        page = write_comparison(comparison, folder / "compare")
    else:
        page = write_parts(parts, overview(lines(folder, runs)), EXPLANATION, folder / "compare")
    say(f"\nplots and numbers are in {page}")


def _can_be_read(group: Path, planned: Collection[Path]) -> bool:
    """Whether the runs of a folder of seeds have a row. If one is damaged it is told, and all are left out."""
    runs = sorted(run for run in planned if is_file(run / "metrics.jsonl"))
    for run in runs:
        try:
            read_run(run)
        except FedemuError as error:
            complain(f"warning: {group.name} is left out of the comparison: {error}")
            return False
    return bool(runs)
