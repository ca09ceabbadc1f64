"""Strategies that draw at random what a device keeps.

They are the baselines of Good et al., "Coordinated Replay Sample Selection for Continual Federated Learning", 2023,
appendix A (after Dupuy et al., 2023), and reservoir sampling (Vitter, 1985, algorithm R). X_t are the period's samples
and R_t those of the replay buffer; N is the budget.
"""

from __future__ import annotations

import math

import numpy as np

from fedemu.algorithms.replay.selection.candidates import Candidates, Positions, Strategy, within_budget
from fedemu.protocol.errors import ConfigurationError


def none(candidates: Candidates, budget: int, generator: np.random.Generator) -> Positions:
    """Keep nothing: this is training without replay."""
    return np.empty(0, dtype=np.int64)


@within_budget
def naive_uniform(candidates: Candidates, budget: int, generator: np.random.Generator) -> Positions:
    """Keep a uniform sample of X_t and R_t together, in which old periods fade."""
    return generator.permutation(len(candidates))[:budget]


@within_budget
def approximation_of_uniform(candidates: Candidates, budget: int, generator: np.random.Generator) -> Positions:
    """Keep ``N n_t / n_{<=t}`` samples of X_t and the rest of R_t: nearly a uniform sample of all samples seen.

    ``n_t`` is the number of samples of the period, and ``n_{<=t}`` that of all samples seen. Numbers are rounded, and
    missing samples replaced, as in ``fixed_proportion``.
    """
    return _from_both(candidates, budget, candidates.fresh.sum() / candidates.seen, generator)


def fixed_proportion(proportion: float) -> Strategy:
    """The strategy that keeps ``p N`` samples of X_t and ``(1 - p) N`` of R_t, each drawn uniformly.

    A number that is not whole is rounded up with the probability of its fraction, so that the expected share is exact
    even if ``p N`` is below 1. If one part has fewer samples than its share, the other part gives more. Raises
    ConfigurationError unless ``0 < proportion < 1``.
    """
    if not 0.0 < proportion < 1.0:
        raise ConfigurationError(f"the proportion of new samples is {proportion}; it must lie between 0 and 1")

    @within_budget
    def strategy(candidates: Candidates, budget: int, generator: np.random.Generator) -> Positions:
        return _from_both(candidates, budget, proportion, generator)

    return strategy


@within_budget
def reservoir(candidates: Candidates, budget: int, generator: np.random.Generator) -> Positions:
    """Keep what algorithm R keeps (Vitter, 1985), if the samples of X_t arrive one by one after the earlier ones.

    The k-th sample ever seen takes the place of a random one with probability ``N / k``. So the buffer is a uniform
    sample of all samples seen, if R_t was selected in the same way with the same budget. From a buffer that is too
    large, random samples are dropped first. A buffer that is not full takes every sample until it is full.
    """
    held = np.flatnonzero(~candidates.fresh)
    if len(held) > budget:
        held = generator.permutation(held)[:budget]
    slots = held.tolist()
    arrivals = np.flatnonzero(candidates.fresh)
    for ordinal, arrival in enumerate(arrivals.tolist(), candidates.seen - len(arrivals) + 1):
        if len(slots) < budget:
            slots.append(arrival)
        elif (slot := int(generator.integers(ordinal))) < budget:
            slots[slot] = arrival
    return np.array(slots, dtype=np.int64)


def _from_both(candidates: Candidates, budget: int, proportion: float, generator: np.random.Generator) -> Positions:
    """``proportion * budget`` new samples and the rest old ones, as far as there are enough.

    The budget must be smaller than the number of candidates.
    """
    new, old = np.flatnonzero(candidates.fresh), np.flatnonzero(~candidates.fresh)
    share = proportion * budget
    wanted = math.floor(share) + int(generator.random() < share - math.floor(share))
    count = min(max(wanted, budget - len(old)), len(new), budget)
    return np.concatenate([generator.permutation(new)[:count], generator.permutation(old)[: budget - count]])
