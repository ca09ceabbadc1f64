"""Masking training texts anew in every batch, in place of the one masking that is stored."""

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
    """An Augment for samples of masked language modelling over so many tokens of a ``vocabulary``."""

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
        """``x [rows, 2, length]``; the original tokens are the targets where there are any, and elsewhere what is read.

        Returns a new tensor of the same shape.
        """
        read, targets = x.unbind(1)
        tokens = torch.where(targets == NO_TARGET, read, targets)
        other = draws["other"].to(tokens.dtype)
        return torch.stack(hide(torch, tokens, draws["chance"], draws["fate"], other), 1)
