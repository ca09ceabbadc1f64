"""Class-balanced choice by leverage scores, as functions of arrays: the scores, the keys of a draw, and the numbers.

Qi et al., "Class-wise Balancing Data Replay for Federated Class-Incremental Learning" (FedCBDR), 2025, section 4.1.
The leverage score of a sample is the squared norm of its row of ``U``, where ``X = U Σ Vᵀ`` are the features of the
samples of all devices (equations 3 to 5). Samples are drawn in proportion to it (equation 6).
"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from fedemu.algorithms.replay.selection.candidates import Floats, Positions

RANK: Final = 1e-10
"""Directions whose second moment is at most this share of the largest one do not count to the rank."""
ABSENT: Final = -1.0
"""Stands for a sample that is not there, where keys are filled up."""


def leverage_scores(features: ArrayLike, moments: ArrayLike) -> Floats:
    """The scores ``x_j M⁺ x_jᵀ``, ``[n]`` in 0 to 1, for ``features [n, d]`` and the fleet's ``moments [d, d]``.

    ``M`` is the sum of ``XᵀX`` over all devices. With ``X = U Σ Vᵀ`` over all samples, ``x_j M⁺ x_jᵀ`` is the squared
    norm of row j of U, as far as its columns belong to the rank of X. All scores of the fleet add up to this rank.
    """
    rows = np.asarray(features, dtype=np.float64)
    if not len(rows):
        return np.zeros(0)
    inverse = np.linalg.pinv(np.asarray(moments, dtype=np.float64), rcond=RANK, hermitian=True)
    scores: Floats = np.clip(np.einsum("nd,de,ne->n", rows, inverse, rows), 0.0, 1.0)
    return scores


def keys_of_a_draw(scores: ArrayLike, generator: np.random.Generator) -> Floats:
    """Random keys ``[n]`` in 0 to 1. The k largest keys of any set are a draw of k of it, in proportion to the scores.

    The draw is one after the other without replacement (Efraimidis and Spirakis, 2006): a key is ``s / (s + e)`` for a
    score s and an exponential draw e, which has the order of ``-e / s``. A score of 0 has the key 0.
    """
    weights = np.asarray(scores, dtype=np.float64)
    waiting = generator.exponential(size=len(weights))
    total = weights + waiting
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0.0)


def largest_by_class(keys: ArrayLike, labels: ArrayLike, classes: int, depth: int) -> Floats:
    """The ``depth`` largest keys of each class, descending: ``[classes, depth]``, filled up with ABSENT."""
    values, of = np.asarray(keys, dtype=np.float64), np.asarray(labels)
    table = np.full((classes, depth), ABSENT)
    for label in np.unique(of):
        own = -np.sort(-values[of == label])[:depth]
        table[label, : len(own)] = own
    return table


def balanced_counts(keys: ArrayLike, rooms: ArrayLike, budget: int, generator: np.random.Generator) -> Positions:
    """How many samples of each class each device keeps, ``[devices, classes]``: at most ``budget`` in all.

    ``keys [devices, classes, depth]`` are as ``largest_by_class`` makes them, and ``rooms [devices]`` are the largest
    numbers that devices may keep. One sample after the other goes to the class with the fewest so far, if a device with
    room has one more of it, and there to the largest key. ``generator`` draws which of equal classes comes first.
    """
    table, room = np.asarray(keys, dtype=np.float64), np.array(rooms, dtype=np.int64)
    devices, classes, depth = table.shape
    counts = np.zeros((devices, classes), dtype=np.int64)
    waiting = [(0, int(rank), label) for label, rank in enumerate(generator.permutation(classes))]
    heapq.heapify(waiting)
    # The next sample of each device, by class: the largest key comes first, and among equals the first device.
    offers = [
        [(-key, device) for device, keys in enumerate(column) for key in keys if key != ABSENT]
        for column in table[:, :, :1].swapaxes(0, 1).tolist()
    ]
    for of_class in offers:
        heapq.heapify(of_class)
    left = budget
    while left > 0 and waiting:
        taken, rank, label = heapq.heappop(waiting)
        of_class = offers[label]
        while of_class and room[of_class[0][1]] <= 0:
            heapq.heappop(of_class)
        if not of_class:
            continue
        _, device = of_class[0]
        counts[device, label] += 1
        room[device] -= 1
        left -= 1
        follows = counts[device, label]
        if follows < depth and (key := float(table[device, label, follows])) != ABSENT:
            heapq.heapreplace(of_class, (-key, device))
        else:
            heapq.heappop(of_class)
        heapq.heappush(waiting, (taken + 1, rank, label))
    return counts
