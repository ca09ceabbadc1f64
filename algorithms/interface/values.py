"""Public data: labelled samples that the coordinator itself may train on, split off before devices get theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Labelled:
    """``x [n, *input_shape]`` normalised float32, ``y [n]`` int64."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class PublicData:
    """``train`` is for distillation and fine-tuning, ``validation`` for stopping early; no device holds any of it."""

    train: Labelled
    validation: Labelled
