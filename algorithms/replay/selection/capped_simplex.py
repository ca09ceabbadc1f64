"""The solver of selection: it minimises a quadratic function over the capped simplex.

The problem is ``minimise x^T Q x - 2 c^T x over 0 <= x <= 1, sum x = budget``: the relaxation of Good et al.,
"Coordinated Replay Sample Selection for Continual Federated Learning", 2023, problems 4, 5 and 8 (with ``c = G^T h``).

The solver is pairwise coordinate descent, as in sequential minimal optimisation (Platt, 1998; it chooses the second
coordinate by its gain, after Fan, Chen and Lin, 2005). Two coordinates move against each other, so every iterate is
feasible. That can take long if the matrix is nearly singular; then the solver leaps to the minimum over all coordinates
that are at no bound.

``fedemu bench selection`` measures it beside cvxpy; ``docs/benchmarks.md`` has the figures.
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
"""The gap of the optimality conditions that the solver may leave, relative to the problem's scale."""
AT_BOUND: Final = 1e-12
"""A coordinate that is this close to 0 or 1 is set to 0 or 1."""
FLAT: Final = 1e-12
"""A curvature up to this counts as none, relative to the problem's scale."""
STEPS_PER_COORDINATE: Final = 200
"""The solver gives up after this number of steps per coordinate, and 10,000 more."""
STEPS_TO_LEAP: Final = 20
"""The solver leaps after this number of steps per coordinate, and 1,000 more: far more than most problems need."""


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
    """Minimise ``x^T gram x - 2 linear^T x`` over ``0 <= x <= 1, sum x = budget``. Returns ``x [n]``, always feasible.

    ``gram [n, n]`` is symmetric; with ``zero_diagonal`` its diagonal is taken as zero. ``scale`` is the largest
    absolute value on the diagonal of ``gram`` and in ``linear``.

    If the matrix is positive semidefinite, the optimality conditions hold up to a gap of ``tolerance * scale``: half
    the derivative by any x above 0 exceeds half the derivative by any x below 1 by at most that gap. Then the objective
    is within ``2 * budget * tolerance * scale`` of the minimum. With ``zero_diagonal`` the matrix is indefinite, and x
    is a local optimum. In addition no transfer between two coordinates, of any size, lowers the objective by more than
    ``tolerance * scale``. After 200 n + 10,000 steps the solver returns the x that it has.

    The solver begins at ``start [n]``, by default ``budget / n`` everywhere; the solution of a similar problem saves
    most steps. Each of the ``restarts`` (default 0) begins at random 0s and 1s that ``generator`` draws. The best
    result counts, and among equals the first. A budget of n or more gives ones for any objective. The result is
    deterministic, and computed in float64. Raises ConfigurationError if shapes, budget or start do not fit, if a value
    is not finite, or if there are restarts without a generator.
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
            raise ConfigurationError(f"{restarts} restarts of the solver draw random numbers; give it a generator")
        other = problem.descend(generator.permutation(_corner(size, budget)))
        if problem.value(other) < problem.value(best):
            best = other
    return best


@dataclass(frozen=True)
class _Problem:
    """One problem. ``gap`` is the gap that the descent may leave; a curvature up to ``flat`` counts as none.

    Both are in the unit of ``matrix``.
    """

    matrix: Floats
    diagonal: Floats
    slope: Floats
    gap: float
    flat: float
    indefinite: bool

    def value(self, x: Floats) -> float:
        """The objective at x."""
        return float(x @ (self.matrix @ x - 2.0 * self.slope))

    def gradient(self, x: Floats) -> Floats:
        """Half of the objective's gradient at x."""
        gradient: Floats = self.matrix @ x - self.slope
        return gradient

    def descend(self, start: Floats) -> Floats:
        """The end of the descent from ``start``.

        Each step increases the coordinate with the smallest derivative, and decreases the one that then lowers the
        objective most. The descent ends when no step lowers it by more than the gap.
        """
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
                # A gradient that is updated step by step drifts by rounding. Only a fresh one may end the descent.
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
        """Move ``x`` in place to the minimum over the coordinates that are at no bound. Returns the new gradient.

        A coordinate that meets a bound on the way stays there, and the rest goes on. If the matrix is nearly singular,
        transfers between pairs alone would need very many steps for this.
        """
        while True:
            free = np.flatnonzero((x > AT_BOUND) & (x < 1.0 - AT_BOUND))
            if len(free) < 2:
                return gradient
            values, vectors = np.linalg.eigh(_centred(_centred(self.matrix[np.ix_(free, free)]).T))
            curved = values > self.flat
            steepest = vectors.T @ _centred(gradient[free])
            # A flat direction makes the way long, so that rounding alone would change the sum of x.
            way = _centred(-vectors[:, curved] @ (steepest[curved] / values[curved]))
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
        """The transfer between two coordinates that lowers the objective most: (up, down, size).

        None if it lowers the objective by no more than the gap.
        """
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
        # Along a pair that is not curved upwards the minimum lies at an end: the transfer is the largest possible.
        moves = np.where(curved, inner, room)
        return moves, moves * (2.0 * fall - moves * curvature)


def _bounds(x: Floats) -> Floats:
    """Infinity for each x that is 1, and 0 for the others."""
    return np.where(x >= 1.0 - AT_BOUND, np.inf, 0.0)


def _centred(rows: Floats) -> Floats:
    """The rows without their mean over the first axis."""
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
        raise ConfigurationError("the Gram matrix or the linear term is not finite; leave out the samples behind it")


def _feasible(start: ArrayLike, size: int, budget: float) -> Floats:
    x = np.asarray(start, dtype=np.float64)
    if x.shape != (size,) or not (np.all((x >= 0.0) & (x <= 1.0)) and math.isclose(x.sum(), budget, abs_tol=1e-9)):
        raise ConfigurationError(f"the start must be {size} numbers between 0 and 1 whose sum is the budget, {budget}")
    return x


def _corner(size: int, budget: float) -> Floats:
    """Ones as far as the budget goes, then its fraction, then zeros."""
    return np.clip(budget - np.arange(size), 0.0, 1.0)
