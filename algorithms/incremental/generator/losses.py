"""The losses of a generator that is trained without data, besides cross-entropy (equations 2 to 4 of MFCL).

Babakniya et al., 2023, section 3.1. All are pure and differentiable functions of tensors. ``training.py`` weighs them
and adds them up.
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
"""The width of the smoothing kernel in pixels."""

Statistics = Tree | Sequence[tuple[Tensor, Tensor]]
"""The mean and the biased variance per channel of layers: ``LAYER.mean`` and ``LAYER.var``, or a pair per layer."""


def information_entropy_loss(logits: Tensor) -> Tensor:
    """The diversity loss ``(1/q) Σ p̄ log p̄``, where ``p̄`` is the mean softmax over the batch. MFCL, equation 2.

    ``logits [B, q]`` are those of the q classes to choose from. The loss is lowest, ``-(log q) / q``, if all classes
    are equally frequent.
    """
    share = logits.softmax(-1).mean(0).clamp(min=torch.finfo(logits.dtype).tiny)
    return (share * share.log()).sum() / logits.shape[-1]


def batch_statistics_loss(running: Statistics, batch: Statistics) -> Tensor:
    """The divergence ``KL(N(running) ‖ N(batch))`` in nats, as a mean over channels and then over layers.

    Trees match layers by name, and ``batch`` may have more layers than ``running``. Sequences match them by place.
    Raises ValueError if there is no layer, or if the layers do not match. MFCL, equation 3.
    """
    expected, measured = _pairs(running, running), _pairs(batch, running)
    if not expected or len(expected) != len(measured):
        raise ValueError(
            f"statistics of {len(expected)} layers cannot be compared with those of {len(measured)}; "
            "give the mean and the variance of the same layers, and of at least one"
        )
    layers = [_divergence(*one, *other).mean() for one, other in zip(expected, measured, strict=True)]
    return torch.stack(layers).mean()


def image_prior_loss(images: Tensor) -> Tensor:
    """The mean squared difference between images ``[B, channels, height, width]`` and their smoothed versions.

    The kernel is Gaussian, 5×5 pixels with a standard deviation of √2, and images are continued by reflection. MFCL,
    equation 4, is a sum over all pixels. The authors' code takes the mean, and the published weight belongs to it.
    """
    weights = torch.exp(-(torch.arange(KERNEL, dtype=images.dtype, device=images.device) - KERNEL // 2).square() / 4)
    weights = weights / weights.sum()
    channels = images.shape[1]
    kernel = torch.outer(weights, weights).expand(channels, 1, KERNEL, KERNEL)
    smooth = functional.conv2d(_reflected(_reflected(images, 2), 3), kernel, groups=channels)
    return (images - smooth).square().mean()


def _reflected(images: Tensor, dimension: int) -> Tensor:
    """The images, continued by half a kernel at both ends of a dimension.

    torch's own padding is not used, because on a GPU its gradient adds up in any order.
    """
    half, size = KERNEL // 2, images.shape[dimension]
    before = images.narrow(dimension, 1, half).flip(dimension)
    after = images.narrow(dimension, size - 1 - half, half).flip(dimension)
    return torch.cat([before, images, after], dimension)


def _divergence(mean: Tensor, variance: Tensor, batch_mean: Tensor, batch_variance: Tensor) -> Tensor:
    """The divergence ``KL(N(mean, variance) ‖ N(batch_mean, batch_variance))``, element by element."""
    variance, batch_variance = variance + SMALLEST_VARIANCE, batch_variance + SMALLEST_VARIANCE
    ratio = (variance + (mean - batch_mean).square()) / batch_variance
    return ((batch_variance / variance).log() + ratio - 1) / 2


def _pairs(statistics: Statistics, layers: Statistics) -> list[tuple[Tensor, Tensor]]:
    """The mean and the variance of each layer that ``layers`` has."""
    if not isinstance(statistics, Mapping):
        return list(statistics)
    chosen = layers if isinstance(layers, Mapping) else statistics
    names = [name.removesuffix(".mean") for name in chosen if name.endswith(".mean")]
    lacking = [name for name in names if f"{name}.mean" not in statistics]
    if lacking:
        raise ValueError(f"there are no statistics of the layer {lacking[0]!r}; use a model that reports them")
    return [(statistics[f"{name}.mean"], statistics[f"{name}.var"]) for name in names]
