"""FedCBDR's arithmetic: leverage scores against an SVD, draws in proportion to them, and balanced numbers by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedemu.algorithms.replay.selection.leverage import (
    ABSENT,
    balanced_counts,
    keys_of_a_draw,
    largest_by_class,
    leverage_scores,
)


def orthogonal(size: int, random: np.random.Generator) -> np.ndarray:
    return np.linalg.qr(random.normal(size=(size, size)))[0]


def test_scores_are_the_squared_norms_of_rows_of_u_and_add_up_to_the_rank() -> None:
    random = np.random.default_rng(0)
    basis = random.normal(size=(3, 5))
    shares = [random.normal(size=(n, 3)) @ basis for n in (6, 4, 0)]
    whole = np.concatenate(shares)
    u, sigma, _ = np.linalg.svd(whole, full_matrices=False)
    expected = np.square(u[:, sigma > 1e-9]).sum(axis=1)
    moments = sum(x.T @ x for x in shares)
    scores = np.concatenate([leverage_scores(x, moments) for x in shares])
    np.testing.assert_allclose(scores, expected, rtol=1e-8)
    assert scores.sum() == pytest.approx(3.0)
    # Features of float32 have such noise; its directions do not count to the rank.
    noisy = whole + 1e-7 * random.normal(size=whole.shape)
    np.testing.assert_allclose(leverage_scores(noisy, noisy.T @ noisy), expected, rtol=1e-4)


def test_the_orthogonal_matrices_of_the_paper_change_no_score() -> None:
    random = np.random.default_rng(1)
    shares = [random.normal(size=(n, 4)) for n in (5, 7)]
    q = orthogonal(4, random)
    ps = [orthogonal(len(x), random) for x in shares]
    masked = [p @ x @ q for p, x in zip(ps, shares, strict=True)]
    u = np.linalg.svd(np.concatenate(masked), full_matrices=False)[0]
    unmasked = np.concatenate([ps[0].T @ u[:5], ps[1].T @ u[5:]])
    ours = np.concatenate([leverage_scores(x, sum(y.T @ y for y in shares)) for x in shares])
    np.testing.assert_allclose(ours, np.square(unmasked).sum(axis=1), rtol=1e-10)
    np.testing.assert_allclose(sum(y.T @ y for y in masked), q.T @ sum(x.T @ x for x in shares) @ q, atol=1e-12)


def test_features_that_are_all_zero_have_no_leverage() -> None:
    assert leverage_scores(np.zeros((2, 3)), np.zeros((3, 3))).tolist() == [0.0, 0.0]
    assert leverage_scores(np.zeros((0, 1)), np.eye(3)).tolist() == []


def test_the_largest_key_falls_on_samples_in_proportion_to_their_scores() -> None:
    random = np.random.default_rng(2)
    scores = np.array([0.1, 0.3, 0.0, 0.6])
    keys = np.array([keys_of_a_draw(scores, random) for _ in range(4000)])
    shares = np.bincount(keys.argmax(axis=1), minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.1, 0.3, 0.0, 0.6], atol=0.03)
    assert (keys[:, 2] == 0.0).all()
    assert 0.0 <= keys.min() <= keys.max() <= 1.0
    # The second is drawn in proportion among the rest: after 3, samples 0 and 1 are as 1 to 3.
    after = keys[keys.argmax(axis=1) == 3][:, :2].argmax(axis=1)
    assert after.mean() == pytest.approx(0.75, abs=0.04)


def test_the_largest_keys_of_each_class_come_first() -> None:
    table = largest_by_class([0.2, 0.9, 0.5, 0.4], [1, 0, 1, 1], 3, 2)
    assert table.tolist() == [[0.9, ABSENT], [0.5, 0.4], [ABSENT, ABSENT]]


def counts(keys: object, rooms: list[int], budget: int) -> list[list[int]]:
    return balanced_counts(keys, rooms, budget, np.random.default_rng(0)).tolist()


def test_classes_get_equal_numbers_from_whichever_device_has_the_largest_keys() -> None:
    keys = [[[0.9, 0.8], [0.1, ABSENT]], [[0.85, 0.2], [0.6, 0.5]]]
    assert counts(keys, [2, 2], 4) == [[1, 1], [1, 1]]
    assert counts(keys, [2, 2], 2) == [[1, 0], [0, 1]]
    assert counts(keys, [9, 9], 9) == [[2, 1], [2, 2]]


def test_no_device_keeps_more_than_its_room_and_a_rare_class_leaves_its_share_to_others() -> None:
    keys = [[[0.9, 0.8, 0.7], [0.6, ABSENT, ABSENT]], [[0.5, 0.4, ABSENT], [ABSENT] * 3]]
    assert counts(keys, [2, 5], 5) == [[1, 1], [2, 0]]
    assert counts(keys, [5, 0], 3) == [[2, 1], [0, 0]]
    assert counts(np.zeros((0, 2, 3)), [], 4) == []


@pytest.mark.parametrize("seed", range(20))
def test_each_sample_goes_to_the_class_with_the_fewest_and_there_to_the_largest_key_of_a_device_with_room(
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    keys = -np.sort(-random.integers(0, 5, (6, 3, 4)) / 5, axis=2)
    keys[np.arange(4) >= random.integers(0, 5, (6, 3))[..., None]] = ABSENT
    rooms = random.integers(0, 6, 6)
    found = balanced_counts(keys, rooms, 20, np.random.default_rng(seed))
    ranks = np.random.default_rng(seed).permutation(3)
    expected, over = np.zeros((6, 3), np.int64), np.zeros(3, bool)
    while expected.sum() < 20 and not over.all():
        label = min(np.flatnonzero(~over), key=lambda label: (expected[:, label].sum(), ranks[label]))
        offered = [
            keys[device, label, taken] if taken < 4 and expected[device].sum() < rooms[device] else ABSENT
            for device, taken in enumerate(expected[:, label])
        ]
        if max(offered) == ABSENT:
            over[label] = True
        else:
            expected[int(np.argmax(offered)), label] += 1
    assert found.tolist() == expected.tolist()
