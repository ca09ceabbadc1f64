"""The candidates, which are the samples that a device may keep after a period, and the signature of every strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedemu.protocol.errors import ConfigurationError

Positions = NDArray[np.int64]
"""Positions of samples among the candidates."""
Floats = NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True)
class Candidates:
    """The samples that a device may keep, ``X_t`` and ``R_t`` together, and what strategies may know of them.

    ``fresh [n]`` is true for samples of the period's data X_t and false for those of the buffer R_t. Each part is in
    order of arrival. ``seen`` counts all samples that the device has ever had, X_t included. ``labels [n]`` is None if
    the data have no labels. ``gram()`` returns the cosines ``[n, n]`` between the samples' loss gradients, and
    ``features()`` the model's features of the samples, ``[n, features]``. Both are computed only for strategies that
    ask. Raises ConfigurationError if the numbers of samples contradict each other.
    """

    fresh: NDArray[np.bool_]
    seen: int
    labels: NDArray[np.integer[Any]] | None = None
    gram: Callable[[], Floats] | None = None
    features: Callable[[], Floats] | None = None

    def __post_init__(self) -> None:
        if self.seen < len(self.fresh):
            raise ConfigurationError(
                f"{self.seen} samples were seen so far, but there are {len(self.fresh)} candidates; "
                "count the candidates as seen too"
            )
        if self.labels is not None and self.labels.shape != self.fresh.shape:
            raise ConfigurationError(
                f"there are {len(self.labels)} labels for {len(self.fresh)} samples; give one label per sample"
            )

    def __len__(self) -> int:
        return len(self.fresh)

    def arrivals(self) -> Positions:
        """All positions in the order in which the samples came: those of the buffer, then the new ones."""
        return np.argsort(self.fresh, kind="stable")


Strategy = Callable[[Candidates, int, np.random.Generator], Positions]
"""(candidates, budget, generator) -> the ascending positions of the candidates to keep, at most ``budget``."""


def within_budget(choose: Strategy) -> Strategy:
    """A strategy that keeps all candidates if the budget allows it, and otherwise what ``choose`` returns, sorted.

    It raises ConfigurationError if the budget is below 0.
    """

    @functools.wraps(choose)
    def strategy(candidates: Candidates, budget: int, generator: np.random.Generator) -> Positions:
        if budget < 0:
            raise ConfigurationError(f"the replay budget is {budget}; it must be 0 or more")
        if budget >= len(candidates):
            return np.arange(len(candidates))
        if budget == 0:
            return np.empty(0, dtype=np.int64)
        return np.sort(choose(candidates, budget, generator))

    return strategy


def known(value: T | None, strategy: str, what: str) -> T:
    """The value. Raises ConfigurationError if it is None, because ``strategy`` needs it."""
    if value is None:
        raise ConfigurationError(
            f"{strategy} needs the samples' {what}, which are not known here; choose another strategy"
        )
    return value
