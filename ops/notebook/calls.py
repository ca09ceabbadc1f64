"""What notebooks and scripts call: run an experiment, open a run, compare runs. ``fedemu`` hands these on.

``run`` does the same as the command ``fedemu run``, and ``compare`` the same as ``fedemu compare``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, overload

from fedemu.ops.compare.compare import compare as side_by_side
from fedemu.ops.experiment import Runtime
from fedemu.ops.experiment.toml_text import toml_value
from fedemu.ops.experiment.without_effect import WithoutEffect
from fedemu.ops.notebook.card import from_here
from fedemu.ops.notebook.compared import ComparedRuns
from fedemu.ops.notebook.play import Ended, play
from fedemu.ops.notebook.result import Result
from fedemu.ops.notebook.seeds import SeedResults
from fedemu.ops.notebook.settings import Source, in_call, load, named, overrides
from fedemu.ops.notebook.shown import Shown, Silence, open_shown
from fedemu.ops.running.codes import INTERRUPTED, USAGE
from fedemu.ops.running.folder import (
    accept_growth,
    claim,
    give_back,
    keep_grown,
    last_kept,
    reopen,
    require_own_states,
    take_back_growth,
)
from fedemu.ops.running.seeds import SeedGroup, abandon, is_group, new_group, parse_seeds, reopen_group
from fedemu.ops.running.words import is_complete
from fedemu.ops.terminal import say
from fedemu.protocol.code.own_code import Told, retold
from fedemu.protocol.errors import ConfigurationError, FedemuError, Interrupted, UnreachableError

Seeds = int | str | Sequence[int]
"""Seeds of several runs: their number, a text such as ``0-4`` or ``0,3``, or the seeds."""
_BY_CODE: Mapping[int, type[FedemuError]] = {
    error.exit_code: error for error in (ConfigurationError, UnreachableError, Interrupted)
}


@overload
def run(
    experiment: Source = None,
    *,
    out: Path | str | None = None,
    seeds: None = None,
    resume: None = None,
    transport: Literal["zmq", "memory"] | None = None,
    progress: bool = True,
    **settings: Any,
) -> Result: ...


@overload
def run(
    experiment: Source = None,
    *,
    out: Path | str | None = None,
    seeds: Seeds,
    resume: Path | str | None = None,
    transport: Literal["zmq", "memory"] | None = None,
    progress: bool = True,
    **settings: Any,
) -> SeedResults: ...


@overload
def run(
    experiment: None = None,
    *,
    out: None = None,
    seeds: None = None,
    resume: Path | str,
    transport: Literal["zmq", "memory"] | None = None,
    progress: bool = True,
    **settings: Any,
) -> Result | SeedResults: ...


def run(
    experiment: Source = None,
    *,
    out: Path | str | None = None,
    seeds: Seeds | None = None,
    resume: Path | str | None = None,
    transport: Literal["zmq", "memory"] | None = None,
    progress: bool = True,
    **settings: Any,
) -> Result | SeedResults:
    """Run an experiment on this machine, wait for its end, and return its results.

    ``experiment`` is the name of a preset, a TOML file, a table, or an ``Experiment``. Without it, it is ``digits``.
    ``out`` is the new run directory (``runs/NAME-N`` by default). Every other keyword overrides one setting, with two
    underscores for the dot. The keyword ``data`` is a data set: its name, or an object that holds one, such as a pair
    ``(x, y)``, a torch ``Dataset``, a pandas frame or a Hugging Face ``Dataset``.

    ``seeds`` runs the experiment once for each seed and returns ``SeedResults``: a list as in ``[1, 2, 3]``, a text as
    in ``"0-4"``, or the number of seeds, which are then 1, 2, 3 and so on. ``resume`` is the directory of a run, or of
    a group of seeds, that was interrupted: what is done is kept. A finished run can go on with more ``rounds``.

    The run has processes of its own, so it does not matter whether an event loop runs here. ``progress`` shows how far
    it is: in a notebook by one output that changes, elsewhere by lines on stderr. An interrupt of the cell stops the
    run with a checkpoint.

    Raises ConfigurationError, UnreachableError (also for a missed quorum) or Interrupted, like the exit codes 2, 3, 4.
    If somebody's own code failed, the error has the error of that code as its cause.

    >>> results = fedemu.run("digits-small", rounds=5, local__lr=0.05, out="gentle")
    >>> round(results.accuracy, 3)
    0.753
    """
    __tracebackhide__ = True  # IPython and pytest show the frames of the caller, and not those of this package.
    try:
        if resume is not None:
            for given, name in ((experiment is not None, "an experiment"), (out is not None, "out")):
                if given:
                    raise ConfigurationError(
                        f"resume goes on with the experiment and the folder of {resume}; leave out {name}"
                    )
            return _go_on(Path(resume), seeds, _written(settings, transport), progress)
        if seeds is not None and "seed" in settings:
            raise ConfigurationError("seed is for one run, and here are several seeds; leave out seed")
        return _begin(experiment, out, seeds, _written(settings, transport), progress)
    except FedemuError as error:
        raise in_call(error) from error.__cause__


def open_run(directory: Path | str) -> Result:
    """Read what a run has written so far. An unfinished run has an empty ``summary``.

    Raises ConfigurationError if ``directory`` is no run directory.

    >>> round(fedemu.open_run("gentle").accuracy, 3)
    0.753
    """
    return Result.read(Path(directory))


Compared = Path | str | Result | SeedResults
"""What can be compared: a run directory, a folder of run directories, or results."""


def compare(*runs: Compared | Iterable[Compared], target: float | None = None, last: int = 100) -> ComparedRuns:
    """Put runs in one table. Runs that differ only by their seed are one row, with mean ± standard deviation.

    Each of ``runs`` is a result of ``fedemu.run``, a run directory, a folder of run directories, or a list of these.
    ``target`` is an accuracy between 0 and 1, by default the best one of the first row; the rounds until 50, 75 and
    95 % of it are counted. ``last`` is the number of last rounds over which an accuracy is the mean. Nothing is
    written; ``page()`` of what is returned writes the page.

    Raises ConfigurationError if one of them holds no run, or if ``target`` or ``last`` is out of range.

    >>> fedemu.compare("gentle", "plain", target=0.9)  # prints the table
    """
    __tracebackhide__ = True
    try:
        paths = [path for some in runs for path in _paths(some)]
        if not paths:
            raise ConfigurationError('compare has nothing to compare; name results or folders, as in compare("runs")')
        if target is not None and not 0 < target <= 1:
            raise ConfigurationError(f"target = {target} must be above 0 and at most 1; it is a share, as in 0.9")
        if last < 1:
            raise ConfigurationError(f"last = {last} must be at least 1; it is a number of rounds")
        return ComparedRuns(side_by_side(paths, target, last))
    except FedemuError as error:
        raise in_call(error) from error.__cause__


def _paths(some: Compared | Iterable[Compared]) -> list[Path]:
    match some:
        case str() | Path():
            return [Path(some)]
        case Result():
            return [from_here(some.directory)]
        case SeedResults():
            return [from_here(result.directory) for result in some]
        case _:
            return [path for one in some for path in _paths(one)]


def _written(settings: Mapping[str, Any], transport: str | None) -> list[str]:
    """The keywords of a call as overrides."""
    return overrides(settings if transport is None else {**settings, "runtime__transport": transport})


def _begin(
    experiment: Source, out: Path | str | None, seeds: Seeds | None, written: list[str], progress: bool
) -> Result | SeedResults:
    """Run an experiment from its beginning."""
    place = None if out is None else Path(out)
    without_effect, told = WithoutEffect(), say if progress else Silence().line
    if seeds is not None:
        with named(experiment) as (source, environment):
            group = new_group(source, _seeds(seeds), place, written, environment, without_effect)
        without_effect.tell(told)
        return _run_group(group, progress)
    checked, runtime = load(experiment, written, without_effect)
    directory = claim(checked, place)
    without_effect.tell(told)
    return _run_one(directory, checked.name, runtime, progress, new=True)


def _go_on(folder: Path, seeds: Seeds | None, written: list[str], progress: bool) -> Result | SeedResults:
    """Go on with a run, or with a group of seeds. If that is refused, they have as many rounds as before."""
    try:
        return _resumed(folder, seeds, written, progress)
    except ConfigurationError:
        take_back_growth(folder)
        raise
    finally:
        accept_growth(folder)


def _resumed(folder: Path, seeds: Seeds | None, written: list[str], progress: bool) -> Result | SeedResults:
    if seeds is not None or is_group(folder):
        chosen = None if seeds is None else _seeds(seeds)
        return _run_group(reopen_group(folder, chosen, written, os.environ), progress)
    checked, runtime = reopen(folder, written, os.environ)
    if not is_complete(folder, checked):
        require_own_states(folder, checked, runtime)
    keep_grown(folder, checked)
    if is_complete(folder, checked):
        return Result.read(folder)
    return _run_one(folder, checked.name, runtime, progress, new=False)


def _seeds(seeds: Seeds) -> list[int]:
    """The seeds that were asked for. Raises ConfigurationError if they are none."""
    if isinstance(seeds, str):
        return parse_seeds(seeds)
    if isinstance(seeds, Iterable):
        return parse_seeds(",".join(map(str, seeds)))
    if isinstance(seeds, bool) or not isinstance(seeds, Integral) or seeds < 1:
        raise ConfigurationError(f"seeds = {seeds} is no number of seeds; write at least 1, or a list as in [1, 2]")
    return parse_seeds(f"1-{seeds}")


def _run_one(directory: Path, name: str, runtime: Runtime, progress: bool, *, new: bool) -> Result:
    """Play the run of a directory, and read its results. A ``new`` directory is given back if a setting is wrong."""
    shown = open_shown(name, progress)
    ended = play(directory, runtime, shown)
    if ended.code == 0:
        result = Result.read(directory)
        shown.ended(result.in_a_line)
        return result
    if ended.code == USAGE and new:
        give_back(directory)
    if ended.code == USAGE:
        raise _failure(shown, ended, directory)
    last = last_kept(directory)
    stopped = f"stopped after round {last}" if last else "stopped before the end of the first round"
    raise _failure(shown, ended, directory, stopped)


def _run_group(group: SeedGroup, progress: bool) -> SeedResults:
    """Play the runs of several seeds that are not done, and read the results of all."""
    name = group.members[0].experiment.name
    shown = open_shown(name, progress)
    ended = play(group.folder, group.runtime, shown, [member.experiment.seed for member in group.members])
    if ended.code == USAGE:
        first = group.members[0]
        if first.new and give_back(first.directory):  # no run has begun
            abandon(group)
            raise _failure(shown, ended, group.folder)
    if ended.code:
        raise _failure(shown, ended, group.folder, "stopped; the seeds that are done are kept")
    results = SeedResults.read(group.folder, [member.directory for member in group.members])
    shown.ended(f"{name}: {len(results)} seeds completed, in {group.folder}")
    return results


def _failure(shown: Shown, ended: Ended, folder: Path, stopped: str = "") -> FedemuError:
    """The error of a run that did not end well. ``stopped`` says how far it came, if it can go on."""
    words = "" if ended.code == INTERRUPTED else ended.words
    if not words and not stopped:
        words = f"the run ended with code {ended.code}; see {folder / 'logs'}"
    said = ended.cause or Told(words)
    if stopped:
        shown.ended(stopped)
        sentence = f"{stopped}; go on with fedemu.run(resume={toml_value(str(folder))})"
        between = "\n" if "\n" in said.sentence else "; " if said.sentence else ""
        said = said._replace(sentence=f"{said.sentence}{between}{sentence}")
    else:
        shown.ended("not started")
    return retold(said, _BY_CODE.get(ended.code, FedemuError))
