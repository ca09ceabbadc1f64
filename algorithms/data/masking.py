"""A new masking of training texts in every batch, in place of the one that is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.data.corpus import NO_TARGET
from fedemu.algorithms.data.language import SPECIAL_TOKENS, hide


@dataclass(frozen=True)
class Masking:
    """An Augment for samples of masked language modelling. ``vocabulary`` is the number of tokens."""

    vocabulary: int

    def draw(
        self, generator: np.random.Generator, rows: int, sample_shape: Sequence[int]
    ) -> Mapping[str, NDArray[Any]]:
        """Random numbers for every token, ``[rows, length]`` each."""
        shape = rows, sample_shape[-1]
        return {
            "chance": generator.random(shape, dtype=np.float32),
            "fate": generator.random(shape, dtype=np.float32),
            "other": generator.integers(len(SPECIAL_TOKENS), self.vocabulary, shape, dtype=np.int32),
        }

    def apply(self, x: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """A new tensor like ``x [rows, 2, length]``, with another masking.

        The original token is the target if there is one, and otherwise the token that is read.
        """
        read, targets = x.unbind(1)
        tokens = torch.where(targets == NO_TARGET, read, targets)
        other = draws["other"].to(tokens.dtype)
        return torch.stack(hide(torch, tokens, draws["chance"], draws["fate"], other), 1)
