"""Which training samples become public data. ``partitioners.py`` divides the rest over devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.flat import Indices
from fedemu.algorithms.data.partition import share_of
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
    labels: NDArray[np.int64] | None = None,
    imbalance: float = 1.0,
) -> PublicSplit:
    """Draw ``round(fraction * samples)`` samples uniformly; ``floor(validation * drawn)`` of them are for validation.

    With ``ids [samples]`` it draws ids instead, ``round(fraction * distinct ids)`` but at least one, and takes all
    their samples. With an ``imbalance`` above 1 it draws by ``labels [samples]``: the most frequent class is drawn
    ``imbalance`` times as often as the rarest, and ``long_tail`` tells how often the others are.

    Raises ConfigurationError if one of the two parts or the rest would be empty, if a class has too few samples, or if
    there are both ids and an imbalance.
    """
    if imbalance > 1:
        public = _unbalanced(fraction, imbalance, generator, labels, by_ids=ids is not None)
    elif ids is None:
        public = np.zeros(samples, dtype=bool)
        public[generator.permutation(samples)[: round(fraction * samples)]] = True
    else:
        values, position = np.unique(ids, return_inverse=True)
        chosen = np.zeros(len(values), dtype=bool)
        chosen[generator.permutation(len(values))[: max(1, round(fraction * len(values)))]] = True
        public = chosen[position]
    drawn, rest = np.flatnonzero(public), np.flatnonzero(~public)
    held_out = np.zeros(len(drawn), dtype=bool)
    held_out[generator.permutation(len(drawn))[: int(share_of(validation, len(drawn)))]] = True
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


def long_tail(samples: int, classes: int, imbalance: float) -> NDArray[np.int64]:
    """How many of ``samples`` each class has, ``[classes]``, from the most frequent to the rarest.

    The numbers fall by the same factor from class to class, from ``imbalance`` down to 1, up to rounding. They add up
    to ``samples``.
    """
    shares = imbalance ** -(np.arange(classes) / max(classes - 1, 1))
    ends = np.rint(samples * np.cumsum(shares) / shares.sum())
    counts: NDArray[np.int64] = np.diff(ends, prepend=0).astype(np.int64)
    return counts


def _unbalanced(
    fraction: float,
    imbalance: float,
    generator: np.random.Generator,
    labels: NDArray[np.int64] | None,
    by_ids: bool,
) -> NDArray[np.bool_]:
    """Which samples are drawn. The order of the classes, from frequent to rare, is drawn too."""
    if by_ids:
        raise ConfigurationError(
            f"data.public.imbalance = {imbalance:g} draws by classes, but a natural partition draws whole values of "
            "its column; set it to 1, or choose another partition"
        )
    assert labels is not None, "an imbalance needs labels"
    present = np.unique(labels)
    counts = long_tail(round(fraction * len(labels)), len(present), imbalance)
    public = np.zeros(len(labels), dtype=bool)
    for label, count in zip(generator.permutation(present), counts, strict=True):
        own = np.flatnonzero(labels == label)
        if count > len(own):
            raise ConfigurationError(
                f"data.public.imbalance = {imbalance:g} asks for {count} public samples of class {label}, which has "
                f"{len(own)}; lower the imbalance, or data.public.fraction"
            )
        public[generator.permutation(own)[:count]] = True
    return public
