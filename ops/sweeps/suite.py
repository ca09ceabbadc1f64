"""Suites: sweeps that come in sizes, and end in a table of methods by streams, by which methods can be judged.

``shipped/suites/NAME.toml`` is a sweep file whose parts are streams, and whose parts have ``sizes``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from fedemu.ops.data.apart import find_data
from fedemu.ops.experiment.presets import FOLDER
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.sweeps.plan import Part, Planned, chosen, file_of, load_sweep, runs_of
from fedemu.ops.terminal import say
from fedemu.protocol.errors import ConfigurationError, DataError

SUITES = FOLDER / "suites"


def open_suite(source: str, size: str, added: Sequence[str], own_only: bool = False) -> list[Part]:
    """The parts of a suite in one size. ``added`` are further methods, which get a run in every part.

    With ``own_only`` nothing else has a run. Methods are added to presets, so a part that has none gets no run of them,
    which a line says.
    Raises ConfigurationError if there is no such suite or size, or if methods are added and no part has presets.
    """
    parts = load_sweep(str(file_of(source, SUITES, "suite"))).parts
    sizes = list(dict.fromkeys(name for part in parts for name in part.sizes))
    if size not in sizes:
        there = f"it has {', '.join(sizes)}" if sizes else "it has none; give its parts sizes"
        raise ConfigurationError(f'{source} has no size "{size}"; {there}')
    sized = [part for part in parts if size in part.sizes]
    if added and not any(part.presets for part in sized):
        raise ConfigurationError(f"no method can be added to {source}: its parts have no presets that one could follow")
    for part in sized:
        if added and not part.presets:
            say(f"{part.name} gets no run of {', '.join(added)}: it has no presets that a method could follow")
    return [_sized(part, size, added, own_only) for part in sized if part.presets or not own_only]


def planned_suite(parts: Sequence[Part], only: str | None) -> list[Planned]:
    """The runs of a suite: all streams and methods with the first seed, then with the second.

    So a suite that is not over yet has something of everything.
    """
    of_parts = [runs_of(part) for part in parts]
    seeds = sorted({run.seed for runs in of_parts for run in runs})
    return chosen([run for seed in seeds for runs in of_parts for run in runs if run.seed == seed], only)


def with_data(parts: Sequence[Part]) -> list[Part]:
    """The parts whose data are here. The others are told. Raises DataError if there is none."""
    kept = []
    for part in parts:
        try:
            for source in (*part.presets, *part.experiments):
                find_data(load_experiment(source, part.set, os.environ)[0])
        except DataError as error:
            if len(parts) == 1:
                raise
            say(f"{part.name} is left out: {error}")
        else:
            kept.append(part)
    if not kept:
        raise DataError("the data of no part are here; `fedemu presets` tells where they are looked for")
    return kept


def seconds_of(runs: Sequence[Planned]) -> float:
    """How long runs take on one core, as the suite says it."""
    return sum(run.seconds for run in runs)


def _sized(part: Part, size: str, added: Sequence[str], own_only: bool) -> Part:
    chosen_size = part.sizes[size]
    methods = part.methods if chosen_size.methods is None else chosen_size.methods
    further = [method for method in added if method not in methods]
    return part.model_copy(
        update={
            "experiments": [] if own_only else part.experiments,
            "methods": list(added) if own_only else [*methods, *further],
            "seeds": chosen_size.seeds or part.seeds,
            "rounds": chosen_size.rounds or part.rounds,
            "set": [*part.set, *chosen_size.set],
            "seconds": part.seconds if chosen_size.seconds is None else chosen_size.seconds,
        }
    )
