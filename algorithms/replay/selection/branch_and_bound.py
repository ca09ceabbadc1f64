"""The integer quadratic problem of gradient-based sample selection (GSS-IQP), by branch and bound.

Aljundi et al., "Gradient based sample selection for online continual learning", NeurIPS 2019: among all choices of N
samples, find the one with the least sum of cosines between gradients. Their code uses MIOSQP, a branch and bound over
the solver OSQP, while samples arrive. Here the bounds come from ``solve_capped_simplex``, and the problem is solved
once, over all samples of a period.

A node of the search has some samples in, some out, and the others free. Its bound is that of the convex relaxation.
For x in {0, 1} with the sum N, ``xᵀ K x = xᵀ (K - λ I) x + λ N``. With the smallest eigenvalue λ the matrix is still
positive semidefinite, and the bound is tighter.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from fedemu.algorithms.replay.selection.candidates import Candidates, Floats, Positions, known, within_budget
from fedemu.algorithms.replay.selection.capped_simplex import solve_capped_simplex
from fedemu.algorithms.replay.selection.diversity import RESTARTS, objective, select_top

NODES: Final = 200
"""The default number of relaxations that a search solves at most."""
_TOLERANCE: Final = 1e-4
"""The tolerance of a node's relaxation. A bound holds for any x, so it need not be small."""
_EXACT: Final = 1e-9
"""A choice that is better by no more than this, for each kept sample, is not searched for."""


@dataclass(frozen=True)
class Choice:
    """The best choice that a search found: ascending ``positions``, and their ``objective``.

    ``nodes`` is the number of relaxations that were solved. ``proven`` says that no choice is better.
    """

    positions: Positions
    objective: float
    nodes: int
    proven: bool


def least_cosines(gram: ArrayLike, budget: int, generator: np.random.Generator, nodes: int = NODES) -> Choice:
    """The ``budget`` positions with the least sum of ``gram [n, n]`` over all their pairs, by at most ``nodes`` nodes.

    ``gram`` holds cosines: symmetric and positive semidefinite. Before the search, the solution without diagonal of
    ``diversity`` is found, with ``generator`` for its restarts, so that the choice is never worse than that. The cost
    is at most ``nodes`` + 4 solutions of a relaxation with n variables, and one decomposition of the matrix. 0 <
    ``budget`` < n is required.
    """
    matrix = np.asarray(gram, dtype=np.float64)
    relaxed = solve_capped_simplex(matrix, budget, zero_diagonal=True, restarts=RESTARTS, generator=generator)
    search = _Search(matrix, budget, select_top(relaxed, budget))
    used = search.run(nodes)
    return Choice(np.sort(search.best), search.least, used, used > 0 and not search.open)


class _Search:
    """Best-first search. ``best`` are the positions of the best choice so far, and ``least`` is its objective.

    ``open`` is a heap of nodes: (bound, ordinal, samples that are in, free samples, relaxed x of the free samples).
    """

    def __init__(self, matrix: Floats, budget: int, first: Positions) -> None:
        self.matrix, self.budget = matrix, budget
        self.best, self.least = first, objective(matrix, first)
        self.open: list[tuple[float, int, Positions, Positions, Floats]] = []
        self._shift = max(0.0, float(np.linalg.eigvalsh(matrix)[0]))
        self._ordinal = 0

    def run(self, nodes: int) -> int:
        """Search until nothing is open, or until about ``nodes`` relaxations were solved. Returns their number."""
        size, nothing = len(self.matrix), np.empty(0, dtype=np.int64)
        if nodes:
            self._visit(nothing, np.arange(size))
        while self.open and self._ordinal + 2 <= nodes:
            bound, _, chosen, free, x = heapq.heappop(self.open)
            if bound >= self._enough:
                self.open.clear()
                break
            place = int(np.abs(x - 0.5).argmin())
            rest = np.delete(free, place)
            self._visit(np.append(chosen, free[place]), rest)
            self._visit(chosen, rest)
        self.open = [node for node in self.open if node[0] < self._enough]
        return self._ordinal

    @property
    def _enough(self) -> float:
        return self.least - _EXACT * self.budget

    def _visit(self, chosen: Positions, free: Positions) -> None:
        """Solve the relaxation of a node, take its rounded choice if that is the best, and keep the node if open."""
        left = self.budget - len(chosen)
        if not 0 < left < len(free):
            if left in (0, len(free)):
                self._offer(np.concatenate([chosen, free[:left]]))
            return
        self._ordinal += 1
        among = self.matrix[np.ix_(free, free)] - self._shift * np.eye(len(free))
        fixed = self.matrix[np.ix_(free, chosen)].sum(axis=1)
        x = solve_capped_simplex(among, left, -fixed, tolerance=_TOLERANCE)
        self._offer(np.concatenate([chosen, free[select_top(x, left)]]))
        # A convex function lies above its tangent at x, and the tangent's least value is at the smallest slopes.
        slope = 2.0 * (among @ x + fixed)
        value = float(x @ among @ x + 2.0 * fixed @ x)
        least = value - float(slope @ x) + float(np.sort(slope)[:left].sum())
        bound = least + objective(self.matrix, chosen) + self._shift * left
        if bound < self._enough:
            heapq.heappush(self.open, (bound, self._ordinal, chosen, free, x))

    def _offer(self, positions: Positions) -> None:
        value = objective(self.matrix, positions)
        if value < self._enough:
            self.best, self.least = positions, value


@within_budget
def by_gss_iqp(candidates: Candidates, budget: int, generator: np.random.Generator) -> Positions:
    """Keep the samples whose gradients have the least sum of cosines, as far as NODES nodes find them (GSS-IQP)."""
    return least_cosines(known(candidates.gram, "GSS-IQP", "gradients")(), budget, generator).positions
