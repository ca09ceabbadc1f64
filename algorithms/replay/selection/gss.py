"""The heuristics of gradient-based sample selection, as strategies over a period's candidates.

Aljundi et al., "Gradient based sample selection for online continual learning", 2019. Theirs work on-line, a batch at a
time, with gradients that age as the model changes; here the model of the period's end gives all gradients at once, and
samples pass in the order of their arrival, the buffer's first.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from fedemu.algorithms.replay.selection.candidates import Candidates, Floats, Positions, known, within_budget

GROWTH: Final = 1.1
"""Of the clusters' radius, as in the authors' code."""
LEAST_RADIUS: Final = 1e-6


def gss_greedy(gram: ArrayLike, budget: int, generator: np.random.Generator) -> Positions:
    """GSS-greedy (their algorithm 2) over samples with the cosines ``gram [n, n]``, in the order of their positions.

    The first ``budget`` fill the buffer. A sample's score is its largest cosine with the buffer when it comes, plus 1;
    one whose score c is below 1 challenges a buffered sample drawn in proportion to the scores C, and takes its place
    with probability ``C_i / (C_i + c)``. The score is taken over the whole buffer (theirs: over a random part of it);
    an empty buffer gives the score 1. Returns ascending positions.
    """
    cosines = np.asarray(gram, dtype=np.float64)
    held: list[int] = []
    scores: list[float] = []
    for position in range(len(cosines) if budget else 0):
        score = max(0.0, float(cosines[position, held].max(initial=-1.0)) + 1.0) if held else 1.0
        if len(held) < budget:
            held.append(position)
            scores.append(score)
        elif score < 1.0 and (total := sum(scores)) > 0.0:
            drawn = int(generator.choice(budget, p=np.array(scores) / total))
            if generator.random() < scores[drawn] / (scores[drawn] + score):
                held[drawn], scores[drawn] = position, score
    return np.sort(np.array(held, dtype=np.int64))


def gss_cluster(gram: ArrayLike, budget: int, generator: np.random.Generator) -> Positions:
    """GSS by clusters: the centres of at most ``budget`` clusters of gradients by cosine distance ``1 - gram [n, n]``.

    As in the authors' code: from a random first centre on, in order, each sample farther than a radius from all centres
    becomes one; the radius starts at the least distance there is and grows by a tenth until there are few enough. Done
    once over all samples. Where fewer centres remain than the budget allows, random other samples fill up. Returns
    ascending positions.
    """
    distance = 1.0 - np.asarray(gram, dtype=np.float64)
    size = len(distance)
    if not 0 < budget < size:
        return np.arange(min(budget, size))
    radius = max(LEAST_RADIUS, float(distance[~np.eye(size, dtype=bool)].min()))
    np.fill_diagonal(distance, 0.0)
    while len(centres := _centres(distance, radius, int(generator.integers(size)), budget)) > budget:
        radius *= GROWTH
    others = np.setdiff1d(np.arange(size), centres)
    return np.sort(np.concatenate([centres, generator.permutation(others)[: budget - len(centres)]]))


def _centres(distance: Floats, radius: float, first: int, most: int) -> Positions:
    """The centres of clusters of this radius; only ``most + 1`` of them where there are more than ``most``."""
    centres = [first]
    nearest = distance[first].copy()
    position = 0
    while len(centres) <= most and (far := nearest[position:] > radius).any():
        position += int(far.argmax())
        centres.append(position)
        np.minimum(nearest, distance[position], out=nearest)
    return np.array(centres, dtype=np.int64)


@within_budget
def by_gss_greedy(candidates: Candidates, budget: int, generator: np.random.Generator) -> Positions:
    """``gss_greedy`` over the buffer's samples, then the new ones."""
    order = candidates.arrivals()
    gram = known(candidates.gram, "GSS-greedy", "gradients")()
    return order[gss_greedy(gram[np.ix_(order, order)], budget, generator)]


@within_budget
def by_gss_cluster(candidates: Candidates, budget: int, generator: np.random.Generator) -> Positions:
    """``gss_cluster`` over the buffer's samples, then the new ones."""
    order = candidates.arrivals()
    gram = known(candidates.gram, "GSS by clusters", "gradients")()
    return order[gss_cluster(gram[np.ix_(order, order)], budget, generator)]
