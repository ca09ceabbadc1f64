"""The samples in which a data set has its smallest and largest values.

A number beyond the last row of an ``nn.Embedding`` fails the device that has the sample, when the sample comes. The
trial applies the model to these samples first, so that most such models are refused before the run. A model that
computes its indices from several values may still fail later.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.corpus import Corpus, Split

PLACES = 64
"""Each place of a sample with up to this number of places may have a table of its own, so each is looked at."""
BLOCK = 2**22
"""The most values that are read at a time."""


def extremes(corpus: Corpus, split: Split) -> NDArray[np.int64]:
    """The indices of a split's samples with the smallest and the largest values.

    Of long samples of tokens two are enough, because one table has all places. Samples of pixels, and long samples of
    fractions, have no such values: no number in them is the number of a row.
    """
    values: NDArray[np.generic] = split.x[:, 0] if corpus.language else split.x
    values = values.reshape(len(values), -1)
    places = values.shape[1]
    if not values.size or values.dtype.kind == "u" or (places > PLACES and not corpus.tokens):
        return np.zeros(0, np.int64)
    found = [np.zeros(0, np.int64)]
    rows = max(1, BLOCK // places)
    for start in range(0, len(values), rows):
        block = values[start : start + rows]
        found.append(start + _in_block(block))
    candidates = np.unique(np.concatenate(found))
    return candidates[_in_block(values[candidates])] if len(found) > 2 else candidates


def _in_block(values: NDArray[np.generic]) -> NDArray[np.int64]:
    """The rows of ``values [n, places]`` that hold a smallest or a largest value."""
    if values.shape[1] > PLACES:
        ends = np.array([values.argmin(), values.argmax()]) // values.shape[1]
    else:
        ends = np.concatenate([values.argmin(axis=0), values.argmax(axis=0)])
    return np.unique(ends).astype(np.int64)
