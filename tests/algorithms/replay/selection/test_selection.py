"""Every selection strategy: it keeps candidates within its budget, repeats its choice, and agrees with hand counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedemu.algorithms.replay.selection.at_random import approximation_of_uniform, fixed_proportion, reservoir
from fedemu.algorithms.replay.selection.by_class import class_quotas, herding
from fedemu.algorithms.replay.selection.candidates import Candidates, Strategy
from fedemu.algorithms.replay.selection.diversity import directions
from fedemu.algorithms.replay.selection.selection import STRATEGIES
from fedemu.protocol.errors import ConfigurationError


def candidates(old: int, new: int, seen: int | None = None, seed: int = 0) -> Candidates:
    """Samples with random gradients, of which some are zero or repeated, and three classes."""
    count = old + new
    draws = np.random.default_rng(seed)
    gradients = draws.normal(size=(count, 4))
    gradients[draws.random(count) < 0.2] = 0.0
    if count > 2:
        gradients[-1] = gradients[0]
    rows = directions(gradients)
    return Candidates(
        fresh=np.arange(count) >= old,
        seen=count if seen is None else seen,
        labels=draws.integers(3, size=count),
        gram=lambda: rows @ rows.T,
        features=lambda: gradients,
    )


def chosen(strategy: str, given: Candidates, budget: int, seed: int = 0) -> list[int]:
    return STRATEGIES[strategy](given, budget, np.random.default_rng(seed)).tolist()


@settings(max_examples=6)
@given(
    old=st.integers(0, 8),
    new=st.integers(0, 8),
    more=st.integers(0, 50),
    budget=st.integers(0, 18),
    seed=st.integers(0, 1000),
)
@example(old=3, new=6, more=5, budget=2, seed=0)
def test_every_strategy_keeps_given_samples_and_no_more_than_the_budget(
    old: int, new: int, more: int, budget: int, seed: int
) -> None:
    given = candidates(old, new, old + new + more, seed)
    for name, strategy in STRATEGIES.items():
        kept = strategy(given, budget, np.random.default_rng(seed))
        assert kept.dtype == np.int64
        assert len(kept) == (0 if name == "none" else min(budget, old + new))
        assert np.all(np.diff(kept) > 0)
        assert np.all((kept >= 0) & (kept < old + new))
        assert np.array_equal(kept, strategy(given, budget, np.random.default_rng(seed)))


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - {"none"}))
def test_a_negative_budget_is_refused(strategy: str) -> None:
    with pytest.raises(ConfigurationError, match="the replay budget is -1; it must be 0 or more"):
        chosen(strategy, candidates(2, 2), -1)


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - {"none"}))
def test_all_zero_or_equal_gradients_can_be_chosen_among(strategy: str) -> None:
    for gram in (np.zeros((6, 6)), np.ones((6, 6))):
        given = replace(candidates(2, 4), gram=lambda gram=gram: gram, features=lambda: np.zeros((6, 3)))
        assert len(chosen(strategy, given, 3)) == 3


@pytest.mark.parametrize(
    ("strategy", "lacking", "words"),
    [
        ("class_balanced", "labels", "class balance needs the samples' labels"),
        ("herding", "labels", "herding needs the samples' labels"),
        ("herding", "features", "herding needs the samples' features"),
        ("gss_greedy", "gram", "GSS-greedy needs the samples' gradients"),
        ("gss_cluster", "gram", "GSS by clusters needs the samples' gradients"),
        ("gss_iqp", "gram", "GSS-IQP needs the samples' gradients"),
        ("diversity", "gram", "gradient diversity needs the samples' gradients"),
    ],
)
def test_a_strategy_says_what_it_lacks(strategy: str, lacking: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        chosen(strategy, replace(candidates(2, 4), **{lacking: None}), 3)


def test_candidates_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="3 samples were seen so far, but there are 4 candidates; count the candidates"
    ):
        candidates(2, 2, seen=3)
    with pytest.raises(ConfigurationError, match="there are 3 labels for 4 samples"):
        replace(candidates(2, 2), labels=np.zeros(3, dtype=np.int64))


def test_the_buffers_samples_arrived_before_the_new_ones() -> None:
    given = Candidates(fresh=np.array([True, False, True, False]), seen=4)
    assert given.arrivals().tolist() == [1, 3, 0, 2]


def from_new(strategy: Strategy, given: Candidates, budget: int, seed: int = 0) -> int:
    kept = strategy(given, budget, np.random.default_rng(seed))
    assert len(kept) == budget, "the other part gives what one part lacks"
    return int(given.fresh[kept].sum())


@pytest.mark.parametrize(
    ("old", "new", "seen", "budget", "expected"),
    [(10, 20, 100, 10, 2), (10, 50, 100, 10, 5), (0, 20, 20, 10, 10), (1, 20, 100, 10, 9), (10, 0, 100, 5, 0)],
)
def test_the_approximation_of_uniform_gives_a_period_its_share_of_all_samples(
    old: int, new: int, seen: int, budget: int, expected: int
) -> None:
    assert from_new(approximation_of_uniform, candidates(old, new, seen), budget) == expected


@pytest.mark.parametrize(
    ("old", "new", "budget", "expected"), [(8, 20, 8, 2), (1, 20, 8, 7), (0, 20, 8, 8), (8, 1, 8, 1), (8, 0, 4, 0)]
)
def test_a_fixed_proportion_of_a_quarter_is_filled_up_from_the_other_part(
    old: int, new: int, budget: int, expected: int
) -> None:
    assert from_new(fixed_proportion(0.25), candidates(old, new), budget) == expected


def test_a_share_below_one_sample_is_right_in_the_mean() -> None:
    given = candidates(3, 9)
    taken = sum(from_new(fixed_proportion(0.25), given, 1, seed) for seed in range(400))
    assert taken == pytest.approx(100, abs=30)


@pytest.mark.parametrize("proportion", [0.0, 1.0, -0.5, float("nan")])
def test_a_proportion_outside_of_0_to_1_is_refused(proportion: float) -> None:
    with pytest.raises(ConfigurationError, match="it must lie between 0 and 1"):
        fixed_proportion(proportion)


def kept_of_stream(periods: int, size: int, budget: int, seed: int) -> list[int]:
    """The samples, numbered in order of arrival, that the reservoir holds after all periods."""
    buffer: list[int] = []
    generator = np.random.default_rng(seed)
    for period in range(periods):
        held = [*buffer, *range(period * size, (period + 1) * size)]
        fresh = np.arange(len(held)) >= len(buffer)
        kept = reservoir(Candidates(fresh, seen=(period + 1) * size), budget, generator)
        buffer = [held[position] for position in kept]
    return buffer


def test_a_reservoir_over_periods_is_a_uniform_sample_of_the_stream() -> None:
    counts = np.bincount([each for seed in range(1200) for each in kept_of_stream(4, 3, 4, seed)], minlength=12)
    assert counts.sum() == 4800
    assert counts == pytest.approx(np.full(12, 400), abs=70)


def test_a_reservoir_that_is_larger_than_its_budget_is_thinned_out() -> None:
    assert chosen("reservoir", candidates(6, 0, seen=50), 2) in [[i, j] for j in range(6) for i in range(j)]
    assert len(chosen("reservoir", candidates(6, 3, seen=50), 4)) == 4


def test_a_reservoir_within_its_budget_draws_a_place_for_each_new_sample_and_nothing_else() -> None:
    for seed in range(8):
        places, held = np.random.default_rng(seed), [0, 1, 2, 3]
        for ordinal, sample in ((7, 4), (8, 5), (9, 6)):
            if (place := places.integers(ordinal)) < 4:
                held[place] = sample
        assert chosen("reservoir", candidates(4, 3, seen=9), 4, seed) == sorted(held)


@pytest.mark.parametrize(
    ("counts", "budget", "possible"),
    [
        ([5, 1, 3], 7, [[3, 1, 3]]),
        ([5, 1, 3], 6, [[3, 1, 2], [2, 1, 3]]),
        ([5, 1, 3], 1, [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
        ([5, 1, 3], 20, [[5, 1, 3]]),
        ([0, 4], 3, [[0, 3]]),
        ([], 3, [[]]),
    ],
)
def test_quotas_of_classes_are_as_equal_as_their_counts_allow(
    counts: list[int], budget: int, possible: list[list[int]]
) -> None:
    drawn = [class_quotas(counts, budget, np.random.default_rng(seed)).tolist() for seed in range(40)]
    assert sorted(possible) == [list(each) for each in sorted(set(map(tuple, drawn)))]


def test_class_balance_keeps_a_rare_class() -> None:
    given = replace(candidates(4, 8), labels=np.array([7] + [2] * 11))
    kept = chosen("class_balanced", given, 4)
    assert 0 in kept
    assert len(kept) == 4


def test_herding_follows_the_mean_of_the_directions() -> None:
    features = [[1.0, 0.0], [0.0, 3.0], [2.0, 2.0], [0.0, 0.0]]
    assert herding(features[:3], 3).tolist() == [2, 0, 1]
    assert herding(features[:3], 2).tolist() == [2, 0]
    assert sorted(herding(features, 9).tolist()) == [0, 1, 2, 3]
    # The last sample is far from the mean, but the mean of it and of the first choice is near.
    assert herding([[1.0, 0.0], [6.0, 1.0], [0.0, 2.0]], 2).tolist() == [1, 2]


def test_herding_takes_the_first_of_two_samples_which_are_equally_far_from_their_mean() -> None:
    pairs = np.random.default_rng(0).normal(size=(100, 2, 8))
    assert [herding(pair, 1).tolist() for pair in pairs] == [[0]] * 100


def test_herding_adds_the_sample_that_brings_the_mean_of_the_chosen_nearest() -> None:
    for seed in range(5):
        features = np.random.default_rng(seed).normal(size=(12, 4)) + 0.5
        rows = features / np.linalg.norm(features, axis=1, keepdims=True)
        chosen: list[int] = []
        for _ in range(7):
            rest = [i for i in range(12) if i not in chosen]
            apart = [np.linalg.norm(rows.mean(axis=0) - rows[[*chosen, i]].mean(axis=0)) for i in rest]
            chosen.append(rest[int(np.argmin(apart))])
        assert herding(features, 7).tolist() == chosen


def test_herding_works_within_each_class() -> None:
    features = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 0.1], [-1.0, 0.0], [-1.0, -0.2]])
    given = replace(candidates(0, 6), labels=np.array([0, 0, 0, 1, 1, 1]), features=lambda: features)
    assert chosen("herding", given, 2) == [2, 4]
