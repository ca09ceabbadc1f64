"""The two heuristics of gradient-based sample selection (GSS), as strategies over a period's candidates.

Aljundi et al., "Gradient based sample selection for online continual learning", NeurIPS 2019. Their heuristics work
while samples arrive, one batch at a time, with gradients that become outdated as the model changes. Here the model at
the end of the period gives all gradients at once, and samples pass in order of arrival, those of the buffer first.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from fedemu.algorithms.replay.selection.candidates import Candidates, Floats, Positions, known, within_budget

GROWTH: Final = 1.1
"""The factor by which the clusters' radius grows, as in the authors' code."""
LEAST_RADIUS: Final = 1e-6
"""The smallest radius of a cluster."""


def gss_greedy(gram: ArrayLike, budget: int, generator: np.random.Generator) -> Positions:
    """GSS-greedy (Aljundi et al., 2019, algorithm 2) over samples with the cosines ``gram [n, n]``.

    Samples come in the order of their positions, and the first ``budget`` fill the buffer. The score of a sample is 1
    plus its largest cosine with the samples in the buffer when it comes; an empty buffer gives the score 1. If the
    score c of a new sample is below 1, a buffered sample i is drawn in proportion to the scores C, and the new sample
    takes its place with probability ``C_i / (C_i + c)``. The authors compute scores over a random part of the buffer,
    here they are over the whole buffer. Returns ascending positions.
    """
    cosines = np.asarray(gram, dtype=np.float64)
    held: list[int] = []
    scores: list[float] = []
    for position in range(len(cosines)):
        score = max(0.0, float(cosines[position, held].max()) + 1.0) if held else 1.0
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

    This is done as in the authors' code, but once over all samples. The first centre is random. In order of position,
    each sample that is farther than a radius from all centres becomes a centre. The radius is first the least distance
    between two samples, and grows by a tenth until there are at most ``budget`` centres. If there are fewer, other
    samples are drawn at random. Returns ascending positions.
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
    """The centres of clusters of this radius. The search ends at ``most + 1`` centres."""
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
    """Keep what ``gss_greedy`` selects from the buffer's samples, followed by the new ones."""
    order = candidates.arrivals()
    gram = known(candidates.gram, "GSS-greedy", "gradients")()
    return order[gss_greedy(gram[np.ix_(order, order)], budget, generator)]


@within_budget
def by_gss_cluster(candidates: Candidates, budget: int, generator: np.random.Generator) -> Positions:
    """Keep what ``gss_cluster`` selects from the buffer's samples, followed by the new ones."""
    order = candidates.arrivals()
    gram = known(candidates.gram, "GSS by clusters", "gradients")()
    return order[gss_cluster(gram[np.ix_(order, order)], budget, generator)]
