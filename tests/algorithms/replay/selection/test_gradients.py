"""Selection by gradients: the objective, the targets of coordination, GSS and the relaxations, by hand."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemu.algorithms.replay.selection.candidates import Candidates
from fedemu.algorithms.replay.selection.capped_simplex import solve_capped_simplex
from fedemu.algorithms.replay.selection.diversity import directions, gradient_diversity, objective, select_top, targets
from fedemu.algorithms.replay.selection.gss import gss_cluster, gss_greedy
from fedemu.protocol.errors import ConfigurationError

OPPOSED = directions([[1.0, 0.0], [2.0, 0.0], [-3.0, 0.0], [0.0, 0.0]])
"""Two the same, one opposed, and one that is zero."""


def test_directions_have_norm_1_and_zero_stays_zero() -> None:
    assert directions([[3.0, 4.0], [0.0, 0.0]]).tolist() == [[0.6, 0.8], [0.0, 0.0]]
    assert np.isnan(directions([[np.nan, 1.0]])).all()


def test_the_objective_sums_all_pairs_each_with_itself_too() -> None:
    gram = OPPOSED @ OPPOSED.T
    assert objective(gram, [0, 1]) == 4.0
    assert objective(gram, [0, 2]) == 0.0
    assert objective(gram, [3]) == 0.0
    assert objective(gram, []) == 0.0


@pytest.mark.parametrize(
    ("x", "budget", "expected"),
    [
        ([0.1, 0.9, 0.5], 2, [1, 2]),
        ([0.5, 0.9, 0.5, 0.5], 2, [0, 1]),
        ([0.0, 0.0], 1, [0]),
        ([0.3, 0.2], 5, [0, 1]),
        ([0.3, 0.2], 0, []),
        ([], 2, []),
        ([0.5, 0.9] * 200, 3, [1, 3, 5]),
    ],
)
def test_the_largest_are_kept_and_the_first_among_equals(x: list[float], budget: int, expected: list[int]) -> None:
    assert select_top(x, budget).tolist() == expected


def test_a_negative_number_of_largest_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the replay budget is -1"):
        select_top([1.0], -1)


def test_targets_are_the_sums_less_their_mean() -> None:
    assert targets([[1.0, 2.0], [3.0, 6.0]]).tolist() == [[-1.0, -2.0], [1.0, 2.0]]
    assert targets([[5.0, 1.0]]).tolist() == [[0.0, 0.0]]
    assert targets(np.zeros((0, 3))).shape == (0, 3)


@settings(max_examples=15)
@given(devices=st.integers(1, 6), seed=st.integers(0, 1000))
def test_an_iteration_of_the_coordination_never_worsens_the_shared_objective(devices: int, seed: int) -> None:
    draws = np.random.default_rng(seed)
    rows = [directions(draws.normal(size=(8, 5)) + draws.normal(size=5)) for _ in range(devices)]
    aims = np.zeros((devices, 5))
    before = np.inf
    for _ in range(4):
        sums = np.array(
            [
                solve_capped_simplex(own @ own.T, 3, own @ aim, tolerance=1e-9) @ own
                for own, aim in zip(rows, aims, strict=True)
            ]
        )
        shared = float(np.square(sums.sum(axis=0)).sum())
        apart = devices * float(np.square(sums - aims).sum())
        assert shared <= apart + 1e-6
        assert apart <= before + 1e-6
        aims, before = targets(sums), shared
        assert aims.sum(axis=0) == pytest.approx(np.zeros(5), abs=1e-12)


def keep(rows: Any, budget: int, **how: Any) -> list[int]:
    given = Candidates(np.ones(len(rows), dtype=bool), len(rows), gram=lambda: rows @ rows.T)
    return gradient_diversity(**how)(given, budget, np.random.default_rng(0)).tolist()


def test_the_relaxations_choose_opposed_gradients() -> None:
    rows = directions([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.0], [0.0, 1.0]])
    assert keep(rows, 2) == [0, 2]
    assert keep(rows, 2, restarts=0) == [0, 2]
    assert keep(rows, 2, zero_diagonal=False) == [0, 2]


def test_with_restarts_a_choice_of_few_samples_is_as_good_as_the_best_of_all_choices() -> None:
    for seed in range(5):
        rows = directions(np.random.default_rng(seed).normal(size=(12, 6)))
        gram = rows @ rows.T
        least = min(objective(gram, subset) for subset in combinations(range(12), 3))
        assert objective(gram, keep(rows, 3, restarts=10)) == pytest.approx(least)


def test_without_its_diagonal_the_relaxation_is_restarted_three_times_by_default() -> None:
    kept = {restarts: [] for restarts in (None, 0, 3)}
    for seed, restarts in product(range(8), kept):
        rows = directions(np.random.default_rng(seed).normal(size=(30, 20)))
        kept[restarts].append(keep(rows, 4, **({} if restarts is None else {"restarts": restarts})))
    assert kept[None] == kept[3] != kept[0]


def test_gss_greedy_replaces_a_buffered_sample_by_an_opposed_one() -> None:
    gram = OPPOSED[:3] @ OPPOSED[:3].T
    for seed in range(10):
        assert gss_greedy(gram, 2, np.random.default_rng(seed)).tolist() in ([0, 2], [1, 2])
        # With the score 0 an opposed sample enters for certain, and no other one is drawn to leave for the next.
        assert gss_greedy(gram[1:, 1:], 1, np.random.default_rng(seed)).tolist() == [1]
        assert gss_greedy(gram[np.ix_([0, 2, 1], [0, 2, 1])], 1, np.random.default_rng(seed)).tolist() == [1]


def test_gss_greedy_keeps_its_first_samples_if_no_other_gradient_is_opposed() -> None:
    assert gss_greedy(np.ones((5, 5)), 2, np.random.default_rng(0)).tolist() == [0, 1]
    assert gss_greedy(np.eye(5), 2, np.random.default_rng(0)).tolist() == [0, 1]


def test_gss_greedy_replaces_by_the_proportion_of_the_scores() -> None:
    """The buffered sample scores 1, the new one 0.5: it enters with probability 2/3."""
    gram = np.array([[1.0, -0.5], [-0.5, 1.0]])
    entered = sum(gss_greedy(gram, 1, np.random.default_rng(seed)).tolist() == [1] for seed in range(300))
    assert entered == pytest.approx(200, abs=25)


def test_gss_greedy_draws_by_the_scores_that_samples_had_when_they_came() -> None:
    for seed in range(30):
        rows = directions(np.random.default_rng(seed).normal(size=(20, 2)))
        gram, draws = rows @ rows.T, np.random.default_rng(seed)
        held: dict[int, float] = {0: 1.0}
        for each in range(1, 20):
            score = max(gram[each, other] for other in held) + 1
            if len(held) == 3 and score < 1:
                scores = np.array(list(held.values()))
                drawn = draws.choice(3, p=scores / scores.sum())
                if draws.random() < scores[drawn] / (scores[drawn] + score):
                    held = {
                        each if i == drawn else old: score if i == drawn else held[old] for i, old in enumerate(held)
                    }
            elif len(held) < 3:
                held[each] = score
        assert gss_greedy(gram, 3, np.random.default_rng(seed)).tolist() == sorted(held)


def test_gss_cluster_keeps_one_of_each_cluster() -> None:
    rows = directions([[1.0, 0.0], [1.0, 0.1], [1.0, -0.1], [0.0, 1.0], [0.1, 1.0], [-1.0, -1.0]])
    for seed in range(10):
        kept = gss_cluster(rows @ rows.T, 3, np.random.default_rng(seed)).tolist()
        assert [sum(each in cluster for each in kept) for cluster in ({0, 1, 2}, {3, 4}, {5})] == [1, 1, 1]


def test_gss_cluster_ends_if_some_gradients_are_the_same() -> None:
    """The least distance is 0, or below it by rounding, and no multiple of it would ever hold several clusters."""
    gram = np.eye(5)
    for same in (1.0, np.nextafter(1.0, 2.0)):
        gram[:2, :2] = same
        kept = gss_cluster(gram, 3, np.random.default_rng(0)).tolist()
        assert len({*kept}) == 3


def test_gss_cluster_goes_through_all_samples_for_one_radius_after_the_other() -> None:
    """The last sample has a zero gradient, whose distance from all others is 1."""
    rows = directions([*np.random.default_rng(0).normal(size=(11, 3)), [0.0, 0.0, 0.0]])
    gram = (rows @ rows.T + (rows @ rows.T).T) / 2
    distance = 1 - gram
    for seed, budget in product(range(6), (2, 4, 7)):
        draws, radius = np.random.default_rng(seed), distance[np.triu_indices(12, 1)].min()
        centres = list(range(12))
        while len(centres) > budget:
            centres = [int(draws.integers(12))]
            for each in range(12):
                if each not in centres and (distance[each, centres] > radius).all():
                    centres.append(each)
            radius *= 1.1
        others = draws.permutation([each for each in range(12) if each not in centres])
        expected = sorted([*centres, *others[: budget - len(centres)]])
        assert gss_cluster(gram, budget, np.random.default_rng(seed)).tolist() == expected


def test_gss_cluster_adds_random_samples_if_there_are_fewer_clusters() -> None:
    for gram in (np.ones((6, 6)), np.zeros((6, 6))):
        assert len(set(gss_cluster(gram, 4, np.random.default_rng(0)).tolist())) == 4
    assert {int(gss_cluster(np.eye(4), 1, np.random.default_rng(seed))[0]) for seed in range(40)} == {0, 1, 2, 3}
    assert gss_cluster(np.ones((3, 3)), 5, np.random.default_rng(0)).tolist() == [0, 1, 2]
    assert gss_cluster(np.ones((3, 3)), 0, np.random.default_rng(0)).tolist() == []
