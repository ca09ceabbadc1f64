"""Gradient diversity by relaxation: a device keeps the samples whose loss gradients, scaled to norm 1, have the
shortest sum.

Good et al., "Coordinated Replay Sample Selection for Continual Federated Learning", 2023, section 4. Problem 3 is the
objective and problem 4 its relaxation; problem 8 and algorithm 1 are the coordination over devices. The listing of
algorithm 1 sends ``G_m^T x_m``, but by the equations it is the sum ``G_m x_m``. Devices send sums that are weighted by
the *relaxed* x. Sums over the N best samples alone would hardly change from one iteration to the next, and neither
would the targets.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from fedemu.algorithms.replay.selection.candidates import Candidates, Floats, Positions, Strategy, known, within_budget
from fedemu.algorithms.replay.selection.capped_simplex import solve_capped_simplex
from fedemu.protocol.errors import ConfigurationError

RESTARTS: Final = 3
"""The default number of restarts of the solver with a zero diagonal."""


def directions(gradients: ArrayLike) -> Floats:
    """The rows of ``gradients [n, d]`` divided by their norms, in float64.

    A row of zeros stays zero. So a zero gradient has the cosine 0 with every other one and with itself.
    """
    rows = np.asarray(gradients, dtype=np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: Floats = np.divide(rows, norms, out=np.zeros_like(rows), where=norms != 0.0)
    return scaled


def objective(gram: ArrayLike, chosen: ArrayLike) -> float:
    """The objective of problem 3: the sum of ``gram [n, n]`` over all pairs of ``chosen`` positions.

    The pairs of a position with itself are included.
    """
    positions = np.asarray(chosen, dtype=np.int64)
    return float(np.asarray(gram, dtype=np.float64)[np.ix_(positions, positions)].sum())


def select_top(x: ArrayLike, budget: int) -> Positions:
    """The ascending positions of the ``budget`` largest values of ``x [n]``; among equals the lowest positions.

    Raises ConfigurationError if the budget is below 0.
    """
    if budget < 0:
        raise ConfigurationError(f"the replay budget is {budget}; it must be 0 or more")
    return np.sort(np.argsort(-np.asarray(x, dtype=np.float64), kind="stable")[:budget])


def targets(sums: ArrayLike) -> Floats:
    """The targets of the devices, ``h_m = G_m x_m - mean over devices``: ``[M, d]`` from ``sums [M, d]``.

    They minimise ``sum_m ||G_m x_m - h_m||^2`` over all h whose rows add up to zero (problem 8, theorem 1).
    """
    rows = np.asarray(sums, dtype=np.float64)
    return rows - rows.mean(axis=0) if len(rows) else rows


def gradient_diversity(zero_diagonal: bool = True, restarts: int | None = None) -> Strategy:
    """A strategy without coordination: keep the N largest values of the relaxed solution (problem 4).

    With ``zero_diagonal`` the relaxation is not convex, and nearly every value of x is 0 or 1; the paper prefers it.
    Without it the largest of many small values are kept. ``restarts`` are those of ``solve_capped_simplex``; by default
    RESTARTS with ``zero_diagonal``, and 0 without it. They pay off: for 5 of the paper's 50 synthetic vectors (appendix
    C.1), the median objective of 50 problems is 1.06 times the least one without restarts, 1.01 times with 3 and 1.00
    times with 10.
    """
    again = restarts if restarts is not None else RESTARTS if zero_diagonal else 0

    @within_budget
    def strategy(candidates: Candidates, budget: int, generator: np.random.Generator) -> Positions:
        gram = known(candidates.gram, "gradient diversity", "gradients")()
        x = solve_capped_simplex(gram, budget, zero_diagonal=zero_diagonal, restarts=again, generator=generator)
        return select_top(x, budget)

    return strategy
