"""Quadratic minimisation over the capped simplex, by which a device selects what it keeps.

``minimise x^T Q x - 2 c^T x over 0 <= x <= 1, sum x = budget``: the relaxation of Good et al., "Coordinated Replay
Sample Selection for Continual Federated Learning", problems 4, 5 and 8 (with ``c = G^T h``). The solver is pairwise
coordinate descent, as in sequential minimal optimisation (Platt 1998; the second coordinate by its gain, after Fan,
Chen and Lin 2005): two coordinates move against each other, so that every iterate is feasible. Where that takes long,
as it can where the matrix is nearly singular, it leaps to the minimum over all coordinates that are at no bound.

Measured once, one thread, by CPU time, on 2,000 vectors of 300 dimensions around 5 centres with a budget of 100:
0.14 s, against 4.7 s of cvxpy with Clarabel and 10.5 s with OSQP, and the same 100 largest. Isotropic vectors of about
as many dimensions as there are samples are harder: 1 s for 2,000 of 3,000 dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedemu.protocol.errors import ConfigurationError

Floats = NDArray[np.float64]

TOLERANCE: Final = 1e-6
AT_BOUND: Final = 1e-12
"""A coordinate that is this close to 0 or 1 is brought there."""
FLAT: Final = 1e-12
STEPS_PER_COORDINATE: Final = 200
STEPS_TO_LEAP: Final = 20
"""Per coordinate, beside 1,000: far more than most problems need."""


def solve_capped_simplex(
    gram: ArrayLike,
    budget: float,
    linear: ArrayLike | None = None,
    zero_diagonal: bool = False,
    *,
    start: ArrayLike | None = None,
    restarts: int = 0,
    generator: np.random.Generator | None = None,
    tolerance: float = TOLERANCE,
) -> Floats:
    """Minimise ``x^T gram x - 2 linear^T x`` over ``0 <= x <= 1, sum x = budget``: returns ``x [n]``, always feasible.

    ``gram [n, n]`` is symmetric; with ``zero_diagonal`` its diagonal counts as zero. Where the matrix is positive
    semidefinite, the optimality conditions hold up to a gap of ``tolerance * scale``: by so much at most does half the
    derivative by an x above 0 exceed that by an x below 1. ``scale`` is the largest absolute value on the diagonal of
    ``gram`` and in ``linear``. The objective is then within ``2 * budget * tolerance * scale`` of the minimum. With
    ``zero_diagonal`` the matrix is indefinite and x a local optimum: moreover no transfer between two coordinates,
    however large, lowers the objective by more than ``tolerance * scale``. After 200 n + 10,000 steps the solver
    returns what it has.

    ``start [n]`` is where to begin (default: ``budget / n`` everywhere; the solution of a similar problem saves most
    steps). Each of ``restarts`` (default 0) begins anew at random 0s and 1s of ``generator`` and the best end counts,
    the first among equals. A budget of n or more gives ones, whatever the objective. Deterministic; float64.
    """
    matrix = _square(gram)
    size = len(matrix)
    slope = np.zeros(size) if linear is None else np.asarray(linear, dtype=np.float64)
    _check(matrix, slope, budget)
    if budget >= size or budget == 0:
        return np.full(size, 1.0 if budget else 0.0)
    scale = max(float(np.abs(matrix.diagonal()).max()), float(np.abs(slope).max())) or 1.0
    if zero_diagonal:
        matrix = matrix.copy()
        np.fill_diagonal(matrix, 0.0)
    problem = _Problem(matrix, matrix.diagonal().copy(), slope, tolerance * scale, FLAT * scale, zero_diagonal)
    best = problem.descend(np.full(size, budget / size) if start is None else _feasible(start, size, budget))
    for _ in range(restarts):
        if generator is None:
            raise ConfigurationError(f"{restarts} restarts of the solver need a generator to begin from")
        other = problem.descend(generator.permutation(_corner(size, budget)))
        if problem.value(other) < problem.value(best):
            best = other
    return best


@dataclass(frozen=True)
class _Problem:
    """The objective; ``gap`` is what descent may leave, and ``flat`` a curvature that counts as none, in its unit."""

    matrix: Floats
    diagonal: Floats
    slope: Floats
    gap: float
    flat: float
    indefinite: bool

    def value(self, x: Floats) -> float:
        return float(x @ (self.matrix @ x - 2.0 * self.slope))

    def gradient(self, x: Floats) -> Floats:
        """Half of it."""
        gradient: Floats = self.matrix @ x - self.slope
        return gradient

    def descend(self, start: Floats) -> Floats:
        """Move what rises best against what then gains most, until nothing does."""
        x = start.copy()
        gradient, fresh = self.gradient(x), True
        full, empty = _bounds(x), -_bounds(1.0 - x)
        leap = STEPS_TO_LEAP * len(x) + 1_000
        for step in range(1, STEPS_PER_COORDINATE * len(x) + 10_000):
            if step % leap == 0 and not self.indefinite:
                gradient = self._leap(x, gradient)
                full, empty, fresh = _bounds(x), -_bounds(1.0 - x), False
            rising = gradient + full
            up = int(rising.argmin())
            moves, gains = self._transfers(x, gradient, up, slice(None))
            down = int(gains.argmax())
            if (gradient + empty).max() - rising[up] > self.gap or (self.indefinite and gains[down] > self.gap):
                moved = moves[down]
            elif not fresh:
                # Updated step by step, the gradient drifts by rounding: only a fresh one may end the descent.
                gradient, fresh = self.gradient(x), True
                continue
            else:
                pair = self._best_pair(x, gradient) if self.indefinite else None
                if pair is None:
                    break
                up, down, moved = pair
            x[up] += moved
            x[down] -= moved
            gradient += moved * (self.matrix[up] - self.matrix[down])
            fresh = False
            for each in (up, down):
                full[each] = np.inf if x[each] >= 1.0 - AT_BOUND else 0.0
                empty[each] = -np.inf if x[each] <= AT_BOUND else 0.0
        return np.where(full > 0.0, 1.0, np.where(empty < 0.0, 0.0, x))

    def _leap(self, x: Floats, gradient: Floats) -> Floats:
        """Go to the minimum over the x that are at no bound, stopping at bounds on the way; returns the new gradient.

        Where the matrix is nearly singular, transfers between pairs alone take very many steps to get there. Changes
        ``x``.
        """
        while True:
            free = np.flatnonzero((x > AT_BOUND) & (x < 1.0 - AT_BOUND))
            if len(free) < 2:
                return gradient
            values, vectors = np.linalg.eigh(_centred(_centred(self.matrix[np.ix_(free, free)]).T))
            curved = values > self.flat
            steepest = vectors.T @ _centred(gradient[free])
            way = -vectors[:, curved] @ (steepest[curved] / values[curved])
            room = np.where(way > 0.0, 1.0 - x[free], x[free])
            shares = np.divide(room, np.abs(way), out=np.full_like(way, np.inf), where=way != 0.0)
            nearest = int(shares.argmin())
            x[free] = np.clip(x[free] + min(1.0, shares[nearest]) * way, 0.0, 1.0)
            if shares[nearest] < 1.0:
                x[free[nearest]] = float(way[nearest] > 0.0)
            gradient = self.gradient(x)
            if shares[nearest] >= 1.0:
                return gradient

    def _best_pair(self, x: Floats, gradient: Floats) -> tuple[int, int, float] | None:
        """The transfer between any two coordinates that lowers the objective most, if by more than the gap."""
        rising, falling = np.flatnonzero(x < 1.0 - AT_BOUND), np.flatnonzero(x > AT_BOUND)
        if not (len(rising) and len(falling)):
            return None
        moves, gains = self._transfers(x, gradient, rising[:, None], falling[None, :])
        best = np.unravel_index(gains.argmax(), gains.shape)
        return (int(rising[best[0]]), int(falling[best[1]]), float(moves[best])) if gains[best] > self.gap else None

    def _transfers(self, x: Floats, gradient: Floats, up: Any, down: Any) -> tuple[Floats, Floats]:
        """The best transfers from coordinates ``down`` to ``up``, and by how much each lowers the objective."""
        curvature = self.diagonal[down] + self.diagonal[up] - 2.0 * self.matrix[up, down]
        fall = gradient[down] - gradient[up]
        room = np.minimum(x[down], 1.0 - x[up])
        curved = curvature > self.flat
        inner = np.clip(fall / np.where(curved, curvature, 1.0), 0.0, room)
        # Along a pair that isn't curved upwards the minimum lies at an end: all or nothing.
        moves = np.where(curved, inner, room)
        return moves, moves * (2.0 * fall - moves * curvature)


def _bounds(x: Floats) -> Floats:
    """Infinite where x is 1, else 0."""
    return np.where(x >= 1.0 - AT_BOUND, np.inf, 0.0)


def _centred(rows: Floats) -> Floats:
    """Without the mean over the first axis."""
    centred: Floats = rows - rows.mean(axis=0)
    return centred


def _square(gram: ArrayLike) -> Floats:
    matrix = np.asarray(gram, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ConfigurationError(f"the Gram matrix has the shape {list(matrix.shape)}; it must be square, [n, n]")
    return matrix


def _check(matrix: Floats, slope: Floats, budget: float) -> None:
    if slope.shape != (len(matrix),):
        raise ConfigurationError(
            f"the linear term has the shape {list(slope.shape)}; for {len(matrix)} samples it must be [{len(matrix)}]"
        )
    if not budget >= 0:
        raise ConfigurationError(f"the budget is {budget}; it must be 0 or more")
    if not (np.isfinite(matrix).all() and np.isfinite(slope).all()):
        raise ConfigurationError("the Gram matrix or the linear term is not finite; drop the samples that make it so")


def _feasible(start: ArrayLike, size: int, budget: float) -> Floats:
    x = np.array(start, dtype=np.float64)
    if x.shape != (size,) or not (np.all((x >= 0.0) & (x <= 1.0)) and math.isclose(x.sum(), budget, abs_tol=1e-9)):
        raise ConfigurationError(f"the start must be {size} numbers between 0 and 1 whose sum is the budget, {budget}")
    return x


def _corner(size: int, budget: float) -> Floats:
    """Ones as far as the budget goes, and its fraction."""
    return np.clip(budget - np.arange(size), 0.0, 1.0)
