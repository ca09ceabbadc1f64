"""The building blocks of models. Each draws its leaves as torch does by default, and applies them.

All are pure functions of tensors, which run alone, under ``torch.func.grad`` and under ``torch.func.vmap``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional

from fedemu.algorithms.interface import Tree
from fedemu.algorithms.models import spectral, unfolded

BATCH_NORM_MOMENTUM = 0.1
"""The share of the newest batch in the running statistics, as in torch."""


def uniform(shape: Sequence[int], fan_in: int, generator: Generator) -> Tensor:
    """A draw from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), as torch draws the leaves of linear and other layers."""
    bound = 1 / math.sqrt(fan_in)
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


@dataclass(frozen=True)
class Linear:
    """A linear layer: ``x [..., inputs]`` to ``[..., outputs]``."""

    name: str
    inputs: int
    outputs: int

    def init(self, generator: Generator) -> dict[str, Tensor]:
        return {
            f"{self.name}.weight": uniform((self.outputs, self.inputs), self.inputs, generator),
            f"{self.name}.bias": uniform((self.outputs,), self.inputs, generator),
        }

    def __call__(self, variables: Tree, x: Tensor) -> Tensor:
        return x @ variables[f"{self.name}.weight"].t() + variables[f"{self.name}.bias"]


_FEW_INPUTS = 16
"""The channels of a block of oneDNN: 8 with AVX2, 16 with AVX-512."""


@dataclass(frozen=True)
class Convolution:
    """A convolution of ``x [batch, inputs, height, width]`` with a square kernel."""

    name: str
    inputs: int
    outputs: int
    kernel: int
    padding: int = 0
    stride: int = 1
    bias: bool = True

    def init(self, generator: Generator) -> dict[str, Tensor]:
        fan_in = self.inputs * self.kernel**2
        shape = (self.outputs, self.inputs, self.kernel, self.kernel)
        leaves = {f"{self.name}.weight": uniform(shape, fan_in, generator)}
        if self.bias:
            leaves[f"{self.name}.bias"] = uniform((self.outputs,), fan_in, generator)
        return leaves

    def __call__(self, variables: Tree, x: Tensor) -> Tensor:
        weight, bias = variables[f"{self.name}.weight"], variables.get(f"{self.name}.bias")
        stride = self.stride
        if unfolded.suits(x, weight, stride, self.padding):
            products = unfolded.convolve(x, weight, stride, self.padding)
            return products if bias is None else products + bias.to(products.dtype)[:, None, None]
        if self.kernel == 1 and self.padding == 0 and self.inputs < _FEW_INPUTS:
            # oneDNN writes beyond its memory in the gradient of a convolution that strides over few channels, if these
            # come last: with AVX2 in any case, with AVX-512 in two threads. Its samples alone give the same.
            x, stride = x[:, :, ::stride, ::stride], 1
        return spectral.conv2d(x, weight, bias, stride, self.padding)


@dataclass(frozen=True)
class GroupNorm:
    """Group normalisation with a weight and a bias per channel, of ``[batch, channels, height, width]``."""

    name: str
    channels: int
    groups: int
    epsilon: float = 1e-5

    @property
    def buffers(self) -> frozenset[str]:
        return frozenset()

    def init(self, generator: Generator) -> dict[str, Tensor]:
        return {f"{self.name}.weight": torch.ones(self.channels), f"{self.name}.bias": torch.zeros(self.channels)}

    def __call__(self, variables: Tree, x: Tensor, train: bool) -> tuple[Tensor, Tree]:
        weight, bias = variables[f"{self.name}.weight"], variables[f"{self.name}.bias"]
        return functional.group_norm(x, self.groups, weight, bias, self.epsilon), {}


@dataclass(frozen=True)
class BatchNorm:
    """Batch normalisation: by the batch in training, by running statistics in evaluation.

    A call returns the output and the next running statistics. Padding rows count like others in a batch's statistics.
    They repeat samples of the same batch, so they change the weights of its samples, but add no foreign data.
    """

    name: str
    channels: int
    epsilon: float = 1e-5

    @property
    def buffers(self) -> frozenset[str]:
        return frozenset({f"{self.name}.running_mean", f"{self.name}.running_var"})

    def init(self, generator: Generator) -> dict[str, Tensor]:
        return {
            f"{self.name}.weight": torch.ones(self.channels),
            f"{self.name}.bias": torch.zeros(self.channels),
            f"{self.name}.running_mean": torch.zeros(self.channels),
            f"{self.name}.running_var": torch.ones(self.channels),
        }

    def __call__(self, variables: Tree, x: Tensor, train: bool) -> tuple[Tensor, Tree]:
        weight, bias = variables[f"{self.name}.weight"], variables[f"{self.name}.bias"]
        mean, variance = variables[f"{self.name}.running_mean"], variables[f"{self.name}.running_var"]
        if not train:
            factor = weight * torch.rsqrt(variance + self.epsilon)
            shift = bias - mean * factor
            return x * factor[:, None, None] + shift[:, None, None], {}
        # Under bfloat16 a convolution gives values of lower precision than the running statistics have.
        x = x.to(mean.dtype)
        normalised = functional.batch_norm(x, None, None, weight, bias, True, 0.0, self.epsilon)
        batch_variance, batch_mean = torch.var_mean(x.detach(), (0, 2, 3), correction=1)
        return normalised, {
            f"{self.name}.running_mean": torch.lerp(mean, batch_mean, BATCH_NORM_MOMENTUM),
            f"{self.name}.running_var": torch.lerp(variance, batch_variance, BATCH_NORM_MOMENTUM),
        }


def batch_statistics(name: str, x: Tensor) -> Tree:
    """``name.mean`` and the biased ``name.var``, each ``[channels]``, of ``x [batch, channels, ...]``."""
    variance, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    return {f"{name}.mean": mean, f"{name}.var": variance}
