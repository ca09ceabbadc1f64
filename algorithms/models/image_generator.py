"""Generators of images (MFCL; Babakniya et al., 2023, tables 6 and 7): noise to images, normalised as the data are.

A linear layer turns the noise into small maps. Blocks of doubling (nearest neighbour), 3×3 convolution, batch
normalisation and LeakyReLU enlarge them. A last convolution, tanh and batch normalisation without parameters make
channels of mean 0 and variance 1. The generators for 32, 64 and 224 pixels are the paper's; those for 8 and 28 pixels
are smaller generators of the same kind.

For 64 pixels, table 6 has a batch normalisation of 3 channels after the third block's convolution, which has 64 output
channels; here it has 64. The paper does not give the slope of LeakyReLU; here it is 0.2. It does not give the epsilon
of batch normalisation either; in the authors' code it is 0.8 in the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedemu.algorithms.interface import Kind, Model, Tree
from fedemu.algorithms.models.low_precision import Precision, with_precision
from fedemu.algorithms.models.torch_module import from_module
from fedemu.protocol.errors import ConfigurationError

SLOPE = 0.2
"""The slope of LeakyReLU."""
EPSILON = 1e-5
"""The epsilon of batch normalisation, which torch adds to variances."""
AT_ONCE = 16
"""The number of images that are made at once where many are needed: the layers take 80 times the size of an image."""

NoiseSize = Annotated[int, Field(ge=0, le=65_536)]
"""The number of values of the noise. 0 means the size with which the architecture was published."""
NormEpsilon = Annotated[float, Field(gt=0, le=1e6)]
"""What batch normalisation in the blocks of a generator adds to variances."""


class Architecture(NamedTuple):
    """The layers of a generator: maps of ``start`` pixels and ``widths[0]`` channels, then a block per further width.

    ``noise`` is the number of values of the noise with which the architecture was published.
    """

    noise: int
    start: int
    widths: tuple[int, ...]


ARCHITECTURES = {
    8: Architecture(64, 4, (64, 32)),
    28: Architecture(100, 7, (64, 32, 16)),
    32: Architecture(200, 8, (128, 128, 64)),
    64: Architecture(400, 8, (128, 128, 128, 64)),
    224: Architecture(200, 7, (64, 64, 64, 64, 64, 64)),
}
"""The architectures by the size of the images in pixels."""


@dataclass(frozen=True)
class Generator:
    """A network that makes images ``[batch, channels, size, size]`` from noise ``z [batch, noise]``.

    ``epsilon`` is that of batch normalisation in the blocks. Products are made in ``precision``.
    """

    size: int
    channels: int
    noise: int
    epsilon: float = EPSILON
    precision: Precision = "float32"
    model: Model = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        model = from_module(lambda: _Network(ARCHITECTURES[self.size], self.noise, self.channels, self.epsilon))
        object.__setattr__(self, "model", with_precision(model, self.precision))

    @property
    def kind(self) -> Kind:
        return "convolutional"

    @property
    def idle(self) -> frozenset[str]:
        """The biases that batch normalisation cancels. Their gradients are only rounding errors."""
        return frozenset(f"blocks.{block}.0.bias" for block in range(len(ARCHITECTURES[self.size].widths) - 1))

    def images(self, variables: Tree, z: Tensor) -> Tensor:
        """The images of ``z`` in evaluation mode, in which an image depends only on its own noise."""
        return self.model.apply(variables, z, False)[0].logits


def generator_for(
    input_shape: tuple[int, ...], noise: int = 0, epsilon: float = EPSILON, precision: Precision = "float32"
) -> Generator:
    """The generator for samples of this shape. ``noise`` 0 means the size with which the architecture was published.

    ``epsilon`` is that of batch normalisation in the blocks. Products are made in ``precision``.

    Raises ConfigurationError if samples are not square images of one of the sizes in ``ARCHITECTURES``.
    """
    sizes = set(input_shape[1:])
    if len(input_shape) != 3 or len(sizes) != 1 or sizes - ARCHITECTURES.keys():
        raise ConfigurationError(
            f"there is no generator for samples of the shape {input_shape}; there are generators for square images of "
            f"{', '.join(map(str, ARCHITECTURES))} pixels: choose such data, or a method without a generator"
        )
    channels, size, _ = input_shape
    return Generator(size, channels, noise or ARCHITECTURES[size].noise, epsilon, precision)


def samples_of_equal_memory(generator: Generator) -> int:
    """The number of samples that take as much memory as the generator's variables: a byte per value and per label."""
    variables = generator.model.init(0)
    memory = sum(leaf.numel() * leaf.element_size() for leaf in variables.values())
    return memory // (generator.channels * generator.size**2 + 1)


class _Network(nn.Module):
    def __init__(self, architecture: Architecture, noise: int, channels: int, epsilon: float) -> None:
        super().__init__()
        first, last = architecture.widths[0], architecture.widths[-1]
        self.shape = (first, architecture.start, architecture.start)
        self.project = nn.Linear(noise, first * architecture.start**2)
        self.norm = nn.BatchNorm2d(first)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                _Doubling(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs, epsilon), nn.LeakyReLU(SLOPE)
            )
            for inputs, outputs in zip(architecture.widths, architecture.widths[1:], strict=False)
        )
        self.image = nn.Conv2d(last, channels, 3, padding=1)
        self.scale = nn.BatchNorm2d(channels, affine=False)

    def forward(self, z: Tensor) -> Tensor:
        x: Tensor = self.norm(self.project(z).view(-1, *self.shape))
        for block in self.blocks:
            x = block(x)
        images: Tensor = self.scale(self.image(x).tanh())
        return images


class _Doubling(nn.Conv2d):
    """A 3×3 convolution, padded by 1, of images doubled by nearest-neighbour interpolation, without these images.

    In a doubled image, two of the three pixels in a row under the kernel are the same pixel. So each of the four kinds
    of output pixels, by even or odd row and column, is a 2×2 convolution of the small image. Its kernel has sums in
    place of such pairs. This needs 16 products instead of 36, and half the time for wide layers.
    """

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        kernels = torch.cat([kernel for rows in _halves(self.weight, 2) for kernel in _halves(rows, 3)])
        assert self.bias is not None
        made = functional.conv2d(x, kernels, self.bias.repeat(4), padding=1)
        made = made.view(-1, 2, 2, self.out_channels, height + 1, width + 1)
        # Even rows begin one small row earlier than odd ones, and so do columns.
        kinds = [torch.stack([made[:, i, j, :, i : i + height, j : j + width] for j in (0, 1)], -1) for i in (0, 1)]
        return torch.stack(kinds, -3).flatten(-2).flatten(-3, -2)


def _halves(weight: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    """The kernel's three rows or columns as two, for pixels of the small image: at even places, and at odd places."""
    first, second, third = weight.unbind(dimension)
    return torch.stack([first, second + third], dimension), torch.stack([first + second, third], dimension)
