"""The inner products of the gradients of samples, for parts of the gradients: columns of a leaf, or a linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedemu.algorithms.replay.linear_layers import LinearLayer

_COLUMNS = 2048
"""The number of values per sample that are multiplied at a time, because they are converted to float64 for it."""


class Columns(NamedTuple):
    """The values of a leaf's flat gradient from ``start`` to ``stop``."""

    name: str
    start: int
    stop: int

    @property
    def width(self) -> int:
        """The number of values."""
        return self.stop - self.start


Part = Columns | LinearLayer
"""A part of the gradient of each sample."""


@dataclass(eq=False)
class Kept:
    """The values of a part for all samples: gradients ``[n, width]``, and for a linear layer also its inputs.

    The gradients of a linear layer are those by its output.
    """

    part: Part
    samples: int
    gradients: Tensor | None = None
    inputs: Tensor | None = None

    def store(self, rows: slice, gradients: Tensor, inputs: Tensor | None) -> None:
        """Keep what the part needs of the gradients ``[rows, ...]`` of a block, and of the inputs of its layer."""
        gradients = gradients.flatten(1)
        if isinstance(self.part, Columns):
            gradients = gradients[:, self.part.start : self.part.stop]
        self.gradients = self._stored(self.gradients, rows, gradients)
        if inputs is not None:
            self.inputs = self._stored(self.inputs, rows, inputs.flatten(1))

    def products(self, memory: int) -> Tensor:
        """The part's contribution ``[n, n]`` to the inner products.

        The products of a linear layer are made in pieces of about ``memory`` bytes, each of at least one sample.
        """
        assert self.gradients is not None
        if not isinstance(self.part, LinearLayer):
            return _inner(self.gradients, self.gradients)
        assert self.inputs is not None
        positions = self.part.positions
        left, right = (part.view(self.samples, positions, -1) for part in (self.gradients, self.inputs))
        size = max(1, memory // (3 * 8 * positions**2 * self.samples))
        return torch.cat([_pairs(left, right, first, size) for first in range(0, self.samples, size)])

    def _stored(self, into: Tensor | None, rows: slice, values: Tensor) -> Tensor:
        if into is None:
            into = values.new_empty(self.samples, values.shape[1])
        into[rows] = values
        return into


def _pairs(gradients: Tensor, inputs: Tensor, first: int, size: int) -> Tensor:
    """The products ``[size, n]`` of a layer's gradients, for ``size`` samples from ``first`` on with all samples.

    ``gradients`` and ``inputs`` have the shape ``[n, positions, ...]``.
    """
    by_gradients, by_inputs = (
        _inner(all[first : first + size].flatten(0, 1), all.flatten(0, 1)) for all in (gradients, inputs)
    )
    samples, positions = gradients.shape[:2]
    return by_gradients.mul_(by_inputs).view(-1, positions, samples, positions).sum((1, 3))


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """The inner products ``[a, b]`` of rows of ``[a, width]`` and ``[b, width]``, in float64."""
    total = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
    for first in range(0, left.shape[1], _COLUMNS):
        columns = slice(first, first + _COLUMNS)
        total.addmm_(left[:, columns].double(), right[:, columns].double().t())
    return total
