"""Small networks without normalisation layers: a perceptron, FedNTD's two-convolution CNN, and LeNet-5."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.interface import Outputs, Tree
from fedemu.algorithms.layers import Convolution, Linear
from fedemu.protocol.errors import ConfigurationError


@dataclass(frozen=True)
class FeedForward:
    """Convolutions, each followed by ReLU and 2×2 max-pooling, then linear layers with ReLU in between."""

    convolutions: tuple[Convolution, ...]
    linears: tuple[Linear, ...]
    buffers: frozenset[str] = frozenset()

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
        return variables

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        for convolution in self.convolutions:
            # ReLU and maximum commute, and after pooling there is a quarter to do.
            x = functional.max_pool2d(convolution(variables, x), 2).relu()
        if x.dim() > 2:
            x = x.flatten(1)
        for linear in self.linears[:-1]:
            x = linear(variables, x).relu()
        return Outputs(self.linears[-1](variables, x), x, {}), {}


def mlp(input_shape: tuple[int, ...], classes: int, hidden: tuple[PositiveInt, ...] = (64,)) -> FeedForward:
    """A perceptron with ReLU; samples of any shape are flattened."""
    return FeedForward((), _chain(prod(input_shape), hidden, classes))


def cnn(input_shape: tuple[int, ...], classes: int) -> FeedForward:
    """The CNN of McMahan et al. (2017) as FedNTD uses it: 5×5 convolutions of 32 and 64 channels, 512 hidden units."""
    channels, height, width = image_shape("cnn", input_shape, smallest=4)
    convolutions = (Convolution("conv1", channels, 32, 5, padding=2), Convolution("conv2", 32, 64, 5, padding=2))
    return FeedForward(convolutions, _chain(64 * (height // 4) * (width // 4), (512,), classes))


def lenet(input_shape: tuple[int, ...], classes: int) -> FeedForward:
    """LeNet-5 with ReLU and max-pooling. Images below 32 pixels are padded by 2 first, as is usual for MNIST."""
    channels, height, width = image_shape("lenet", input_shape, smallest=12)
    padding = 2 if min(height, width) < 32 else 0
    convolutions = (Convolution("conv1", channels, 6, 5, padding=padding), Convolution("conv2", 6, 16, 5))
    sides = [((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, width)]
    return FeedForward(convolutions, _chain(16 * prod(sides), (120, 84), classes))


def image_shape(model: str, input_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Channels, height and width; raises ConfigurationError where samples are no images, or too small ones."""
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


def _chain(inputs: int, hidden: tuple[int, ...], classes: int) -> tuple[Linear, ...]:
    widths = (inputs, *hidden, classes)
    return tuple(Linear(f"fc{i + 1}", widths[i], widths[i + 1]) for i in range(len(widths) - 1))
