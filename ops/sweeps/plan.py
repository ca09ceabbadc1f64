"""What a sweep runs: lists of experiments, settings and seeds, read from a TOML file or ``shipped/sweeps/NAME.toml``.

The first line of a shipped file is a comment that describes it. A sweep with sizes is a suite (``suite.py``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, JsonValue, ValidationError

from fedemu.ops.experiment.mistakes import plain_table, refuse
from fedemu.ops.experiment.near import did_you_mean
from fedemu.ops.experiment.presets import FOLDER, names_in
from fedemu.ops.experiment.read_toml import read_toml
from fedemu.ops.experiment.tables.section import Count, NotNegative, Section
from fedemu.ops.running.seeds import parse_seeds
from fedemu.ops.sweeps.grid import OF_MACHINES, Choice, name_of, override_of, points
from fedemu.ops.sweeps.methods import folder_of, resolved
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import is_file
from fedemu.protocol.ids import digest_of

SWEEPS = FOLDER / "sweeps"
MOST_RUNS = 100_000
LONGEST_NAME = 200
"""Bytes in the name of a folder. File systems take 255, and files beside it have longer names."""
OWN_FILES = ("compare", "sweep.csv", "suite.csv", "suite.md")
"""What a sweep writes into its folder beside the runs."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1)]


class Size(Section):
    """What a part is in one size of a suite. What is left out is as in the part. ``set`` is added to that of it."""

    methods: list[str] | None = None
    seeds: Seeds | None = None
    rounds: Count | None = None
    set: list[str] = Field(default_factory=list)
    seconds: NotNegative | None = None


class Part(Section):
    """Runs that belong in one comparison: every experiment with every point of the grid and every seed.

    ``experiments`` are added to every preset with every method. ``set`` holds overrides for all of them, as in
    ``local.lr=0.05``, and ``tuned`` those for single methods or experiments. ``grid`` holds lists of values by key.
    ``seconds`` is how long a run takes on one core, and ``slow`` says it for single methods. With ``sizes`` the part is
    only in those of a suite.
    """

    name: Name
    experiments: list[str] = Field(default_factory=list)
    presets: list[str] = Field(default_factory=list)
    methods: list[str] = Field(default_factory=list)
    grid: dict[str, Annotated[list[JsonValue], Field(min_length=1)]] = Field(default_factory=dict)
    seeds: Seeds = Field(default_factory=lambda: [1])
    rounds: Count | None = None
    set: list[str] = Field(default_factory=list)
    tuned: dict[str, list[str]] = Field(default_factory=dict)
    seconds: NotNegative = 0.0
    slow: dict[str, NotNegative] = Field(default_factory=dict)
    sizes: dict[str, Size] = Field(default_factory=dict)


class Sweep(Section):
    """The parts of a sweep, in the order in which they are run."""

    parts: Annotated[list[Part], Field(min_length=1)]


@dataclass(frozen=True)
class Planned:
    """One run of a sweep. ``part`` may be empty, if there is only one; ``method`` is None if none was added.

    ``choices`` are the run's values of the grid, which are among ``overrides`` too. ``seconds`` is how long it takes on
    one core, 0 if nobody knows. ``listed`` are further values for the table, which the folder's name has already.
    """

    part: str
    experiment: str
    seed: int
    overrides: tuple[str, ...]
    choices: tuple[Choice, ...] = ()
    name: str = ""
    method: str | None = None
    seconds: float = 0.0
    listed: tuple[Choice, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the run below that of the sweep: ``PART/EXPERIMENT,KEY=VALUE,.../seed-N``."""
        return self.group / f"seed-{self.seed}"

    @property
    def group(self) -> Path:
        """The folder of all seeds of this run. A name that no folder may have is cut, and ends with a digest."""
        named = self.name or folder_of(self.experiment)
        name = ",".join([named, *([name_of(self.choices)] if self.choices else [])])
        if len(encoded := name.encode()) > LONGEST_NAME:
            mark = f"-{digest_of(encoded)[:8]}"
            name = encoded[: LONGEST_NAME - len(mark)].decode(errors="ignore") + mark
        return Path(self.part, name)


def is_sweep(source: str) -> bool:
    """Whether a source is a sweep: a shipped one, or a TOML file with parts. Anything else is an experiment."""
    path = Path(source)
    if is_file(path):
        return "parts" in read_toml(path)
    return source in names_in(SWEEPS)


def file_of(source: str, folder: Path, what: str) -> Path:
    """The file that ``source`` names: by its path, or by its name a shipped one in ``folder``.

    ``what`` such files are is said in the error, a ConfigurationError, if there is none.
    """
    if is_file(Path(source)):
        return Path(source)
    known = names_in(folder)
    if source not in known:
        hint = did_you_mean(source, known) or f"; the shipped {what}s are {', '.join(known)}"
        raise ConfigurationError(f'there is no file and no {what} "{source}"{hint}')
    return folder / f"{source}.toml"


def load_sweep(source: str) -> Sweep:
    """Read a sweep from a file, or a shipped one by its name.

    Raises ConfigurationError if there is none, or if there is a mistake in it.
    """
    path = file_of(source, SWEEPS, "sweep")
    table = plain_table(read_toml(path))
    try:
        for given in _tables(table.get("parts")):
            for seeded in (given, *_tables(given.get("sizes"))):
                if isinstance(seeded.get("seeds"), str):
                    seeded["seeds"] = parse_seeds(seeded["seeds"])
        sweep = Sweep.model_validate_json(json.dumps(table))
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {refuse(error, table, Sweep)}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {str(error).replace('--seeds', 'seeds')}") from None
    names = [part.name for part in sweep.parts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigurationError(f"{path}: two parts are named {twice}; give each a name of its own")
    for part in sweep.parts:
        if mistake := _mistake(part):
            raise ConfigurationError(f"{path}: {mistake}")
    return sweep


def planned(sweep: Sweep, only: str | None = None) -> list[Planned]:
    """All runs of a sweep, the first seed of all experiments of a part before the second.

    ``only`` is a regular expression, which has to be found in the run's folder. Raises ConfigurationError if nothing
    fits, or if two runs would have the same folder.
    """
    return chosen([run for part in sweep.parts for run in runs_of(part)], only)


def runs_of(part: Part) -> list[Planned]:
    """The runs of one part."""
    fixed = (*part.set, *([f"rounds={part.rounds}"] if part.rounds else []))
    sources: list[tuple[str, str | None]] = [(experiment, None) for experiment in part.experiments]
    methods: Sequence[str | None] = part.methods or [None]
    sources += [(preset, method) for preset in part.presets for method in methods]
    if len(sources) * len(part.seeds) * math.prod(map(len, part.grid.values())) > MOST_RUNS:
        raise ConfigurationError(f"the part {part.name or 'of the sweep'} has more than {MOST_RUNS:,} runs; name fewer")
    runs = []
    for seed in part.seeds:
        for source, method in sources:
            experiment, of_method, name = (source, (), "") if method is None else resolved(source, method)
            for choices in points(part.grid):
                named = method or source
                overrides = (*of_method, *fixed, *part.tuned.get(named, ()), *map(override_of, choices))
                seconds = part.slow.get(named, part.seconds)
                runs.append(Planned(part.name, experiment, seed, overrides, choices, name, method, seconds))
    return runs


def chosen(runs: Sequence[Planned], only: str | None) -> list[Planned]:
    """The runs that ``only`` finds. Raises ConfigurationError as ``planned`` does."""
    try:
        wanted = re.compile(only or "")
    except re.error as error:
        raise ConfigurationError(f"--only {only} is no regular expression: {error}") from None
    seen: set[Path] = set()
    for run in runs:
        if run.folder in seen:
            raise ConfigurationError(f"two runs of the sweep would be written to {run.folder}; name every run once")
        if (first := run.folder.parts[0]) in OWN_FILES:
            what = f"part {first}" if run.part else f"experiment {first}"
            raise ConfigurationError(f"a sweep writes {first} itself; give the {what} another name")
        seen.add(run.folder)
    found = [run for run in runs if wanted.search(str(run.folder))]
    if not found:
        raise ConfigurationError(f"--only {only} fits no run of the sweep, such as {runs[0].folder}")
    return found


def _mistake(part: Part) -> str:
    """What does not go together in a part. Empty if all of it does."""
    sizes = part.sizes.values()
    methods = [*part.methods, *(method for size in sizes for method in size.methods or ())]
    if methods and not part.presets:
        return f"the part {part.name} has methods, and no presets that they follow"
    if not part.experiments and not part.presets:
        return f"the part {part.name} names no experiments and no presets; name some"
    settings = [part.set, *part.tuned.values(), *(size.set for size in sizes)]
    fixed = {override.partition("=")[0].strip() for overrides in settings for override in overrides}
    if "seed" in {*fixed, *part.grid}:
        return f"the part {part.name} sets seed; write it as seeds = [...]"
    if part.rounds or any(size.rounds for size in sizes):
        fixed.add("rounds")
    for key in part.grid:
        varies = f"the grid of the part {part.name} varies {key}"
        if key.split(".")[0] in OF_MACHINES:
            return f"{varies}, a setting of the machine, which changes no result"
        if key in fixed:
            return f"{varies}, which the part sets to one value, too; leave one of them out"
    if unknown := [name for name in part.tuned if name not in (*methods, *part.experiments)]:
        return f"tuned names {unknown[0]}, which is no method of the part {part.name}"
    return ""


def _tables(value: Any) -> list[dict[str, Any]]:
    """The tables in a list or in a table. What is anything else is a mistake that is told later."""
    found = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [one for one in found if isinstance(one, dict)]
