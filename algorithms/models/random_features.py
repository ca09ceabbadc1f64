"""Random features: one hidden layer that is drawn once and never trained, below a linear classifier.

The hidden layer is frozen: it is drawn from a fixed seed, alike on every machine, and never travels. It is saved beside
the final model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from fedemu.algorithms.interface import Kind, Outputs, Tree
from fedemu.algorithms.models.layers import Linear


@dataclass(frozen=True, eq=False)
class RandomFeatures:
    """``relu(W x + b)``, or ``sqrt(2 / width) · cos(W x + b)`` with ``fourier``, and a linear layer on top.

    Samples x are flattened to ``[batch, inputs]``. Entries of W are normal with the standard deviation
    ``scale / sqrt(inputs)``; b is standard normal, or uniform on [0, 2π) with ``fourier``. The product of two rows of
    Fourier features approximates ``exp(-scale² ‖x - x'‖² / (2 inputs))`` (Rahimi and Recht, "Random Features for
    Large-Scale Kernel Machines", 2007).
    """

    weight: Tensor
    """W transposed, ``[inputs, width]``."""
    bias: Tensor
    fourier: bool
    head: Linear

    kind: ClassVar[Kind] = "dense"
    buffers: ClassVar[frozenset[str]] = frozenset()

    @property
    def frozen(self) -> Tree:
        return {"hidden.weight": self.weight, "hidden.bias": self.bias}

    def init(self, seed: int) -> Tree:
        return self.head.init(torch.Generator().manual_seed(seed))

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        hidden = x.flatten(1) @ self.weight.to(x.device, x.dtype) + self.bias.to(x.device, x.dtype)
        features = math.sqrt(2 / hidden.shape[1]) * hidden.cos() if self.fourier else hidden.relu()
        return Outputs(self.head(variables, features), features, {}), {}


def random_features(
    input_shape: tuple[int, ...],
    classes: int,
    width: PositiveInt = 512,
    features: Literal["relu", "fourier"] = "relu",
    scale: PositiveFloat = 1.0,
    seed: NonNegativeInt = 0,
) -> RandomFeatures:
    """A linear classifier on ``width`` random features of a sample, drawn from ``seed``."""
    inputs, generator = prod(input_shape), torch.Generator().manual_seed(seed)
    weight = torch.randn(inputs, width, generator=generator) * (scale / math.sqrt(inputs))
    fourier = features == "fourier"
    drawn = torch.rand if fourier else torch.randn
    bias = drawn(width, generator=generator) * (2 * math.pi if fourier else 1)
    return RandomFeatures(weight, bias, fourier, Linear("head", width, classes))
