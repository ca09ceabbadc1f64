"""The values that scripts, programs and models exchange: tensors by name, batches, facts, public data.

torch is imported for type checkers only, so that light processes may import this room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

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


Tree = Mapping[str, "Tensor"]
"""Tensors by dotted name, flat."""
Forest = Mapping[str, Tree]
"""Trees by top-level key: ``model``, ``generator``, ``control``. On the wire a leaf is called ``key/name``."""


class Facts(NamedTuple):
    """What a program may know of its device and round; all zero-dimensional tensors but ``label_counts`` ``[classes]``.

    ``steps`` counts those of all stages. ``first_visit`` is a bool tensor: a device's own state is then all zeros.
    """

    examples: Tensor
    steps: Tensor
    lr: Tensor
    round: Tensor
    task: Tensor
    first_visit: Tensor
    label_counts: Tensor


class Batch(NamedTuple):
    """``x [batch, ...]`` as the model takes it, ``y [batch]`` int64, ``weight [batch]`` float32: 0 marks padding."""

    x: Tensor
    y: Tensor
    weight: Tensor


class Outcome(NamedTuple):
    """What a program leaves behind: the payload for the coordinator, and the device's next own state."""

    payload: Forest
    own: Tree


Kind = Literal["dense", "convolutional", "sequence"]
"""Of a network: what the choice of an executor goes by."""
