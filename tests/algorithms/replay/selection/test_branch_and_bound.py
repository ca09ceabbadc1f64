"""GSS-IQP: the best choice of samples, against all choices."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest

from fedemu.algorithms.replay.selection.branch_and_bound import by_gss_iqp, least_cosines
from fedemu.algorithms.replay.selection.candidates import Candidates
from fedemu.algorithms.replay.selection.diversity import directions, gradient_diversity, objective


def cosines(seed: int, size: int, width: int, shift: float = 0.0) -> np.ndarray:
    draws = np.random.default_rng(seed)
    rows = directions(draws.normal(size=(size, width)) + shift * draws.normal(size=width))
    return rows @ rows.T


def brute_force(gram: np.ndarray, budget: int) -> float:
    return min(objective(gram, subset) for subset in combinations(range(len(gram)), budget))


@pytest.mark.parametrize(("size", "width", "shift"), [(12, 4, 0.0), (12, 30, 0.0), (14, 5, 1.0), (11, 2, 0.5)])
@pytest.mark.parametrize("budget", [1, 4, 9])
def test_with_enough_nodes_the_choice_is_the_best_of_all(size: int, width: int, shift: float, budget: int) -> None:
    for seed in (6, 14):  # with 12 samples of width 4 the best choice of 4 lies below the first branch on the left
        gram = cosines(seed, size, width, shift)
        found = least_cosines(gram, budget, np.random.default_rng(0), nodes=4000)
        assert found.proven
        assert found.nodes <= 2 * comb(size, budget)
        assert found.objective == pytest.approx(brute_force(gram, budget), abs=1e-7)
        assert found.objective == pytest.approx(objective(gram, found.positions), abs=1e-12)
        assert len(found.positions) == budget
        assert np.all(np.diff(found.positions) > 0)


@pytest.mark.parametrize("seed", [29, 33, 63])
def test_no_bound_cuts_off_a_choice_that_is_better_than_the_first(seed: int) -> None:
    gram = cosines(seed, 14, 40)
    first, found = (least_cosines(gram, 5, np.random.default_rng(0), nodes=nodes) for nodes in (0, 4000))
    assert found.objective < first.objective - 1e-3
    assert found.objective == pytest.approx(brute_force(gram, 5), abs=1e-7)


def test_bounds_are_so_tight_that_few_nodes_prove_a_choice() -> None:
    found = [least_cosines(cosines(seed, 12, 14), 4, np.random.default_rng(0), nodes=4000) for seed in range(12)]
    assert all(choice.proven for choice in found)
    assert sum(choice.nodes for choice in found) < 450


def test_the_choice_is_never_worse_than_that_of_diversity_and_the_nodes_are_limited() -> None:
    better = 0
    for seed in range(6):
        gram = cosines(seed, 40, 8)
        given = Candidates(np.ones(40, dtype=bool), 40, gram=lambda gram=gram: gram)
        plain = objective(gram, gradient_diversity()(given, 6, np.random.default_rng(seed)))
        for nodes in (0, 1, 24):
            found = least_cosines(gram, 6, np.random.default_rng(seed), nodes=nodes)
            assert found.nodes == (nodes if nodes < 2 else 23), "after the first node, two are solved at a time"
            assert found.objective <= plain + 1e-12
            better += found.objective < plain - 1e-9
    assert better


def test_a_choice_is_not_proven_without_a_search_or_while_nodes_are_open() -> None:
    gram = cosines(0, 40, 8)
    for nodes in (0, 1):
        assert not least_cosines(gram, 6, np.random.default_rng(0), nodes=nodes).proven


def test_gradients_that_are_zero_or_the_same_are_chosen_from_like_any_others() -> None:
    assert least_cosines(np.zeros((5, 5)), 2, np.random.default_rng(0)).objective == 0.0
    same = least_cosines(np.ones((5, 5)), 2, np.random.default_rng(0))
    assert (same.objective, same.proven, same.nodes) == (4.0, True, 1), "no other choice is better"
    opposed = least_cosines(np.outer([1, -1, 1, -1], [1, -1, 1, -1]), 1, np.random.default_rng(0))
    assert (opposed.objective, opposed.proven, len(opposed.positions)) == (1.0, True, 1)


def test_the_strategy_keeps_the_best_choice() -> None:
    gram = cosines(3, 10, 4)
    given = Candidates(np.ones(10, dtype=bool), 10, gram=lambda: gram)
    kept = by_gss_iqp(given, 3, np.random.default_rng(0))
    assert objective(gram, kept) == pytest.approx(brute_force(gram, 3), abs=1e-7)
    assert by_gss_iqp(given, 20, np.random.default_rng(0)).tolist() == list(range(10))
