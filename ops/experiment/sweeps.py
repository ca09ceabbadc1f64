"""Sweeps: lists of experiments and seeds, read from a TOML file or from ``shipped/sweeps/NAME.toml``.

The first line of a shipped file is a comment that describes it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from fedemu.ops.experiment.mistakes import plain_table, refuse
from fedemu.ops.experiment.near import did_you_mean
from fedemu.ops.experiment.presets import FOLDER
from fedemu.ops.experiment.read_toml import read_toml
from fedemu.ops.experiment.tables.section import Count, Section
from fedemu.protocol.errors import ConfigurationError

SHIPPED = FOLDER / "sweeps"
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Part(Section):
    """Runs that belong in one comparison: every experiment with every seed.

    ``set`` holds overrides for all of them, as in ``local.lr=0.05``.
    """

    name: Name
    experiments: Annotated[list[str], Field(min_length=1)]
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = Field(default_factory=lambda: [1])
    rounds: Count | None = None
    set: list[str] = Field(default_factory=list)


class Sweep(Section):
    """The parts of a sweep, in the order in which they are run."""

    parts: Annotated[list[Part], Field(min_length=1)]


@dataclass(frozen=True)
class Planned:
    """One run of a sweep, and its folder below that of the sweep."""

    part: str
    experiment: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """``PART/EXPERIMENT/seed-N``."""
        return Path(self.part, Path(self.experiment).name.removesuffix(".toml"), f"seed-{self.seed}")


def load_sweep(source: str) -> Sweep:
    """Read a sweep from a file, or a shipped one by its name.

    Raises ConfigurationError if there is none, or if there is a mistake in it.
    """
    path = Path(source)
    if not path.is_file():
        known = sorted(each.stem for each in SHIPPED.glob("*.toml"))
        if source not in known:
            hint = did_you_mean(source, known) or f"; the shipped sweeps are {', '.join(known)}"
            raise ConfigurationError(f'there is no file and no sweep "{source}"{hint}')
        path = SHIPPED / f"{source}.toml"
    table = plain_table(read_toml(path))
    try:
        sweep = Sweep.model_validate_json(json.dumps(table))
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {refuse(error, table, Sweep)}") from None
    names = [part.name for part in sweep.parts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigurationError(f"{path}: two parts are named {twice}; give each a name of its own")
    return sweep


def planned(sweep: Sweep, only: str | None = None) -> list[Planned]:
    """All runs of a sweep, the first seed of all experiments of a part before the second.

    ``only`` is a regular expression, which has to be found in the run's folder. Raises ConfigurationError if nothing
    fits, or if two runs would have the same folder.
    """
    try:
        wanted = re.compile(only or "")
    except re.error as error:
        raise ConfigurationError(f"--only {only} is no regular expression: {error}") from None
    runs = [
        Planned(part.name, experiment, seed, (*part.set, *([f"rounds={part.rounds}"] if part.rounds else [])))
        for part in sweep.parts
        for seed in part.seeds
        for experiment in part.experiments
    ]
    folders = [run.folder for run in runs]
    if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise ConfigurationError(f"two runs of the sweep would be written to {twice}; name every run once")
    chosen = [run for run in runs if wanted.search(str(run.folder))]
    if not chosen:
        raise ConfigurationError(f"--only {only} fits no run of the sweep, such as {folders[0]}")
    return chosen
