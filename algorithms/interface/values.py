"""The values that scripts, programs and models exchange: tensors by name, batches, facts, public data.

Only type checkers import torch here, so that light processes may import this room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Labelled:
    """Samples ``x [n, *input_shape]``, normalised float32, and their labels ``y [n]``, int64."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class PublicData:
    """Samples that only the coordinator has: ``train`` to learn from, ``validation`` to stop early."""

    train: Labelled
    validation: Labelled


Tree = Mapping[str, "Tensor"]
"""Tensors by name. The names are flat and may have dots: ``fc1.weight``."""
Forest = Mapping[str, Tree]
"""Trees by key, such as ``model``, ``generator`` or ``control``. On the wire a leaf is called ``key/name``."""


class Facts(NamedTuple):
    """What a program may know of its device and round: zero-dimensional tensors, and ``label_counts [classes]``.

    ``examples`` is the number of samples, ``steps`` the number of steps of all stages, ``lr`` the learning rate.
    ``first_visit`` is a bool tensor; if it is true, the device's own state is all zeros. ``task`` is the period of the
    stream, counted from 0. ``device`` is the device's index; None where facts are made up, as in tests.
    """

    examples: Tensor
    steps: Tensor
    lr: Tensor
    round: Tensor
    task: Tensor
    first_visit: Tensor
    label_counts: Tensor
    device: Tensor | None = None


REPLAYED: Final = "replayed"
"""The note that is 1 for a sample of the device's replay buffer and 0 for a sample of the present period."""
LOGITS: Final = "logits"
"""The note of the logits ``[classes]`` that the global model gave a sample when it entered the replay buffer."""


class Batch(NamedTuple):
    """``x [batch, ...]`` as the model takes it, ``y [batch]`` int64, ``weight [batch]`` float32, where 0 is padding.

    ``notes`` are what the program asked to know of each sample, ``[batch, ...]`` each (``Noting``). If a program joined
    samples of its own to the end of the batch, there are none about these.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    notes: Tree = MappingProxyType({})


class Outcome(NamedTuple):
    """What a program leaves behind: the payload for the coordinator, and the device's next own state."""

    payload: Forest
    own: Tree


Kind = Literal["dense", "convolutional", "sequence"]
"""The kind of a network. The rule that chooses an executor depends on it."""
