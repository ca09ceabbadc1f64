"""Our solver beside cvxpy, on problems that are small enough to be checked."""

from __future__ import annotations

import numpy as np
import pytest

from fedemu.ops.bench.measuring.measure import Effort
from fedemu.ops.bench.selection import solvers
from fedemu.ops.bench.selection.data import Size
from fedemu.ops.bench.selection.solvers import OTHERS, Problem, Solved, compare_solvers, cvxpy_solve, draw, solve

FEW_DIMENSIONS = Size(samples=12, budget=3, dimensions=4)
MANY_DIMENSIONS = Size(samples=8, budget=2, dimensions=20)


@pytest.mark.parametrize("size", [FEW_DIMENSIONS, MANY_DIMENSIONS])
@pytest.mark.parametrize("other", OTHERS)
def test_both_solvers_find_the_minimum_of_the_same_problem(size: Size, other: str) -> None:
    (problem, *_) = draw(size, 3)
    ours, theirs = solve(problem), cvxpy_solve(other)(problem)
    assert problem.objective(ours.x) == pytest.approx(problem.objective(theirs.x), abs=1e-4)
    assert problem.broken(ours.x) < 1e-12
    assert problem.broken(theirs.x) < 1e-4
    assert 0.0 <= theirs.alone <= theirs.seconds


def test_a_device_without_others_has_a_target_too() -> None:
    (problem,) = draw(MANY_DIMENSIONS, 1)
    assert np.abs(problem.linear).max() > 0.0
    assert problem.objective(solve(problem).x) < problem.objective(np.full(8, 2 / 8)) - 1e-6


def test_the_objective_is_the_squared_distance_to_the_target() -> None:
    problem, _ = draw(MANY_DIMENSIONS, 2)
    aim = np.linalg.lstsq(problem.rows, problem.linear, rcond=None)[0]
    x = np.linspace(0.0, 1.0, 8)
    distance = float(np.square(x @ problem.rows - aim).sum())
    assert problem.objective(x) + float(aim @ aim) == pytest.approx(distance)


@pytest.mark.parametrize(
    ("x", "broken"),
    [([1.0, 1.0, 0.0], 0.0), ([1.0, 0.5, 0.0], 0.5), ([1.25, 0.75, 0.0], 0.25), ([1.0, 1.5, -0.5], 0.5)],
)
def test_a_breach_is_that_of_the_sum_or_of_a_bound(x: list[float], broken: float) -> None:
    assert Problem(np.eye(3), np.eye(3), np.zeros(3), 2).broken(np.array(x)) == broken


def test_the_comparison_is_of_the_problems_that_both_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[int] = []

    def slow(solver: str) -> object:
        def answer(problem: Problem) -> Solved:
            solved.append(len(problem.gram))
            x = solve(problem).x.copy()
            x[0] += 0.25
            return Solved(x, 3.0, 2.0)

        return answer

    monkeypatch.setattr(solvers, "MANY_SAMPLES", ())
    monkeypatch.setattr(solvers, "OTHERS", ("SLOW",))
    monkeypatch.setattr(solvers, "cvxpy_solve", slow)
    monkeypatch.setattr(solvers, "solve", lambda problem: Solved(np.full(8, 0.25), 0.5, 0.5))
    (found,) = compare_solvers(Effort(seconds=0.0), [5], MANY_DIMENSIONS, lambda line: None)
    assert solved == [10, 8]  # one that is not measured, and one, as there is no time for a second
    assert (found.other, found.problems) == ("SLOW", 1)
    assert (found.ours, found.seconds, found.alone) == (0.5, 3.0, 2.0)
    assert (found.ratio, found.ratio_alone) == (6.0, 4.0)
    assert found.below == found.above
    assert found.ours_broken == 0.0
    assert found.other_broken == pytest.approx(0.25)
