"""How samples are made without data: the settings of a synthesis, and how images come from trained variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Protocol

import numpy as np
from pydantic import Field
from torch import Tensor

from fedemu.algorithms.interface import Forest, Outputs
from fedemu.algorithms.training.adam import Adam

OPTIMISER: Final = Adam(first_decay=0.5)
"""The optimiser of all variables of generators."""

Momentum = Annotated[float, Field(ge=0, lt=1)]
"""The share of earlier rounds in the statistics of layers."""


class Maker(Protocol):
    """How images are made. ``rates`` are the learning rates by the keys of the forest that is trained in a round."""

    @property
    def rates(self) -> Mapping[str, float]: ...

    def begin(self, seed: int) -> Forest:
        """What is kept from round to round, before the first one."""
        ...

    def opened(self, kept: Forest, rows: int, draws: np.random.Generator) -> Forest:
        """The variables that a round trains, to make ``rows`` images. All leaves are trained."""
        ...

    def images(self, kept: Forest, trained: Forest, y: Tensor) -> Tensor:
        """The images ``[rows, channels, height, width]`` of the classes ``y [rows]``, normalised as the data are."""
        ...

    def losses(self, outputs: Outputs, y: Tensor) -> Mapping[str, Tensor]:
        """The weighted losses of this maker's own, from the teacher's outputs."""
        ...

    def lesson(self, student: Outputs, features: Tensor) -> Tensor | None:
        """A loss that the student has besides the teacher's answers; None if there is none."""
        ...

    def closed(self, kept: Forest, trained: Forest, slopes: Forest) -> Forest:
        """What is kept after a round: from its variables, and from the sum of their gradients over its steps."""
        ...


@dataclass(frozen=True)
class SynthesisSettings:
    """How samples are made.

    There are ``rounds`` rounds of ``steps`` iterations, with ``batch_size`` samples each. The student is trained after
    each round from number ``warm_up`` (counted from 0) on: ``student_steps`` batches of SGD. ``keep_all`` says whether
    the samples of earlier rounds are kept too. ``statistics_momentum`` is the share of earlier rounds in the statistics
    of layers that are compared with the running ones.
    """

    rounds: int
    warm_up: int
    steps: int
    batch_size: int
    cross_entropy: float
    batch_statistics: float
    divergence: float
    student_steps: int
    student_batch: int
    student_lr: float
    student_decay: float
    temperature: float
    keep_all: bool
    statistics_momentum: float = 0.9

    @property
    def samples(self) -> int:
        """The number of samples that are made in all."""
        return self.batch_size * (self.rounds if self.keep_all else self.rounds - self.warm_up)
