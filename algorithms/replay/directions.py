"""The directions of the gradients of single samples. A device selects by their inner products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from fedemu.algorithms.interface import Tree
from fedemu.algorithms.replay.sample_gradients import SampleGradients
from fedemu.algorithms.replay.selection.candidates import Floats

LEAST: Final = float(np.finfo(np.float32).tiny)
"""The smallest normal float32. Of a smaller norm the inverse may be too large for the gradients that it scales.

A model that is sure of a sample by more than about 87 nats has such a gradient, of which rounding has left little.
"""


@dataclass(frozen=True, eq=False)
class Directions:
    """The matrix ``G`` whose columns are the directions ``g_i / ‖g_i‖`` of the gradients.

    A gradient whose norm is below LEAST has the direction 0. ``gram [n, n]`` is ``GᵀG``, and ``scales [n]`` holds
    ``1 / ‖g_i‖``, or 0.
    """

    gradients: SampleGradients
    gram: Floats
    scales: Floats

    @classmethod
    def of(cls, gradients: SampleGradients) -> Directions:
        """The directions of these gradients; their Gram matrix is computed at once."""
        gram = gradients.gram()
        norms = np.sqrt(np.diagonal(gram))
        scales = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms >= LEAST)
        return cls(gradients, gram * scales[:, None] * scales, scales)

    def weighted_sum(self, x: ArrayLike) -> dict[str, Tensor]:
        """The sum ``G x`` over the trained leaves, for ``x [n]``."""
        return self.gradients.weighted_sum(np.asarray(x, dtype=np.float64) * self.scales)

    def products(self, direction: Tree) -> Floats:
        """The products ``Gᵀ h``, ``[n]``, for ``h`` over the trained leaves."""
        return self.gradients.products(direction) * self.scales
