"""Text as samples: the special tokens, the windows that texts are cut into, and what is to be predicted of them.

A sample is ``[2, length]``: the tokens that a model reads, and those that it is to predict (``Corpus``). In *masked*
language modelling some tokens are hidden, and a model names them from both sides, as in BERT (Devlin et al., 2019):
15 % are chosen, at least one of each sample, of which 80 % become ``[MASK]``, 10 % a random token, and 10 % stay. In
*next*-token prediction a model names each token from those before it.
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
"""Share of the tokens that are to be predicted."""
HIDDEN, REPLACED = 0.8, 0.1
"""Shares of the chosen ones that become ``[MASK]``, or a random token."""

Objective = Literal["masked", "next"]


def windows(tokens: Sequence[int], length: int, objective: Objective) -> NDArray[np.int64]:
    """One text's tokens as ``[windows, 2, length]``, padded; nothing is chosen or hidden yet.

    Masked: pieces of ``length - 2`` tokens between ``[CLS]`` and ``[SEP]``, without targets. Next: ``length`` tokens at
    a time, each to be predicted from those before it in its window; the first window reads ``[CLS]`` first and further
    ones the token before them, and ``[SEP]`` is the last to be predicted.
    """
    rows: list[tuple[list[int], list[int]]]
    if objective == "masked":
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
    """``tokens [n, length]`` as samples ``[n, 2, length]`` with one masking, drawn from ``random``."""
    chance, fate = random.random_sample(tokens.shape), random.random_sample(tokens.shape)
    other = random.randint(len(SPECIAL_TOKENS), vocabulary, tokens.shape)
    return np.stack(hide(np, tokens, chance, fate, other), axis=1)


def hide(library: Any, tokens: Any, chance: Any, fate: Any, other: Any) -> tuple[Any, Any]:
    """What is read, and what is to be predicted, of ``tokens [n, length]``; arrays of ``library``, numpy or torch.

    ``chance`` and ``fate`` are uniform on [0, 1), ``other`` random tokens, all ``[n, length]``. Special tokens are
    never chosen; of other ones the one with the least ``chance`` always is.
    """
    plain = tokens >= len(SPECIAL_TOKENS)
    chance = library.where(plain, chance, 2.0)
    chosen = plain & ((chance < CHOSEN) | (chance == library.amin(chance, -1)[:, None]))
    changed = library.where(fate < HIDDEN, MASK, library.where(fate < HIDDEN + REPLACED, other, tokens))
    return library.where(chosen, changed, tokens), library.where(chosen, tokens, NO_TARGET)
