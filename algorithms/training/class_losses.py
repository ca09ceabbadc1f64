"""Losses over some of the classes, for devices that learn new classes without data of the old ones.

They are those of MFCL (Babakniya et al., 2023, section 3.2) and of methods like it. All are pure functions of tensors,
differentiable, and usable under ``vmap``. Each is a mean over a batch: an even mean, or one that is weighted by
``weight [B]``, where 0 marks padding. A batch of padding has the loss 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedemu.algorithms.training.losses import true_class


def new_class_cross_entropy(
    logits: Tensor, targets: Tensor, first_new_class: int | Tensor, weight: Tensor | None = None
) -> Tensor:
    """Cross-entropy in nats over the rows whose class is new, by the logits of new classes only. 0 if no row is.

    ``logits [B, C]`` and ``targets [B]`` number the classes in the order in which they came; classes from
    ``first_new_class`` on are new. MFCL, equation 6.
    """
    new = torch.arange(logits.shape[-1], device=logits.device) >= first_new_class
    return cross_entropy_among(logits, targets, new, weight)


def cross_entropy_among(logits: Tensor, targets: Tensor, classes: Tensor, weight: Tensor | None = None) -> Tensor:
    """Cross-entropy in nats over the rows whose class is one of ``classes [C]`` (bool), by the logits of these only.

    ``logits [B, C]``, ``targets [B]``. The result is 0 if there are no such rows.
    """
    likelihoods = torch.where(classes, logits, -torch.inf).log_softmax(-1)
    chosen = true_class(logits, targets) & classes
    rows = chosen.any(-1).to(logits.dtype)
    return -_mean(torch.where(chosen, likelihoods, 0).sum(-1), rows if weight is None else rows * weight)


def task_temperature_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    old: Tensor,
    new: Tensor,
    weight: Tensor | None = None,
    *,
    temperatures: tuple[float, float] = (0.9, 1.1),
    weights: tuple[float, float] = (1.1, 0.9),
) -> Tensor:
    """Cross-entropy in nats with a temperature and a weight for ``old [C]`` and for ``new [C]`` classes (bool).

    The logits of old and new classes are divided by the two ``temperatures``, and make one softmax. The mean over the
    rows of old classes times the first of the ``weights`` is added to that over the rows of new classes times the
    second. Without old classes it is plain cross-entropy. Rows and logits of other classes count for nothing. The
    values are the best that the paper found on CIFAR-100. FedCBDR (Qi et al., 2025), equations 7 to 9 and section 5.6.
    """
    both = old | new
    begun = old.any()
    scaled = torch.where(old, logits / temperatures[0], logits / temperatures[1])
    likelihoods = torch.where(both, torch.where(begun, scaled, logits), -torch.inf).log_softmax(-1)
    chosen = true_class(logits, targets)
    losses = -torch.where(chosen & both, likelihoods, 0).sum(-1)
    rows = torch.ones_like(losses) if weight is None else weight
    of_old = _mean(losses, rows * (chosen & old).any(-1).to(rows.dtype))
    of_new = _mean(losses, rows * (chosen & new).any(-1).to(rows.dtype))
    return torch.where(begun, weights[0] * of_old + weights[1] * of_new, of_new)


def feature_distillation(
    features: Tensor, previous_features: Tensor, head: Tensor, weight: Tensor | None = None
) -> Tensor:
    """The mean over the batch of ``‖W f - W f_previous‖²``, a sum over the old classes, not a mean.

    ``features`` and ``previous_features [B, F]``. ``head [q, F]`` (W) is the weight of the previous model's classifier,
    so that a feature counts by its importance to it. MFCL, equation 8.
    """
    drift = ((features - previous_features) @ head.t()).square().sum(-1)
    return _mean(drift, torch.ones_like(drift) if weight is None else weight)


def distillation_among(
    logits: Tensor, teacher_logits: Tensor, classes: Tensor, temperature: float, weight: Tensor | None = None
) -> Tensor:
    """The mean of ``KL(teacher ‖ student)`` in nats, with softmax at the temperature over ``classes [C]`` (bool) only.

    ``logits`` and ``teacher_logits [B, C]``. The result is not multiplied by the squared temperature.
    """
    student = torch.where(classes, logits / temperature, -torch.inf).log_softmax(-1)
    teacher = torch.where(classes, teacher_logits / temperature, -torch.inf).log_softmax(-1)
    divergence = (teacher.exp() * torch.where(classes, teacher - student, 0)).sum(-1)
    return _mean(divergence, torch.ones_like(divergence) if weight is None else weight)


def _mean(values: Tensor, weight: Tensor) -> Tensor:
    total = weight.sum()
    return (values * (weight / torch.where(total > 0, total, 1)).to(values.dtype)).sum()
