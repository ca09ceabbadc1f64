"""Anchors of classes, and a model that maps its features to their space (LANDER).

The authors' anchors are embeddings of the classes' names by a pre-trained language model. None comes with fedemu, so
the built-in anchors are orthonormal directions: the same in every run, with nothing in them of what classes mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fedemu.algorithms.interface import Model, Outputs, Tree
from fedemu.algorithms.models.around import ModelAround, extended, stripped
from fedemu.algorithms.models.layers import uniform
from fedemu.algorithms.models.torch_module import under_seed
from fedemu.algorithms.trees import without
from fedemu.protocol import seeds
from fedemu.protocol.code.named import load
from fedemu.protocol.errors import ConfigurationError

ORTHONORMAL: Final = "orthonormal"
"""The name of the built-in anchors."""
WEIGHT, BIAS = "mapping.weight", "mapping.bias"
"""The names of the linear layer from features to the space of anchors."""
MAPPING: Final = frozenset({WEIGHT, BIAS})


@dataclass(frozen=True, eq=False)
class Mapped(ModelAround):
    """The model with ``Outputs.features`` mapped to ``width`` values by a linear layer. Logits stay as they are.

    ``features`` is the width of the model's own features, which its classifier reads.
    """

    model: Model
    features: int
    width: int

    def init(self, seed: int) -> Tree:
        return self._mapped(self.model.init(seed), seed)

    def begun(self, variables: Tree, seed: int) -> Tree:
        return self._mapped(extended(self.model, variables, seed), seed)

    def stripped(self, variables: Tree) -> Tree:
        return stripped(self.model, unmapped(variables))

    def _mapped(self, variables: Tree, seed: int) -> Tree:
        """The model's variables with a new linear layer, drawn as torch draws one."""
        draws = torch.Generator().manual_seed(seeds.integer(seed, purpose="mapping"))
        weight = uniform((self.width, self.features), self.features, draws)
        return {**variables, WEIGHT: weight, BIAS: uniform((self.width,), self.features, draws)}

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        outputs, buffers = self.model.apply(unmapped(variables), x, train)
        mapped = outputs.features @ variables[WEIGHT].t() + variables[BIAS]
        return outputs._replace(features=mapped), buffers


def unmapped(variables: Tree) -> Tree:
    """The variables without the linear layer of a ``Mapped`` model."""
    return without(variables, MAPPING)


def anchors_of(name: str, classes: int, width: int, scale: float) -> Tensor:
    """The anchors ``[classes, width]`` float32.

    ``orthonormal`` are directions at right angles, or random directions if there are more classes than ``width``; the
    mean square of their values is ``scale²``. Any other name is a function ``module:Name`` of (classes, width), whose
    array is taken as it is. Raises ConfigurationError if there is none, or if its array has another shape.
    """
    if name != ORTHONORMAL:
        return _own(name, classes, width)
    drawn = seeds.generator(0, purpose="anchors").standard_normal((width, classes))
    rows = np.linalg.qr(drawn)[0].T if classes <= width else (drawn / np.linalg.norm(drawn, axis=0)).T
    return torch.from_numpy(np.ascontiguousarray(rows) * scale * width**0.5).float()


def _own(name: str, classes: int, width: int) -> Tensor:
    if ":" not in name:
        raise ConfigurationError(
            f"algorithm.options.anchors = {name!r} is not {ORTHONORMAL!r}, and your own are named module:Name"
        )
    make: Callable[[int, int], Any] = under_seed(lambda: load(name), 0)
    array = np.asarray(make(classes, width), dtype=np.float32)
    if array.shape != (classes, width) or not np.isfinite(array).all():
        raise ConfigurationError(
            f"algorithm.options.anchors = {name!r} gives an array {list(array.shape)}; it must be "
            f"[{classes}, {width}] (classes, algorithm.options.anchor_width) and finite"
        )
    return torch.from_numpy(array)
