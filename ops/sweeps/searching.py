"""``fedemu sweep --search``: runs the trials of a search, batch by batch, and tells the best one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fedemu.coordinator.record.run import Run, read_run
from fedemu.device.host.processors import usable_gpus
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.sources import seed_of
from fedemu.ops.experiment.toml_text import toml_value
from fedemu.ops.running.codes import INTERRUPTED
from fedemu.ops.sweeps.grid import Choice, name_of, override_of
from fedemu.ops.sweeps.hold import await_left, held
from fedemu.ops.sweeps.plan import Part, Planned, runs_of
from fedemu.ops.sweeps.runs import Failed, Progress, play
from fedemu.ops.sweeps.search import Study
from fedemu.ops.sweeps.sweep import (
    Loaded,
    begin,
    decode_first,
    device_type_of,
    finish,
    loaded,
    prepare,
    require_fitting_options,
    require_own_ports,
    tell_changed_code,
    unfinished,
)
from fedemu.ops.terminal import say
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.wording import counted


def run_search(
    folder: Path, part: Part, begun: Callable[[], Study], trials: int, at_once: int | None, resume: str
) -> int:
    """Run trials until there are so many, then compare them all and tell the best. Returns the exit code.

    ``part`` is the experiment with its seeds. ``begun`` opens the study, once nobody else is at work in ``folder``.

    A trial whose values do not go with the experiment has no result, nor has one of which a run diverges. One of which
    a run fails ends the search, and the next call tries it again. If it fails once more, it has no result, and the
    search goes on.
    """
    failed: list[Failed] = []
    unsettled: list[Planned] = []
    given_up: list[Failed] = []
    seeds = len(part.seeds)
    try:
        with held(folder):
            study = begun()
            before = [run for number, choices, _ in study.over() for run in _runs(part, number, choices)]
            tell_changed_code(folder, _readable(before))
            while not failed and (batch := study.batch(trials)):
                over = len(study.over())
                of_trials, experiments = _possible(part, study, batch)
                if not of_trials:
                    continue
                runs = [run for found in of_trials.values() for run in found]
                prepare(folder, experiments)
                left = unfinished(folder, runs, experiments)
                if at_once is None or not over:
                    of = f"{counted(trials, 'trial')} with {counted(seeds, 'seed')}"
                    at_once = begin(folder, f"search: {of}, {over} of them over already", experiments, at_once)
                require_own_ports(experiments, left, at_once)
                for number, choices in batch:
                    if number in of_trials:
                        say(f"trial {number + 1} of {trials}: {', '.join(map(override_of, choices))}")
                progress = Progress(left, at_once, later=max(0, trials - over - len(batch)) * seeds)
                decode_first(experiments[run.folder][0] for run in left)
                await_left([folder / run.folder for run in left])
                gpus = usable_gpus(device_type_of(experiments))
                of_failed = {one.planned.folder: one for one in play(folder, left, progress, gpus=gpus)}
                for number, found in of_trials.items():
                    lost = [of_failed[run.folder] for run in found if run.folder in of_failed]
                    if not lost:
                        study.tell(number, [_value(folder / run.folder, study.figure) for run in found])
                    elif study.fail(number):
                        given_up += lost
                        say(f"trial {number + 1} failed for the second time; it has no result, and the search goes on")
                    else:
                        failed += lost
                        unsettled += found
            every = [run for number, choices, _ in study.over() for run in _runs(part, number, choices)]
            code = finish(folder, [*every, *unsettled], failed)
            _tell_best(part, study, [folder / run.folder for run in every])
            return code or (given_up[0].code if given_up else 0)
    except KeyboardInterrupt:
        say(f"search interrupted; go on with what is left by\n{resume}")
        return INTERRUPTED


def _possible(
    part: Part, study: Study, batch: Sequence[tuple[int, Sequence[Choice]]]
) -> tuple[dict[int, list[Planned]], Loaded]:
    """The runs of each trial, and their experiments. A trial whose values make no experiment is told, and over."""
    of_trials: dict[int, list[Planned]] = {}
    experiments: dict[Path, tuple[Experiment, Runtime]] = {}
    for number, choices in batch:
        runs = _runs(part, number, choices)
        try:
            found = loaded(runs)
            require_fitting_options(found)
            experiments |= found
            of_trials[number] = runs
        except ConfigurationError as error:
            study.tell(number, [])
            say(f"trial {number + 1} has no result: {error}")
    return of_trials, experiments


def _readable(runs: Sequence[Planned]) -> Loaded:
    """The experiments of those runs that make one."""
    found: dict[Path, tuple[Experiment, Runtime]] = {}
    for run in runs:
        with suppress(ConfigurationError):
            found |= loaded([run])
    return found


def _runs(part: Part, number: int, choices: Sequence[Choice]) -> list[Planned]:
    """The runs of a trial, one for each seed, in a folder that names its number and its values."""
    named = f"trial-{number + 1:03d},{name_of([(key, _short(value)) for key, value in choices])}"
    return [
        replace(run, overrides=(*run.overrides, *map(override_of, choices)), name=named, listed=tuple(choices))
        for run in runs_of(part)
    ]


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _value(directory: Path, figure: str) -> float | None:
    # Importing numpy takes time, for which no run should have to wait.
    from fedemu.ops.compare.entry import figures_of

    run = _completed(directory)
    return None if run is None else figures_of([run], None)[figure].mean


def _completed(directory: Path) -> Run | None:
    """The run in a directory; None if it did not complete."""
    try:
        run = read_run(directory)
    except FedemuError:
        return None
    return run if run.outcome == "completed" else None


def _tell_best(part: Part, study: Study, directories: Sequence[Path]) -> None:
    """Tell the best trial. ``directories`` are those of the runs of all trials that are over."""
    over = study.over()
    if not over:
        say("no trial has a result yet")
        return
    if over[0][2] is None:
        from fedemu.coordinator.record.summary import LAST_ROUNDS

        why = f": runs completed without a {study.figure}" if any(map(_completed, directories)) else ""
        fewer = f", which needs {LAST_ROUNDS} rounds" if why and study.figure == "last_accuracy" else ""
        say(f"none of {counted(len(over), 'trial')} has a result{why}{fewer}")
        return
    number, choices, value = over[0]
    words = ["fedemu", "run", part.experiments[0]]
    words += [word for setting in (*part.set, *map(override_of, choices)) for word in ("--set", setting)]
    if len(part.seeds) > 1:
        words += ["--seeds", ",".join(map(str, part.seeds))]
    elif part.seeds[0] != seed_of(part.experiments[0], part.set, os.environ):
        words += ["--seed", str(part.seeds[0])]
    from fedemu.ops.compare.text import for_people

    values = ", ".join(f"{key} = {toml_value(chosen)}" for key, chosen in choices)
    found = f"{study.figure} {for_people(study.figure, value)}"
    say(f"\nbest of {counted(len(over), 'trial')}: trial {number + 1} with {values}: {found}")
    say(f"run it alone by\n{shlex.join(words)}")
