"""Which training samples become public data. ``partitioners.py`` divides the rest over devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.partition import Indices
from fedemu.protocol.errors import ConfigurationError


@dataclass(frozen=True)
class PublicSplit:
    """Ascending indices into ``Corpus.train``: the two parts of the public data, and the rest for the devices."""

    train: Indices
    validation: Indices
    rest: Indices


def public_split(
    samples: int,
    *,
    fraction: float,
    validation: float,
    generator: np.random.Generator,
    ids: NDArray[Any] | None = None,
) -> PublicSplit:
    """Draw ``round(fraction * samples)`` samples uniformly; ``floor(validation * drawn)`` of them are for validation.

    With ``ids [samples]`` it draws ids instead, ``round(fraction * distinct ids)`` but at least one, and takes all
    their samples. Raises ConfigurationError if one of the two parts or the rest would be empty.
    """
    if ids is None:
        public = np.zeros(samples, dtype=bool)
        public[generator.permutation(samples)[: round(fraction * samples)]] = True
    else:
        values, position = np.unique(ids, return_inverse=True)
        chosen = np.zeros(len(values), dtype=bool)
        chosen[generator.permutation(len(values))[: max(1, round(fraction * len(values)))]] = True
        public = chosen[position]
    drawn, rest = np.flatnonzero(public), np.flatnonzero(~public)
    held_out = np.zeros(len(drawn), dtype=bool)
    held_out[generator.permutation(len(drawn))[: int(validation * len(drawn))]] = True
    split = PublicSplit(drawn[~held_out], drawn[held_out], rest)
    takes = f"data.public.fraction = {fraction:g} takes {len(drawn)} of {samples} training samples"
    if not len(split.train) or not len(split.validation):
        raise ConfigurationError(
            f"{takes}, {len(split.train)} to train on and {len(split.validation)} for validation; both need one; "
            "raise the fraction, or change data.public.validation"
        )
    if not len(rest):
        raise ConfigurationError(f"{takes}, which leaves devices nothing; lower the fraction")
    return split
