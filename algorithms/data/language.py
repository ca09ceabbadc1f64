"""Text as samples: the special tokens, the windows into which texts are cut, and the tokens to be predicted.

A sample is ``[2, length]``: the tokens that a model reads, and the tokens that it should predict (``Corpus``). In
*masked* language modelling some tokens are hidden, and the model predicts them from both sides, as in BERT (Devlin et
al., 2019). 15 % of the tokens are chosen, at least one of each sample; of these 80 % become ``[MASK]``, 10 % become a
random token, and 10 % stay. In *next*-token prediction a model predicts each token from those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.corpus import NO_TARGET

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The first tokens of every vocabulary."""
PAD, UNKNOWN, BEGIN, END, MASK = range(len(SPECIAL_TOKENS))

CHOSEN = 0.15
"""The share of the tokens that are to be predicted."""
HIDDEN, REPLACED = 0.8, 0.1
"""The shares of the chosen tokens that become ``[MASK]``, and that become a random token."""

TextKind = Literal["masked", "next"]
"""Which tokens a model predicts: hidden ones, or each next one (``data.text.kind``)."""


def windows(tokens: Sequence[int], length: int, kind: TextKind) -> NDArray[np.int64]:
    """The tokens of one text as ``[windows, 2, length]``, padded. No token is chosen or hidden yet.

    For ``masked`` a window is a piece of ``length - 2`` tokens between ``[CLS]`` and ``[SEP]``, without targets. For
    ``next`` a window has ``length`` targets, each to be predicted from the tokens before it in the window. The first
    window begins with ``[CLS]``, each further one with the token before it, and the last target is ``[SEP]``.
    """
    rows: list[tuple[list[int], list[int]]]
    if kind == "masked":
        size = length - 2
        rows = [([BEGIN, *tokens[i : i + size], END], []) for i in range(0, len(tokens), size)]
    else:
        line = [BEGIN, *tokens, END]
        starts = range(0, len(line) - 1, length)
        rows = [(line[i : i + length][: len(line) - 1 - i], line[i + 1 : i + 1 + length]) for i in starts]
    made = np.full((len(rows), 2, length), NO_TARGET, dtype=np.int64)
    made[:, 0] = PAD
    for sample, (read, predicted) in zip(made, rows, strict=True):
        sample[0, : len(read)] = read
        sample[1, : len(predicted)] = predicted
    return made


def masked(tokens: NDArray[np.int64], random: np.random.RandomState, vocabulary: int) -> NDArray[np.int64]:
    """``tokens [n, length]`` as samples ``[n, 2, length]``, with one masking that is drawn from ``random``."""
    chance, fate = random.random_sample(tokens.shape), random.random_sample(tokens.shape)
    other = random.randint(len(SPECIAL_TOKENS), vocabulary, tokens.shape)
    return np.stack(hide(np, tokens, chance, fate, other), axis=1)


def hide(library: Any, tokens: Any, chance: Any, fate: Any, other: Any) -> tuple[Any, Any]:
    """The tokens to read and the tokens to predict, from ``tokens [n, length]``.

    All arrays belong to ``library``, numpy or torch. ``chance`` and ``fate`` are uniform on [0, 1), ``other`` are
    random tokens, all ``[n, length]``. Special tokens are never chosen. The other token with the least ``chance`` is
    always chosen.
    """
    plain = tokens >= len(SPECIAL_TOKENS)
    chance = library.where(plain, chance, 2.0)
    chosen = plain & ((chance < CHOSEN) | (chance == library.amin(chance, -1)[:, None]))
    changed = library.where(fate < HIDDEN, MASK, library.where(fate < HIDDEN + REPLACED, other, tokens))
    return library.where(chosen, changed, tokens), library.where(chosen, tokens, NO_TARGET)
