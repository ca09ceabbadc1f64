"""An experiment put together as its coordinator would, without playing it: what does not fit shows here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedemu.algorithms.data.partition import Indices
from fedemu.ops.assembly.learning import initial_variables, open_algorithm
from fedemu.ops.assembly.partition import build_partition
from fedemu.ops.assembly.public_data import open_public
from fedemu.ops.assembly.stream import open_stream
from fedemu.ops.assembly.trial import try_out
from fedemu.ops.data.apart import decode_apart
from fedemu.ops.data.corpora import open_corpus
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.tables.stream import in_words


def rehearse(experiment: Experiment, say: Callable[[str], None]) -> dict[str, str]:
    """Decode the data, build model and method, draw the partition, try a first step; what that came to, for people.

    Raises ConfigurationError or DataError, as a run would after its start.
    """
    decode_apart(experiment, say)
    corpus = open_corpus(experiment)
    model, algorithm = open_algorithm(experiment, corpus)
    variables = initial_variables(experiment, model)
    partition = build_partition(corpus, experiment.data, devices=experiment.fleet.devices, seed=experiment.seed)
    public = open_public(corpus, experiment.data, experiment.seed)
    try_out(experiment, corpus, model, algorithm, variables, public)
    stream, tests = open_stream(experiment, corpus, partition)
    sizes = np.diff(stream.arrivals.offsets)
    facts = {
        "samples": f"{sizes.sum()} to train on ({sizes.min()} to {sizes.max()} a device), {len(tests.indices)} to "
        f"test on, {corpus.classes} classes",
        "variables": f"{sum(leaf.numel() for leaf in variables.values())} numbers in the model",
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


def _spread(counts: Indices) -> str:
    """From the least to the most of some numbers."""
    least, most = counts.min(), counts.max()
    return f"{least}" if least == most else f"{least} to {most} (median {np.median(counts):g})"
