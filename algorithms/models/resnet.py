"""ResNet-18 (He et al., 2016) for small images: a 3×3 stem, no max-pooling, and group or batch normalisation.

``stem="7x7"`` is the original for 224 pixels: a 7×7 stem of stride 2, and 3×3 max-pooling of stride 2.

With ``norm="group"`` and ``conv_bias=True`` it has the 11,178,762 parameters of the network that the authors of
re-weighted softmax use on CIFAR-10; without biases it has 11,173,962. Their network ends with a 3×3 average pooling of
stride 2, which ignores a row and a column of the last 4×4 maps. Here the mean is over the whole map.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.interface import Outputs, Tree
from fedemu.algorithms.models.feed_forward import Projection, image_shape, projection_head
from fedemu.algorithms.models.layers import BatchNorm, Convolution, GroupNorm, Linear, batch_statistics
from fedemu.algorithms.trees import only

Norm = Literal["group", "batch"]
Stem = Literal["3x3", "7x7"]
STAGES = 4
BLOCKS_PER_STAGE = 2
GROUPS = 2
"""The number of groups in which ``norm="group"`` normalises channels."""


@dataclass(frozen=True)
class Unit:
    """A convolution and the normalisation of its output."""

    convolution: Convolution
    norm: GroupNorm | BatchNorm


@dataclass(frozen=True)
class Block:
    """Two units and a shortcut around them. The shortcut has its own unit if the shape changes."""

    first: Unit
    second: Unit
    shortcut: Unit | None

    @property
    def units(self) -> tuple[Unit, ...]:
        return (self.first, self.second) if self.shortcut is None else (self.first, self.second, self.shortcut)


@dataclass(frozen=True)
class ResNet:
    """A residual network.

    ``statistics`` says whether ``Outputs.statistics`` holds mean and variance of each normalisation's input. ``pooled``
    says whether max-pooling follows the stem.
    """

    stem: Unit
    blocks: tuple[Block, ...]
    projection: Projection | None
    head: Linear
    statistics: bool = False
    pooled: bool = False
    kind: Literal["convolutional"] = "convolutional"

    @cached_property
    def buffers(self) -> frozenset[str]:
        return frozenset().union(*(unit.norm.buffers for unit in self._units()))

    @property
    def pure(self) -> bool:
        return True

    def init(self, seed: int) -> Tree:
        generator = torch.Generator().manual_seed(seed)
        variables: dict[str, Tensor] = {}
        for unit in self._units():
            variables |= unit.convolution.init(generator) | unit.norm.init(generator)
        if self.projection is not None:
            variables |= self.projection.init(generator)
        return variables | self.head.init(generator)

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        buffers = dict(only(variables, self.buffers))
        statistics: dict[str, Tensor] = {}

        def run(unit: Unit, x: Tensor) -> Tensor:
            x = unit.convolution(variables, x)
            if self.statistics:
                statistics.update(batch_statistics(unit.norm.name, x))
            x, changed = unit.norm(variables, x, train)
            buffers.update(changed)
            return x

        x = run(self.stem, x).relu()
        if self.pooled:
            x = functional.max_pool2d(x, 3, stride=2, padding=1)
        for block in self.blocks:
            shortcut = x if block.shortcut is None else run(block.shortcut, x)
            x = (run(block.second, run(block.first, x).relu()) + shortcut).relu()
        features = x.mean((2, 3))
        if self.projection is not None:
            features = self.projection(variables, features)
        return Outputs(self.head(variables, features), features, statistics), buffers

    def observed(self) -> ResNet:
        """The same network with ``Outputs.statistics``."""
        return replace(self, statistics=True)

    def _units(self) -> Iterator[Unit]:
        yield self.stem
        for block in self.blocks:
            yield from block.units


def resnet18(
    input_shape: tuple[int, ...],
    classes: int,
    norm: Norm = "group",
    conv_bias: bool = False,
    statistics: bool = False,
    width: PositiveInt = 64,
    projection: NonNegativeInt = 0,
    stem: Stem = "3x3",
) -> ResNet:
    """ResNet-18. ``width`` is the number of channels after the stem; it doubles from stage to stage.

    ``projection`` is the width of a projection head before the classifier, as in ``feed_forward.py``; 0 means no head.
    Raises ConfigurationError if samples are not images, or too small.
    """
    large = stem == "7x7"
    channels, _, _ = image_shape("resnet18", input_shape, smallest=32 if large else 8)

    def unit(name: str, inputs: int, outputs: int, kernel: int, stride: int = 1) -> Unit:
        convolution = Convolution(f"{name}.conv", inputs, outputs, kernel, kernel // 2, stride, conv_bias)
        return Unit(
            convolution,
            BatchNorm(f"{name}.norm", outputs) if norm == "batch" else GroupNorm(f"{name}.norm", outputs, GROUPS),
        )

    blocks = []
    inputs = width
    for i in range(STAGES):
        outputs = width * 2**i
        for j in range(BLOCKS_PER_STAGE):
            name, stride = f"layer{i + 1}.{j}", 2 if i > 0 and j == 0 else 1
            changes = stride != 1 or inputs != outputs
            blocks.append(
                Block(
                    unit(f"{name}.first", inputs, outputs, 3, stride),
                    unit(f"{name}.second", outputs, outputs, 3),
                    unit(f"{name}.shortcut", inputs, outputs, 1, stride) if changes else None,
                )
            )
            inputs = outputs
    return ResNet(
        unit("stem", channels, width, 7, 2) if large else unit("stem", channels, width, 3),
        tuple(blocks),
        projection_head(inputs, projection),
        Linear("head", projection or inputs, classes),
        statistics,
        large,
    )
