"""The solver of the relaxed selection: it is exact for convex problems, and finds a local optimum of others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedemu.algorithms.replay.selection.capped_simplex import solve_capped_simplex
from fedemu.algorithms.replay.selection.diversity import directions
from fedemu.protocol.errors import ConfigurationError


def gradients(samples: int, seed: int) -> Any:
    """Vectors around a few centres; some are repeated and some are zero."""
    draws = np.random.default_rng(seed)
    rows = draws.normal(size=(3, 6))[draws.integers(3, size=samples)] + draws.normal(size=(samples, 6))
    rows[draws.random(samples) < 0.15] = 0.0
    if samples > 1:
        rows[-1] = rows[0]
    return directions(rows)


def value(gram: Any, x: Any, linear: Any) -> float:
    return float(x @ gram @ x - 2.0 * linear @ x)


def assert_feasible(x: Any, budget: float) -> None:
    assert x.dtype == np.float64
    assert np.all((x >= 0.0) & (x <= 1.0))
    assert x.sum() == pytest.approx(min(budget, len(x)), abs=1e-9)


@pytest.mark.parametrize(
    ("gram", "budget", "linear", "expected"),
    [
        (np.eye(4), 2, None, [0.5, 0.5, 0.5, 0.5]),
        (np.diag([1.0, 3.0]), 1, None, [0.75, 0.25]),
        (np.diag([1.0, 9.0]), 1.5, None, [1.0, 0.5]),
        (np.eye(2), 1, [1.0, 0.0], [1.0, 0.0]),
        (np.eye(2), 1, [0.25, 0.0], [0.625, 0.375]),
        (np.zeros((3, 3)), 1, [0.0, 2.0, 1.0], [0.0, 1.0, 0.0]),
        (np.ones((3, 3)), 1.5, None, [0.5, 0.5, 0.5]),
        ([[1.0]], 0.3, None, [0.3]),
    ],
)
def test_convex_problems_worked_by_hand(gram: Any, budget: float, linear: Any, expected: list[float]) -> None:
    assert solve_capped_simplex(gram, budget, linear) == pytest.approx(np.array(expected), abs=1e-6)


def test_without_its_diagonal_the_solution_is_a_choice() -> None:
    gram = np.array([[1.0, 0.5, -0.5], [0.5, 1.0, 0.0], [-0.5, 0.0, 1.0]])
    before = gram.copy()
    assert solve_capped_simplex(gram, 2, zero_diagonal=True).tolist() == [1.0, 0.0, 1.0]
    assert np.array_equal(gram, before)


def test_equal_samples_are_chosen_whole() -> None:
    x = solve_capped_simplex(np.ones((6, 6)), 2.5, zero_diagonal=True)
    assert sorted(x.tolist()) == pytest.approx([0.0, 0.0, 0.0, 0.5, 1.0, 1.0])


@pytest.mark.parametrize("zero_diagonal", [False, True])
@pytest.mark.parametrize(("budget", "expected"), [(0, 0.0), (3, 1.0), (3.0, 1.0), (7.5, 1.0)])
def test_a_budget_of_0_takes_nothing_and_a_large_one_takes_everything(
    budget: float, expected: float, zero_diagonal: bool
) -> None:
    assert solve_capped_simplex(np.eye(3), budget, [0.0, 0.0, -9.0], zero_diagonal).tolist() == [expected] * 3


@pytest.mark.parametrize("zero_diagonal", [False, True])
@pytest.mark.parametrize("budget", [1e-14, 3 - 1e-14])
def test_a_budget_that_is_rounded_to_nothing_or_everything_is_met(budget: float, zero_diagonal: bool) -> None:
    assert_feasible(solve_capped_simplex(np.eye(3), budget, [0.0, 0.0, -9.0], zero_diagonal), budget)


def test_many_equal_samples_are_solved_exactly() -> None:
    x = solve_capped_simplex(np.ones((300, 300)), 40, zero_diagonal=True)
    assert sorted(x.tolist()) == [0.0] * 260 + [1.0] * 40


@pytest.mark.parametrize("budget", [0, 2])
def test_no_samples_have_an_empty_solution(budget: float) -> None:
    assert solve_capped_simplex(np.zeros((0, 0)), budget).shape == (0,)


@settings(max_examples=20)
@given(
    samples=st.integers(1, 20),
    seed=st.integers(0, 10_000),
    part=st.floats(0.02, 0.98),
    pull=st.sampled_from([0.0, 1.0]),
)
@example(samples=15, seed=1560, part=0.25, pull=0.0)  # nearly singular: transfers alone take 37,000 steps
@example(samples=15, seed=6861, part=0.25, pull=0.0)  # and more than 100,000
@example(samples=11, seed=396, part=0.5, pull=1.0)  # flat directions, along which rounding can change the sum
def test_a_convex_problem_is_solved_as_well_as_by_cvxpy(samples: int, seed: int, part: float, pull: float) -> None:
    import cvxpy  # no other process of the tests should have to wait for it

    rows = gradients(samples, seed)
    gram, budget = rows @ rows.T, part * samples
    linear = pull * rows @ np.random.default_rng(seed).normal(size=6)
    x = solve_capped_simplex(gram, budget, linear)
    assert_feasible(x, budget)
    variable = cvxpy.Variable(samples)
    # cvxpy's quadratic form is not used: it refuses a matrix with an eigenvalue that is negative by rounding.
    cost = cvxpy.sum_squares(rows.T @ variable) - 2.0 * linear @ variable
    least = cvxpy.Problem(cvxpy.Minimize(cost), [variable >= 0, variable <= 1, cvxpy.sum(variable) == budget]).solve(
        solver=cvxpy.CLARABEL
    )
    scale = max(1.0, float(np.abs(linear).max()))
    assert value(gram, x, linear) <= least + 2.0 * budget * 1e-6 * scale + 1e-6 * scale
    slope = gram @ x - linear
    rising, falling = slope[x < 1.0 - 1e-12], slope[x > 1e-12]
    assert falling.max() - rising.min() <= 1.001e-6 * scale


@pytest.mark.parametrize(("samples", "seed"), [(11, 396), (15, 202), (20, 224)])
def test_a_solution_along_flat_directions_keeps_the_budget_so_that_the_next_problem_begins_there(
    samples: int, seed: int
) -> None:
    rows = gradients(samples, seed)
    gram, budget = rows @ rows.T, samples // 3
    linear = rows @ np.random.default_rng(seed).normal(size=6)
    x = solve_capped_simplex(gram, budget, linear)
    assert_feasible(x, budget)
    assert_feasible(solve_capped_simplex(gram, budget, 0.5 * linear, start=x), budget)


@settings(max_examples=15)
@given(samples=st.integers(2, 12), seed=st.integers(0, 10_000), part=st.floats(0.05, 0.95))
@example(samples=6, seed=219, part=0.3)  # only the search among all pairs finds the last transfer
@example(samples=6, seed=56, part=0.3)
def test_without_the_diagonal_no_transfer_between_two_samples_is_better(samples: int, seed: int, part: float) -> None:
    rows = gradients(samples, seed)
    gram, budget = rows @ rows.T, part * samples
    np.fill_diagonal(gram, 0.0)
    x = solve_capped_simplex(rows @ rows.T, budget, zero_diagonal=True)
    assert_feasible(x, budget)
    here = value(gram, x, np.zeros(samples))
    for up in range(samples):
        for down in set(range(samples)) - {up}:
            for moved in np.linspace(0.0, min(x[down], 1.0 - x[up]), 5):
                other = x.copy()
                other[up] += moved
                other[down] -= moved
                assert value(gram, other, np.zeros(samples)) >= here - 2e-6


@pytest.mark.parametrize("pull", [0.0, 1.0])
def test_restarts_never_do_worse_and_repeat_with_the_generator(pull: float) -> None:
    better = 0
    for seed in range(12):
        rows = gradients(30, seed)
        gram, linear = rows @ rows.T, pull * rows @ np.random.default_rng(seed).normal(size=6)
        once = solve_capped_simplex(gram, 6, linear, zero_diagonal=True)
        again = {"zero_diagonal": True, "restarts": 4}
        first, second = (
            solve_capped_simplex(gram, 6, linear, generator=np.random.default_rng(seed), **again) for _ in range(2)
        )
        assert np.array_equal(first, second)
        np.fill_diagonal(gram, 0.0)
        assert value(gram, first, linear) <= value(gram, once, linear)
        better += bool(value(gram, first, linear) < value(gram, once, linear) - 1e-9)
    assert better > 0
    equal = solve_capped_simplex(np.zeros((4, 4)), 2, restarts=3, generator=np.random.default_rng(0))
    assert equal.tolist() == [0.5] * 4, "among equals the first counts"


def test_a_start_leads_to_the_same_optimum() -> None:
    rows = gradients(15, 3)
    gram = rows @ rows.T + 0.1 * np.eye(15)
    start = np.array([1.0] * 4 + [0.0] * 11)
    assert solve_capped_simplex(gram, 4, start=start) == pytest.approx(solve_capped_simplex(gram, 4), abs=1e-4)
    assert start.tolist() == [1.0] * 4 + [0.0] * 11
    almost = solve_capped_simplex(np.eye(2), 1, [0.0, 2.0], start=[1e-13, 1.0 - 1e-13])
    assert almost.tolist() == [0.0, 1.0], "what is close to a bound is at it"


def test_the_scale_of_a_problem_does_not_matter() -> None:
    rows = gradients(15, 5)
    gram = rows @ rows.T
    small = solve_capped_simplex(2.0**-40 * gram, 4)
    assert np.array_equal(small, solve_capped_simplex(gram, 4))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((np.zeros((2, 3)), 1), "the Gram matrix has the shape [2, 3]; it must be square"),
        ((np.eye(2), -1), "the budget is -1; it must be 0 or more"),
        ((np.eye(2), float("nan")), "the budget is nan"),
        ((np.eye(2), 1, [1.0]), "the linear term has the shape [1]; for 2 samples it must be [2]"),
        ((np.full((2, 2), np.nan), 1), "is not finite"),
        ((np.eye(2), 1, [0.0, np.inf]), "is not finite"),
    ],
)
def test_impossible_problems_are_refused(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        solve_capped_simplex(*arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize("start", [[0.5], [1.0, 1.0, 0.0], [2.0, -1.0, 0.0]])
def test_a_start_that_is_no_solution_is_refused(start: list[float]) -> None:
    with pytest.raises(ConfigurationError, match="the start must be 3 numbers between 0 and 1"):
        solve_capped_simplex(np.eye(3), 1, start=start)


def test_restarts_need_a_generator() -> None:
    with pytest.raises(ConfigurationError, match="3 restarts of the solver draw random numbers; give it a generator"):
        solve_capped_simplex(np.eye(3), 1, restarts=3)
