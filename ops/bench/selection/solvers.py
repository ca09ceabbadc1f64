"""Our solver of the relaxed selection beside cvxpy: the same problems, by CPU time and by exactness.

A problem is that of one device in a coordinated selection: ``minimise ||G x - h||^2 over 0 <= x <= 1, sum x = budget``
(Good et al., "Coordinated Replay Sample Selection for Continual Federated Learning", problem 8).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import numpy as np

from fedemu.algorithms.replay.selection.capped_simplex import solve_capped_simplex
from fedemu.algorithms.replay.selection.diversity import targets
from fedemu.ops.bench.measuring.measure import Effort, Tell
from fedemu.ops.bench.selection.data import Floats, Size, fleet
from fedemu.protocol import seeds

OTHERS: Final = ("CLARABEL", "OSQP")
"""The solvers of cvxpy that ours is compared with."""
MANY_SAMPLES: Final = (Size(1000, 100, 300), Size(1000, 100, 3000))
"""Problems of devices with many samples: fewer dimensions than samples, and more."""
FEW_DEVICES: Final = 10
"""How many devices have so many samples."""
MOVED: Final = (0.3, 0.7)
"""How far the vectors are moved from a mean of zero, as in the shifted data of the coordination."""

EXPLANATION: Final = (
    "Milliseconds of CPU per problem, from the Gram matrix to x. cvxpy: with the time in which it makes its model of a "
    "problem; solver alone: without that. objective: ours minus that of cvxpy, as a share of it, the least and the "
    "largest of all problems; below 0 ours is better. broken: by how much ours and cvxpy break a bound or the sum at "
    "most. "
    "cvxpy gets no more problems than it solves in 25 seconds of CPU (8 with --quick)."
)


@dataclass(frozen=True)
class Problem:
    """The vectors ``[samples, dimensions]`` of a device, their Gram matrix, ``linear = G^T h`` and the budget."""

    rows: Floats
    gram: Floats
    linear: Floats
    budget: int

    def objective(self, x: Floats) -> float:
        """``||G x - h||^2`` without the constant ``||h||^2``."""
        return float(x @ (self.gram @ x - 2.0 * self.linear))

    def broken(self, x: Floats) -> float:
        """By how much ``x`` breaks the constraint that it breaks most. Zero or more."""
        return float(max(abs(x.sum() - self.budget), -x.min(), x.max() - 1.0, 0.0))


@dataclass(frozen=True)
class Solved:
    """A solution, the CPU seconds that it took (``seconds``), and the part that the solver itself used (``alone``)."""

    x: Floats
    seconds: float
    alone: float


@dataclass(frozen=True)
class SolverComparison:
    """Our solver and one of cvxpy on the ``problems`` that both solved. Seconds of CPU are means per problem.

    ``below`` and ``above`` are the least and the largest difference of the objectives, ours minus the other, as a share
    of the other. ``ours_broken`` and ``other_broken`` are the largest breach of a constraint.
    """

    other: str
    size: Size
    problems: int
    ours: float
    seconds: float
    alone: float
    below: float
    above: float
    ours_broken: float
    other_broken: float

    @property
    def ratio(self) -> float:
        """How many times as long the other takes."""
        return self.seconds / self.ours

    @property
    def ratio_alone(self) -> float:
        """How many times as long the other's solver takes without cvxpy's model."""
        return self.alone / self.ours


def compare_solvers(effort: Effort, devices: Sequence[int], small: Size, tell: Tell) -> Iterator[SolverComparison]:
    """Compare on fleets of each size in ``devices``, with problems of the size ``small``; then on ``MANY_SAMPLES``."""
    kinds = [(small, count) for count in devices]
    kinds += [(size, effort.count(FEW_DEVICES)) for size in MANY_SAMPLES]
    for size, count in kinds:
        about = f"{count} problems of {size.samples} samples and {size.dimensions} dimensions"
        tell(f"selection: {about}, our solver")
        problems = draw(size, count)
        ours = _solve_all(solve, problems, effort.seconds)
        for other in OTHERS:
            tell(f"selection: {about}, cvxpy with {other}")
            theirs = _solve_all(cvxpy_solve(other), problems, effort.seconds)
            yield _compared(other, size, problems, ours, theirs)


def draw(size: Size, devices: int) -> list[Problem]:
    """A problem for each device of a fleet: its target is that of the first iteration of the coordination."""
    rows = fleet(devices, size, *MOVED, seeds.generator(0, purpose=f"bench/solvers/{size.samples}/{size.dimensions}"))
    sums = rows.sum(axis=1) * (size.budget / size.samples)
    # The sum over a single device gives it no target, so such a device aims at half of its own sum.
    aims = targets(sums) if devices > 1 else 0.5 * sums
    return [Problem(own, own @ own.T, own @ aim, size.budget) for own, aim in zip(rows, aims, strict=True)]


def solve(problem: Problem) -> Solved:
    """Solve by our solver, which needs no model."""
    start = time.process_time()
    x = solve_capped_simplex(problem.gram, problem.budget, problem.linear)
    seconds = time.process_time() - start
    return Solved(x, seconds, seconds)


def cvxpy_solve(solver: str) -> Callable[[Problem], Solved]:
    """A function that solves a problem by cvxpy, with this solver at its default settings.

    The model holds the smaller matrix: the Gram matrix, or the vectors if they have fewer dimensions than there are
    samples.
    """
    # Importing cvxpy takes two seconds, for which no other benchmark waits. Its types leave out most of its functions.
    cvxpy: Any = import_module("cvxpy")

    def solve(problem: Problem) -> Solved:
        start = time.process_time()
        x = cvxpy.Variable(len(problem.gram))
        samples, dimensions = problem.rows.shape
        square = (
            cvxpy.quad_form(x, cvxpy.psd_wrap(problem.gram))
            if samples <= dimensions
            else cvxpy.sum_squares(problem.rows.T @ x)
        )
        limits = [x >= 0, x <= 1, cvxpy.sum(x) == problem.budget]
        model = cvxpy.Problem(cvxpy.Minimize(square - 2.0 * problem.linear @ x), limits)
        data, chain, inverse = model.get_problem_data(solver, solver_opts={})
        modelled = time.process_time()
        found = chain.solve_via_data(model, data, solver_opts={})
        alone = time.process_time() - modelled
        model.unpack_results(found, chain, inverse)
        return Solved(np.asarray(x.value, dtype=np.float64), time.process_time() - start, alone)

    return solve


def _solve_all(solve: Callable[[Problem], Solved], problems: Sequence[Problem], seconds: float) -> list[Solved]:
    """The solutions in the order of ``problems``, one at least, until ``seconds`` of CPU are used."""
    solve(draw(Size(10, 3, 12), 1)[0])  # what is done only once is not measured
    end = time.process_time() + seconds
    solved: list[Solved] = []
    for problem in problems:
        if solved and time.process_time() > end:
            break
        solved.append(solve(problem))
    return solved


def _compared(
    other: str, size: Size, problems: Sequence[Problem], ours: Sequence[Solved], theirs: Sequence[Solved]
) -> SolverComparison:
    both = list(zip(problems, ours, theirs, strict=False))
    reached = [(problem.objective(our.x), problem.objective(their.x)) for problem, our, their in both]
    differences = [(our - their) / max(abs(their), np.finfo(float).tiny) for our, their in reached]
    return SolverComparison(
        other=other,
        size=size,
        problems=len(both),
        ours=float(np.mean([our.seconds for _, our, _ in both])),
        seconds=float(np.mean([their.seconds for *_, their in both])),
        alone=float(np.mean([their.alone for *_, their in both])),
        below=min(differences),
        above=max(differences),
        ours_broken=max(problem.broken(our.x) for problem, our, _ in both),
        other_broken=max(problem.broken(their.x) for problem, _, their in both),
    )
