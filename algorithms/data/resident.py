"""A split that lies on the device that computes, so that only the numbers of samples go there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.data.corpus import Corpus, Split


class Resident:
    """The samples of a split on a ``device``, as they are stored, with the normalisation of their corpus.

    ``batch`` gives the bits that ``Corpus.batch`` gives: a product and a sum of float32, rounded one after the other.
    """

    def __init__(self, corpus: Corpus, split: Split, device: torch.device) -> None:
        self._tokens = corpus.tokens
        # The arrays may be read-only, which no tensor can be. They are copied once.
        self._x, self._y = (torch.from_numpy(np.array(values)).to(device) for values in (split.x, split.y))
        self._scale, self._shift = (
            torch.from_numpy(np.array(values)).to(device) for values in (corpus.scale, corpus.shift)
        )

    def batch(self, indices: NDArray[np.integer[Any]]) -> tuple[Tensor, Tensor]:
        """The samples and labels at ``indices [n]``, as ``Corpus.batch`` gives them, on the device."""
        rows = torch.from_numpy(np.asarray(indices, np.int64) % len(self._y)).to(self._y.device)
        x, y = self._x.index_select(0, rows), self._y.index_select(0, rows)
        return (x.long() if self._tokens else x.float().mul_(self._scale).add_(self._shift)), y
