"""Strategies that balance the classes of the samples that a device keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from fedemu.algorithms.replay.selection.candidates import Candidates, Positions, known, within_budget
from fedemu.algorithms.replay.selection.diversity import directions

Counts = Positions
EQUAL: Final = 1e-12
"""Squared distances that differ by no more count as equal in herding: rounding makes up to some 1e-15 of them."""


def class_quotas(counts: ArrayLike, budget: int, generator: np.random.Generator) -> Counts:
    """The number of samples to keep of each class, ``[classes]``: as equal as ``counts [classes]`` allow.

    They are ``budget`` in all, or all samples if there are fewer. A class with too few samples keeps all of them. Which
    classes keep one sample more than others is drawn at random.
    """
    held = np.asarray(counts, dtype=np.int64)
    quotas = np.zeros_like(held)
    while (left := min(budget, int(held.sum())) - int(quotas.sum())) > 0:
        unmet = np.flatnonzero(quotas < held)
        if left < len(unmet):
            quotas[generator.permutation(unmet)[:left]] += 1
        else:
            quotas[unmet] = np.minimum(held[unmet], quotas[unmet] + left // len(unmet))
    return quotas


def herding(features: ArrayLike, budget: int) -> Positions:
    """The first ``budget`` positions by herding, in the order of their choice, from ``features [n, features]``.

    Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017, algorithm 4. Features are
    scaled to norm 1; a row of zeros stays zero. Each step adds the sample that brings the mean of the chosen samples
    nearest to the mean of all, and among equals the one with the lowest position. The means are not scaled to norm 1.
    """
    rows = directions(features)
    mean, total = rows.sum(axis=0) / max(1, len(rows)), np.zeros(rows.shape[1])
    chosen: list[int] = []
    for count in range(1, min(budget, len(rows)) + 1):
        away = np.square(mean - (total + rows) / count).sum(axis=1)
        away[chosen] = np.inf
        # Two samples alone are equally far from their mean, and rounding must not choose between them.
        chosen.append(int((away <= away.min() + EQUAL).argmax()))
        total += rows[chosen[-1]]
    return np.array(chosen, dtype=np.int64)


@within_budget
def class_balanced(candidates: Candidates, budget: int, generator: np.random.Generator) -> Positions:
    """Keep equally many samples of each class, as far as there are enough, drawn at random within the class."""
    return _by_class(
        candidates, budget, generator, "class balance", lambda members, quota: generator.permutation(members)[:quota]
    )


@within_budget
def by_herding(candidates: Candidates, budget: int, generator: np.random.Generator) -> Positions:
    """Keep the samples that ``herding`` chooses within each class, with the quotas of ``class_balanced``.

    These are the exemplars of iCaRL.
    """
    features = np.asarray(known(candidates.features, "herding", "features")())
    return _by_class(
        candidates, budget, generator, "herding", lambda members, quota: members[herding(features[members], quota)]
    )


def _by_class(
    candidates: Candidates,
    budget: int,
    generator: np.random.Generator,
    strategy: str,
    choose: Callable[[Positions, int], Positions],
) -> Positions:
    """The positions that ``choose(members, quota)`` returns for each class, in the order of labels."""
    labels = known(candidates.labels, strategy, "labels")
    classes, counts = np.unique(labels, return_counts=True)
    quotas = class_quotas(counts, budget, generator)
    return np.concatenate(
        [choose(np.flatnonzero(labels == label), int(quota)) for label, quota in zip(classes, quotas, strict=True)]
    )
