"""Small networks without normalisation layers: a perceptron, FedNTD's two-convolution CNN, and LeNet-5.

All have the option ``projection``: the width of a projection head before the classifier, as MOON's authors use it (256
there; 0 for no head, as in FedNTD's comparison). The features of a model with such a head are the head's output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.interface import Outputs, Tree
from fedemu.algorithms.models.layers import Convolution, Linear, batch_statistics
from fedemu.protocol.errors import ConfigurationError


@dataclass(frozen=True)
class Projection:
    """Two linear layers with ReLU between them, and none after them: ``[batch, inputs]`` to ``[batch, outputs]``."""

    hidden: Linear
    output: Linear

    def init(self, generator: torch.Generator) -> dict[str, Tensor]:
        return self.hidden.init(generator) | self.output.init(generator)

    def __call__(self, variables: Tree, x: Tensor) -> Tensor:
        return self.output(variables, self.hidden(variables, x).relu())


def projection_head(inputs: int, outputs: int) -> Projection | None:
    """A hidden layer as wide as its input, then a layer of ``outputs``. None if ``outputs`` is 0."""
    if not outputs:
        return None
    return Projection(Linear("projection.hidden", inputs, inputs), Linear("projection.output", inputs, outputs))


@dataclass(frozen=True)
class FeedForward:
    """Convolutions, each followed by ReLU and 2×2 max-pooling, then linear layers with ReLU, then the classifier.

    ``statistics`` says whether ``Outputs.statistics`` holds mean and variance of each layer's output before ReLU.
    """

    convolutions: tuple[Convolution, ...]
    linears: tuple[Linear, ...]
    projection: Projection | None
    head: Linear
    buffers: frozenset[str] = frozenset()
    statistics: bool = False

    @property
    def pure(self) -> bool:
        return True

    @property
    def kind(self) -> Literal["dense", "convolutional"]:
        return "convolutional" if self.convolutions else "dense"

    def init(self, seed: int) -> Tree:
        generator = torch.Generator().manual_seed(seed)
        variables: dict[str, Tensor] = {}
        for convolution in self.convolutions:
            variables |= convolution.init(generator)
        for linear in self.linears:
            variables |= linear.init(generator)
        if self.projection is not None:
            variables |= self.projection.init(generator)
        return variables | self.head.init(generator)

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        statistics: dict[str, Tensor] = {}

        def run(layer: Convolution | Linear, x: Tensor) -> Tensor:
            x = layer(variables, x)
            if self.statistics:
                statistics.update(batch_statistics(layer.name, x))
            return x

        for convolution in self.convolutions:
            # ReLU and maximum commute, and after pooling there is a quarter of the values.
            x = functional.max_pool2d(run(convolution, x), 2).relu()
        if x.dim() > 2:
            x = x.flatten(1)
        for linear in self.linears:
            x = run(linear, x).relu()
        if self.projection is not None:
            x = self.projection(variables, x)
        return Outputs(self.head(variables, x), x, statistics), {}

    def observed(self) -> FeedForward:
        """The same network with ``Outputs.statistics``."""
        return replace(self, statistics=True)


def mlp(
    input_shape: tuple[int, ...], classes: int, hidden: tuple[PositiveInt, ...] = (64,), projection: NonNegativeInt = 0
) -> FeedForward:
    """A perceptron with ReLU. Samples of any shape are flattened."""
    return _feed_forward((), prod(input_shape), hidden, projection, classes)


def cnn(input_shape: tuple[int, ...], classes: int, projection: NonNegativeInt = 0) -> FeedForward:
    """The CNN of McMahan et al. (2017) as FedNTD uses it: 5×5 convolutions of 32 and 64 channels, 512 hidden units."""
    channels, height, width = image_shape("cnn", input_shape, smallest=4)
    convolutions = (Convolution("conv1", channels, 32, 5, padding=2), Convolution("conv2", 32, 64, 5, padding=2))
    return _feed_forward(convolutions, 64 * (height // 4) * (width // 4), (512,), projection, classes)


def lenet(input_shape: tuple[int, ...], classes: int, projection: NonNegativeInt = 0) -> FeedForward:
    """LeNet-5 with ReLU and max-pooling. Images below 32 pixels are first padded by 2, as is usual for MNIST.

    In the code for re-weighted softmax, the network of this name also pads its second convolution. So that network does
    not fit the 32×32 pixels of CIFAR-10, for which the paper reports results; this one fits.
    """
    channels, height, width = image_shape("lenet", input_shape, smallest=12)
    padding = 2 if min(height, width) < 32 else 0
    convolutions = (Convolution("conv1", channels, 6, 5, padding=padding), Convolution("conv2", 6, 16, 5))
    sides = [((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, width)]
    return _feed_forward(convolutions, 16 * prod(sides), (120, 84), projection, classes)


def image_shape(model: str, input_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Channels, height and width. Raises ConfigurationError if samples are not images, or too small."""
    if len(input_shape) != 3:
        raise ConfigurationError(
            f"model {model!r} needs images, but a sample has the shape {input_shape}; choose model 'mlp'"
        )
    channels, height, width = input_shape
    if min(height, width) < smallest:
        raise ConfigurationError(
            f"model {model!r} needs images of at least {smallest}×{smallest} pixels, not {height}×{width}; "
            "choose model 'mlp'"
        )
    return channels, height, width


def _feed_forward(
    convolutions: tuple[Convolution, ...], inputs: int, hidden: tuple[int, ...], projection: int, classes: int
) -> FeedForward:
    """The network with these layers. ``inputs`` is the number of values per sample after the convolutions."""
    widths = (inputs, *hidden)
    linears = tuple(Linear(f"fc{i + 1}", widths[i], widths[i + 1]) for i in range(len(hidden)))
    head = Linear(f"fc{len(widths)}", projection or widths[-1], classes)
    return FeedForward(convolutions, linears, projection_head(widths[-1], projection), head)
