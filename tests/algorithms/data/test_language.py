"""Windows of texts, masking, and the loss over tokens, on cases worked by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from fedemu.algorithms.data.augment import augmentation
from fedemu.algorithms.data.corpus import NO_TARGET, Corpus, Split
from fedemu.algorithms.data.language import BEGIN, END, MASK, PAD, TextKind, hide, masked, windows
from fedemu.algorithms.data.masking import Masking
from fedemu.algorithms.interface import Batch, Facts
from fedemu.algorithms.training.objective import token_cross_entropy
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import Digest

NO = NO_TARGET
FACTS = Facts(*torch.zeros(6), label_counts=torch.zeros(1))


@pytest.mark.parametrize(
    ("tokens", "objective", "expected"),
    [
        ([7, 8], "masked", [[[BEGIN, 7, 8, END, PAD], [NO] * 5]]),
        ([7, 8, 9, 10], "masked", [[[BEGIN, 7, 8, 9, END], [NO] * 5], [[BEGIN, 10, END, PAD, PAD], [NO] * 5]]),
        ([7, 8], "next", [[[BEGIN, 7, 8, PAD, PAD], [7, 8, END, NO, NO]]]),
        ([7, 8, 9, 10], "next", [[[BEGIN, 7, 8, 9, 10], [7, 8, 9, 10, END]]]),
        ([7, 8, 9, 10, 11], "next", [[[BEGIN, 7, 8, 9, 10], [7, 8, 9, 10, 11]], [[11, 0, 0, 0, 0], [END, *[NO] * 4]]]),
        ([], "masked", []),
    ],
)  # fmt: skip
def test_a_text_is_cut_into_windows(tokens: Sequence[int], objective: TextKind, expected: object) -> None:
    assert windows(tokens, 5, objective).tolist() == expected


def test_every_token_of_a_long_text_is_predicted_once_from_the_one_before_it() -> None:
    tokens = list(range(5, 48))
    cut = windows(tokens, 6, "next")
    pairs = [(read, to) for read, to in cut.transpose(0, 2, 1).reshape(-1, 2).tolist() if to != NO]
    assert pairs == list(zip([BEGIN, *tokens], [*tokens, END], strict=True))


def test_two_draws_decide_what_becomes_of_a_token() -> None:
    tokens = np.array([[BEGIN, 10, 11, 12, 13, END, PAD]])
    chance = np.array([[0.0, 0.14, 0.1, 0.15, 0.0, 0.0, 0.0]])
    fate = np.array([[0.0, 0.79, 0.81, 0.0, 0.91, 0.0, 0.0]])
    other = np.full((1, 7), 20)
    read, targets = hide(np, tokens, chance, fate, other)
    assert read.tolist() == [[BEGIN, MASK, 20, 12, 13, END, PAD]]
    assert targets.tolist() == [[NO, 10, 11, NO, 13, NO, NO]]


def test_the_token_of_the_lowest_draw_is_chosen_if_no_token_would_be() -> None:
    tokens, chance = np.array([[BEGIN, 10, 11, END]]), np.array([[0.0, 0.9, 0.8, 0.0]])
    _, targets = hide(np, tokens, chance, np.zeros((1, 4)), np.full((1, 4), 20))
    assert targets.tolist() == [[NO, NO, 11, NO]]


def test_a_text_of_special_tokens_alone_is_not_masked() -> None:
    tokens = np.array([[BEGIN, 1, END, PAD]])
    read, targets = hide(np, tokens, np.zeros((1, 4)), np.zeros((1, 4)), np.full((1, 4), 20))
    assert (read.tolist(), targets.tolist()) == (tokens.tolist(), [[NO] * 4])


def test_a_masking_has_the_shares_of_bert() -> None:
    tokens = np.random.RandomState(1).randint(5, 500, (4000, 20))
    read, targets = masked(tokens, np.random.RandomState(0), 500).transpose(1, 0, 2)
    chosen = targets != NO
    # One of the twenty is always chosen, also in the case that none is drawn, which has the chance 0.85^20.
    assert chosen.mean() == pytest.approx(0.15 + 0.85**20 / 20, abs=0.003)
    assert (read[chosen] == MASK).mean() == pytest.approx(0.8, abs=0.01)
    assert (read[chosen] == targets[chosen]).mean() == pytest.approx(0.1, abs=0.01)
    assert np.array_equal(np.where(chosen, targets, read), tokens)
    assert chosen.any(axis=1).all()


def test_every_new_masking_begins_with_the_original_tokens_and_differs() -> None:
    tokens = np.random.RandomState(1).randint(5, 40, (6, 12))
    tokens[:, 10:] = PAD
    x = torch.from_numpy(masked(tokens, np.random.RandomState(0), 40))
    masking, random = Masking(40), np.random.default_rng(3)
    drawn = [{name: torch.from_numpy(leaf) for name, leaf in masking.draw(random, 6, (2, 12)).items()} for _ in "ab"]
    once, again = (masking.apply(x, draws) for draws in drawn)
    assert (once.shape, once.dtype) == (x.shape, torch.int64)
    for changed in (once, again):
        read, targets = changed.unbind(1)
        assert torch.where(targets == NO, read, targets).tolist() == tokens.tolist()
        assert (targets != NO).any(1).all()
        assert (targets[:, 10:] == NO).all()
    assert not torch.equal(once, again)
    assert torch.equal(once, masking.apply(again, drawn[0]))


def test_mask_goes_with_masked_language_modelling_alone() -> None:
    moments = np.zeros(2), np.ones(2)
    assert augmentation(["mask"], (2, 8), *moments, masked=30) == Masking(30)
    for names, size in ((["mask"], 0), (["mask", "flip"], 30)):
        with pytest.raises(ConfigurationError, match=r"set data\.text\.kind = 'masked'"):
            augmentation(names, (2, 8), *moments, masked=size)
    with pytest.raises(ConfigurationError, match="needs images"):
        augmentation(["crop"], (2, 8), *moments, masked=30)


def test_the_loss_is_the_mean_over_predicted_tokens_by_the_weights_of_their_samples() -> None:
    """With equal logits for 4 tokens, a token costs ln 4. If the right logit is larger by ln 3, it costs ln 2."""
    logits = torch.zeros(3, 2, 4)
    logits[0, 0, 3] = math.log(3)
    x = torch.tensor([[[0, 0], [3, NO]], [[0, 0], [1, 2]], [[0, 0], [0, 0]]])
    even = Batch(x, torch.zeros(3, dtype=torch.int64), torch.tensor([1.0, 1.0, 0.0]))
    assert float(token_cross_entropy(logits, even, FACTS)) == pytest.approx((math.log(2) + 2 * math.log(4)) / 3)
    uneven = even._replace(weight=torch.tensor([3.0, 1.0, 0.0]))
    assert float(token_cross_entropy(logits, uneven, FACTS)) == pytest.approx((3 * math.log(2) + 2 * math.log(4)) / 5)
    padding = even._replace(weight=torch.zeros(3))
    assert float(token_cross_entropy(logits, padding, FACTS)) == 0.0


def test_tokens_stay_whole_numbers_in_a_batch() -> None:
    x = np.array([[[2, 7], [-100, 7]], [[2, 9], [-100, 9]]], dtype=np.int16)
    split = Split(x, np.zeros(2, np.int64), {})
    names = tuple("abcdefghij")
    corpus = Corpus("t", split, split, ("text",), (2, 2), np.zeros(2), np.ones(2), Digest("0" * 64), names)
    got, y = corpus.batch(split, np.array([1, -1]))
    assert (got.tolist(), got.dtype, y.tolist()) == ([x[1].tolist()] * 2, torch.int64, [0, 0])
    assert (corpus.language, corpus.outputs, corpus.classes, corpus.labelled) == (True, 10, 1, False)
