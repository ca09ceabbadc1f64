"""``fedemu run --seeds``: runs an experiment with several seeds, one after another, and compares the runs.

The folder of the group holds ``seed-N/`` for each seed, and ``compare/`` in the end. All run directories are claimed
before the first run begins, so the folder itself shows what is left to do.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedemu.ops.data.apart import find_data
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.sources import CONFIG_FILE, check_resume, load_experiment, read_frozen
from fedemu.ops.experiment.without_effect import WithoutEffect
from fedemu.ops.results.results import Results
from fedemu.ops.running.codes import INTERRUPTED, USAGE
from fedemu.ops.running.exits import complain
from fedemu.ops.running.folder import (
    RUNS,
    claim,
    clear_claim,
    give_back,
    holds_run,
    keep_grown,
    next_free,
    reopen,
    require_own_states,
)
from fedemu.ops.running.together import require_processor_here, run_together
from fedemu.ops.running.words import at_address, is_complete, is_over
from fedemu.ops.terminal import say
from fedemu.ops.track.kinds import check as check_trackers
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import exists, is_file, is_folder

_MOST_SEEDS = 1000
_SEEDS = re.compile(r"(\d{1,20})(?:-(\d{1,20}))?")


@dataclass(frozen=True)
class Member:
    """The run of one seed. ``new`` says that its directory was claimed just now."""

    directory: Path
    experiment: Experiment
    new: bool


@dataclass(frozen=True)
class SeedGroup:
    """The runs of one experiment with several seeds, and the folder that holds them."""

    folder: Path
    members: Sequence[Member]
    runtime: Runtime


def parse_seeds(text: str) -> list[int]:
    """Read a list of seeds, such as ``0,1,2``, ``0-4`` or ``0-4,7``.

    Raises ConfigurationError, also for a repeated seed.
    """
    seeds: list[int] = []
    for part in text.split(","):
        found = _SEEDS.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if last < first:
            raise ConfigurationError(f"{text or repr(text)} is no list of seeds; write it as in 0,1,2 or 0-4")
        if len(seeds) + last - first >= _MOST_SEEDS:
            raise ConfigurationError(f"the seeds {text} are more than {_MOST_SEEDS:,}; name fewer")
        if last >= 2**32:
            raise ConfigurationError(f"the seeds {text} have {last}, and a seed is below {2**32}")
        seeds += range(first, last + 1)
    twice = next((seed for seed, count in Counter(seeds).items() if count > 1), None)
    if twice is not None:
        raise ConfigurationError(f"the seeds {text} have {twice} more than once; name every seed once")
    return seeds


def is_group(folder: Path) -> bool:
    """Whether a folder holds the runs of a group of seeds, and is no run directory itself."""
    return not is_file(folder / CONFIG_FILE) and bool(_claimed(folder))


def new_group(
    source: str | Path | Mapping[str, Any] | None,
    seeds: Sequence[int],
    out: Path | None,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    without_effect: WithoutEffect | None = None,
) -> SeedGroup:
    """Claim a run directory for every seed in ``out``, or in the first free ``runs/NAME-seeds-N``.

    ``without_effect`` gathers what somebody has set. Raises ConfigurationError if the experiment is wrong, or if
    ``out`` is not empty.
    """
    loaded = [load_experiment(source, [*overrides, f"seed={seed}"], environment, without_effect) for seed in seeds]
    experiment, runtime = loaded[0]
    require_processor_here(runtime)
    check_trackers(runtime.track.to, runtime.track.out)
    find_data(experiment)
    folder = out if out is not None else next_free(f"{experiment.name}-seeds")
    if out is not None and exists(out) and not is_folder(out):
        raise ConfigurationError(f"{out} exists and is not a folder; choose another --out")
    if out is not None and _is_taken(out):
        hint = f", or go on with its seeds by --resume {shlex.quote(str(out))}" if is_group(out) else ""
        raise ConfigurationError(f"{out} exists and is not empty; choose another --out{hint}")
    group = SeedGroup(folder, members := [], runtime)
    with _whole_or_not_at_all(group):
        for experiment, _ in loaded:
            members.append(_claim(folder, experiment))
    return group


def reopen_group(
    folder: Path, seeds: Sequence[int] | None, overrides: Sequence[str], environment: Mapping[str, str]
) -> SeedGroup:
    """Open a group of seeds to continue it, perhaps with more rounds. ``seeds`` are those to run; None means all.

    A seed that the group does not have yet gets a run directory. Raises ConfigurationError if ``folder`` holds no
    group, or if other settings are to change.
    """
    wanted, runtime = resumed_group(folder, overrides, environment)
    require_processor_here(runtime)
    check_trackers(runtime.track.to, runtime.track.out)
    claimed, group = _claimed(folder), SeedGroup(folder, members := [], runtime)
    with _whole_or_not_at_all(group):
        for seed in claimed if seeds is None else seeds:
            if seed in claimed:
                experiment, _ = reopen(claimed[seed], [*overrides, f"seed={seed}"], environment)
                if not is_complete(claimed[seed], experiment):
                    require_own_states(claimed[seed], experiment, runtime)
                keep_grown(claimed[seed], experiment)
                members.append(Member(claimed[seed], experiment, new=False))
            else:
                clear_claim(folder / f"seed-{seed}")
                members.append(_claim(folder, wanted.model_copy(update={"seed": seed})))
    return group


def resumed_group(folder: Path, overrides: Sequence[str], environment: Mapping[str, str]) -> tuple[Experiment, Runtime]:
    """The experiment of a group's first seed, perhaps with more rounds, and this machine's settings.

    Raises ConfigurationError as ``reopen_group`` does. Nothing is written.
    """
    claimed = _claimed(folder)
    if not claimed:
        if is_file(folder / CONFIG_FILE):
            raise ConfigurationError(
                f"{folder} is the run of one seed; leave out --seeds, or start a group in another folder with --out"
            )
        where = "in another folder with --out" if _is_taken(folder) else f"with --out {shlex.quote(str(folder))}"
        raise ConfigurationError(f"{folder} holds no group of seeds; start one {where}")
    # One whose experiment is gone gets it back when it is reopened.
    seed, directory = min(claimed.items(), key=lambda member: not is_file(member[1] / CONFIG_FILE))
    return check_resume(read_frozen(directory), [*overrides, f"seed={seed}"], environment)


def run_group(group: SeedGroup, *, print_summaries: bool) -> int:
    """Run every seed that is not done, then compare all runs of the folder. Returns the exit code.

    If a run fails or is interrupted, the group ends with its code.
    """
    try:
        for place, member in enumerate(group.members, 1):
            what = f"seed {member.experiment.seed} ({place} of {len(group.members)})"
            if not member.new and is_over(member.directory, member.experiment):
                say(f"{what}: finished already, in {member.directory}")
                continue
            first = place == 1 and member.new
            code = run_together(
                member.directory, member.experiment, group.runtime, new=first, print_summary=False, heading=what
            )
            if code == USAGE and first and give_back(member.directory):
                abandon(group)
                return code
            if code:
                _say_how_to_go_on(group)
                return code
        _conclude(group, print_summaries)
    except KeyboardInterrupt:
        _say_how_to_go_on(group)
        return INTERRUPTED
    return 0


def _conclude(group: SeedGroup, print_summaries: bool) -> None:
    # Importing matplotlib takes a second, for which no run should have to wait.
    from fedemu.ops.compare.compare import compare
    from fedemu.ops.compare.page.page import claim_folder, write_comparison
    from fedemu.ops.compare.text import text, width_of

    comparison = compare([group.folder])
    out = group.folder / "compare"
    claim_folder(out)
    page = write_comparison(comparison, out)
    for warning in comparison.warnings:
        complain(f"warning: {warning}")
    say(text(comparison, width_of(sys.stderr.isatty())))
    say(f"plots and numbers are in {page}")
    if print_summaries:
        print(json.dumps([json.loads(Results.read(member.directory).to_json()) for member in group.members]))


def _say_how_to_go_on(group: SeedGroup) -> None:
    say("or go on with all seeds; those that are done are kept:")
    say(f"fedemu {at_address('run', group.runtime)} --resume {shlex.quote(str(group.folder))}")


def abandon(group: SeedGroup) -> None:
    """Remove what was claimed for runs that have not begun."""
    for member in group.members:
        if member.new and exists(member.directory):
            give_back(member.directory)
    with suppress(OSError):  # other runs are in it
        group.folder.rmdir()
        if group.folder.parent == RUNS:
            RUNS.rmdir()


@contextmanager
def _whole_or_not_at_all(group: SeedGroup) -> Iterator[None]:
    """Abandon the members that the group has got so far if the next one cannot be had, or if Ctrl-C comes."""
    try:
        yield
    except BaseException:
        abandon(group)
        raise


def _is_taken(folder: Path) -> bool:
    """Whether something is where the folder of a group is to be."""
    return is_file(folder) or (is_folder(folder) and any(folder.iterdir()))


def _claim(folder: Path, experiment: Experiment) -> Member:
    return Member(claim(experiment, folder / f"seed-{experiment.seed}"), experiment, new=True)


def _claimed(folder: Path) -> dict[int, Path]:
    """The run directories in ``folder``, by seed, in ascending order."""
    found = {
        int(name[1]): child
        for child in (folder.iterdir() if is_folder(folder) else ())
        if (name := re.fullmatch(r"seed-(\d+)", child.name)) and holds_run(child)
    }
    return dict(sorted(found.items()))
