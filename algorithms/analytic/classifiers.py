"""Linear classifiers that follow from sums of features: nearest class means, and ridge regression.

All functions are pure, in float64. Sums are of the form that ``sums.Summed`` describes, over ``[batch]`` samples.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fedemu.algorithms.analytic.sums import Summed
from fedemu.algorithms.interface import Outputs, Tree
from fedemu.protocol.errors import ConfigurationError

UNKNOWN: Final = -1e4
"""What a class of which no sample has been counted gets beyond the mean of the others. It is finite, as losses need."""


def class_sums(classes: int, normalised: bool) -> Summed:
    """Sums for class means: ``features [classes, width]`` and ``counts [classes]``.

    With ``normalised`` each sample's features are first scaled to norm 1; zeros stay zeros.
    """

    def summed(outputs: Outputs, labels: Tensor, weight: Tensor) -> Tree:
        features = outputs.features.double()
        rows = unit(features) if normalised else features
        member = (torch.arange(classes, device=labels.device)[:, None] == labels) * weight
        return {"features": member @ rows, "counts": member.sum(1)}

    return summed


def products(classes: int, constant: bool) -> Summed:
    """Sums for regression: ``gram [width, width]`` = X^T X and ``targets [width, classes]`` = X^T Y, Y one-hot.

    With ``constant`` X gets a last column of ones, for the bias, and the width grows by 1. ``counts [classes]`` are
    the numbers of samples.
    """

    def summed(outputs: Outputs, labels: Tensor, weight: Tensor) -> Tree:
        features = outputs.features.double()
        rows = torch.cat([features, torch.ones_like(features[:, :1])], 1) if constant else features
        weighted = rows * weight[:, None]
        member = (labels[:, None] == torch.arange(classes, device=labels.device)).to(rows.dtype)
        return {"gram": weighted.t() @ rows, "targets": weighted.t() @ member, "counts": weight @ member}

    return summed


def answers_by_class(classes: int) -> Summed:
    """Sums for accuracies by class: ``right [classes]`` of the samples that are answered correctly, and ``counts``."""

    def summed(outputs: Outputs, labels: Tensor, weight: Tensor) -> Tree:
        member = (torch.arange(classes, device=labels.device)[:, None] == labels) * weight
        return {"right": (member * (outputs.logits.argmax(-1) == labels)).sum(1), "counts": member.sum(1)}

    return summed


def nearest_means(sums: Tree, normalised: bool) -> tuple[Tensor, Tensor]:
    """Weight ``[classes, width]`` and bias ``[classes]`` of the classifier that names the nearest class mean.

    By Euclidean distance ``argmin_c ‖f - m_c‖² = argmax_c m_c·f - ‖m_c‖²/2``. With ``normalised`` means are scaled to
    norm 1, so that the bias is the same for all classes and is left out: the answer is the same for features of any
    norm, so features need not be normalised. A class of no counted sample has the mean of the other weights, and that
    of their biases and ``UNKNOWN`` more. So it is never the answer, whatever the features: the mean of some numbers is
    not above the largest.
    """
    means = sums["features"] / sums["counts"].clamp(min=1)[:, None]
    if normalised:
        means = unit(means)
        bias = torch.zeros_like(sums["counts"])
    else:
        bias = -means.square().sum(1) / 2
    known = sums["counts"] > 0
    classes = known.sum().clamp(min=1)
    means = torch.where(known[:, None], means, means.sum(0) / classes)
    return means, torch.where(known, bias, bias.sum() / classes + UNKNOWN)


def ridge_regression(sums: Tree, ridge: float, constant: bool) -> tuple[Tensor, Tensor]:
    """Weight ``[classes, width]`` and bias ``[classes]`` of ``argmin_W ‖X W - Y‖² + ridge ‖W‖²``.

    The solution is ``(X^T X + ridge I)^-1 X^T Y``. With ``constant`` its last row is the bias, which counts in the
    penalty like the weights; otherwise the bias is 0. A class of no counted sample has zeros. Raises ConfigurationError
    if ``ridge`` is so small beside the sums that rounding leaves no inverse, or if these are no sums of features.
    """
    gram = sums["gram"] + ridge * torch.eye(len(sums["gram"]), dtype=torch.float64)
    factor, failed = torch.linalg.cholesky_ex(gram)
    if failed:
        raise ConfigurationError(
            f"algorithm.options.ridge = {ridge:g} is so small beside the features of this model that rounding leaves "
            "the regression no solution, or a device has sent what no features add up to; raise ridge, or go on "
            "without that device"
        )
    solution = torch.cholesky_solve(sums["targets"], factor).t()
    if constant:
        return solution[:, :-1], solution[:, -1]
    return solution, torch.zeros(len(solution), dtype=torch.float64)


def unit(rows: Tensor) -> Tensor:
    """The rows scaled to norm 1. A row of zeros stays zero."""
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows / torch.where(norms > 0, norms, 1)
