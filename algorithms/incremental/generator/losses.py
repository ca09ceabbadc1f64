"""What a generator is trained by without data (MFCL; Babakniya et al., 2023, section 3.1), beside cross-entropy.

Pure functions of tensors, differentiable. How they are weighed and put together is in ``generator.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.interface import Tree

SMALLEST_VARIANCE = 1e-8
"""Added to variances, as in the authors' code, so that a channel that never varies has a finite divergence."""
KERNEL = 5
"""Width of the smoothing kernel in pixels."""

Statistics = Tree | Sequence[tuple[Tensor, Tensor]]
"""Mean and biased variance per channel of some layers: ``LAYER.mean`` and ``LAYER.var``, or a pair for each layer."""


def information_entropy_loss(logits: Tensor) -> Tensor:
    """``(1/q) Σ p̄ log p̄`` of the mean softmax over the batch: lowest, ``-(log q) / q``, where classes are even.

    ``logits [B, q]`` of the q classes to choose from. Equation 2.
    """
    share = logits.softmax(-1).mean(0).clamp(min=torch.finfo(logits.dtype).tiny)
    return (share * share.log()).sum() / logits.shape[-1]


def batch_statistics_loss(running: Statistics, batch: Statistics) -> Tensor:
    """``KL(N(running) ‖ N(batch))`` in nats, the mean over each layer's channels and then over layers.

    Layers go by name in trees, which may have more layers than ``running``, and by place in sequences. ValueError where
    there are none. Equation 3.
    """
    expected, measured = _pairs(running, running), _pairs(batch, running)
    if not expected or len(expected) != len(measured):
        raise ValueError(
            f"statistics of {len(expected)} layers can't be compared with those of {len(measured)}; "
            "give mean and variance of the same layers, one at least"
        )
    layers = [_divergence(*one, *other).mean() for one, other in zip(expected, measured, strict=True)]
    return torch.stack(layers).mean()


def image_prior_loss(images: Tensor) -> Tensor:
    """The mean squared difference between images ``[B, channels, height, width]`` and their smoothed versions.

    The kernel is Gaussian, 5×5 pixels of standard deviation √2, and images are continued by reflection. Equation 4
    writes a sum over all pixels; the mean is the authors' code's, and what its weight is for.
    """
    weights = torch.exp(-(torch.arange(KERNEL, dtype=images.dtype, device=images.device) - KERNEL // 2).square() / 4)
    weights = weights / weights.sum()
    channels = images.shape[1]
    kernel = torch.outer(weights, weights).expand(channels, 1, KERNEL, KERNEL)
    smooth = functional.conv2d(_reflected(_reflected(images, 2), 3), kernel, groups=channels)
    return (images - smooth).square().mean()


def _reflected(images: Tensor, dimension: int) -> Tensor:
    """Continued by half a kernel at both ends. By hand, because torch's own way back adds up in any order on a GPU."""
    half, size = KERNEL // 2, images.shape[dimension]
    before = images.narrow(dimension, 1, half).flip(dimension)
    after = images.narrow(dimension, size - 1 - half, half).flip(dimension)
    return torch.cat([before, images, after], dimension)


def _divergence(mean: Tensor, variance: Tensor, batch_mean: Tensor, batch_variance: Tensor) -> Tensor:
    """``KL(N(mean, variance) ‖ N(batch_mean, batch_variance))``, element by element."""
    variance, batch_variance = variance + SMALLEST_VARIANCE, batch_variance + SMALLEST_VARIANCE
    ratio = (variance + (mean - batch_mean).square()) / batch_variance
    return ((batch_variance / variance).log() + ratio - 1) / 2


def _pairs(statistics: Statistics, layers: Statistics) -> list[tuple[Tensor, Tensor]]:
    """Mean and variance of the layers that ``layers`` has."""
    if not isinstance(statistics, Mapping):
        return list(statistics)
    chosen = layers if isinstance(layers, Mapping) else statistics
    names = [name.removesuffix(".mean") for name in chosen if name.endswith(".mean")]
    lacking = [name for name in names if f"{name}.mean" not in statistics]
    if lacking:
        raise ValueError(f"there are no statistics of the layer {lacking[0]!r}; let the model report them")
    return [(statistics[f"{name}.mean"], statistics[f"{name}.var"]) for name in names]
