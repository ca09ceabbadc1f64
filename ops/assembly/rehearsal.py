"""``fedemu validate``: puts an experiment together as a run does, and tells people about its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from fedemu.algorithms.data.flat import Indices
from fedemu.algorithms.interface import Tree
from fedemu.algorithms.models.frozen import frozen_of
from fedemu.ops.assembly.trial import tried_parts
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.tables.stream import in_words
from fedemu.protocol.wording import readable, some_of

MOST_NAMES: Final = 10
"""The number of classes whose names are told."""
LONGEST_NAME: Final = 40


def rehearse(experiment: Experiment, say: Callable[[str], None]) -> dict[str, str]:
    """Put an experiment together and try its first step. Returns facts for people, by subject.

    ``say`` gets a line for people while data are decoded. Raises ConfigurationError or DataError where a run
    would.
    """
    parts = tried_parts(experiment, say)
    stream, tests, public = parts.stream, parts.tests, parts.public
    sizes = np.diff(stream.arrivals.offsets)
    facts = {
        "samples": f"{sizes.sum()} to train on ({_range(sizes)} a device), {len(tests.indices)} to test on, "
        f"{parts.corpus.classes} classes",
        **_classes(parts.corpus.class_names),
        "variables": _variables(parts.variables, frozen_of(parts.model)),
    }
    if len(tests) > 1:
        counts, tested = stream.arrivals.counts(), np.diff(tests.offsets)
        facts["periods"] = (
            f"{in_words(experiment.stream, experiment.rounds)}; to train on {_spread(counts.sum(axis=0))} each, "
            f"{_spread(counts)} a device; to test on {_spread(tested)} each"
        )
    if public is not None:
        facts["public"] = f"{len(public.train)} samples to train on, {len(public.validation)} for validation"
    return facts


def _classes(names: Sequence[str]) -> dict[str, str]:
    """The first names of classes in words. Nothing if they are but numbers, or if there is one class only."""
    if len(names) == 1 or all(name.isdecimal() for name in names):
        return {}
    shown = [" ".join(readable(name[:LONGEST_NAME]).split()) for name in names]
    return {"classes": some_of(shown, MOST_NAMES)}


def _variables(variables: Tree, frozen: Tree) -> str:
    numbers, fixed = (sum(leaf.numel() for leaf in tree.values()) for tree in (variables, frozen))
    return f"{numbers} numbers in the model" + (f", and {fixed} frozen ones that do not travel" if fixed else "")


def _spread(counts: Indices) -> str:
    """The range of some numbers, and their median if they differ, in words."""
    return _range(counts) + (f" (median {np.median(counts):g})" if np.ptp(counts) else "")


def _range(counts: Indices) -> str:
    return f"{counts.min()} to {counts.max()}" if np.ptp(counts) else f"{counts.min()}"
