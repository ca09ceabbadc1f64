"""Losses of generators that are trained against a teacher and a student. All are pure, differentiable functions."""

from __future__ import annotations

import torch
from torch import Tensor

from fedemu.algorithms.interface import Tree
from fedemu.algorithms.training.class_losses import distillation_among


def statistics_distance(running: Tree, batch: Tree) -> Tensor:
    """The sum over layers of ``‖mean - running mean‖ + ‖variance - running variance‖``, with Euclidean norms.

    Both trees hold ``LAYER.mean`` and ``LAYER.var`` ``[channels]``; layers without running statistics do not count.
    Raises ValueError if no layer has any. It is the batch-statistics loss of the authors' code of TARGET and LANDER.
    """
    norms = [(leaf - running[name]).norm() for name, leaf in batch.items() if name in running]
    if not norms:
        raise ValueError("there are no running statistics to compare with; use a model that reports them")
    return torch.stack(norms).sum()


def agreement_divergence(student: Tensor, teacher: Tensor, classes: Tensor) -> Tensor:
    """The mean over the batch of ``KL(teacher ‖ student)`` in nats, where rows with different answers count as 0.

    Logits ``[batch, classes]``, of which only those of ``classes`` (bool) take part. A generator that raises it makes
    samples on which the student is less sure than the teacher: those from which it can still learn.
    """
    agree = (student.argmax(-1) == teacher.argmax(-1)).to(student.dtype)
    return distillation_among(student, teacher, classes, 1.0, agree) * agree.mean()


def bounding_loss(features: Tensor, anchors: Tensor, radius: float, weight: Tensor | None = None) -> Tensor:
    """``max(0, d - radius)``, where d is the mean over the batch of the mean squared difference of a row's values.

    ``features`` and ``anchors [batch, width]``, with an anchor for each row. ``weight [batch]`` is 0 for padding; a
    batch of padding has the loss 0. It is the bounding loss of the authors' code of LANDER.
    """
    apart = (features - anchors).square().mean(-1)
    weight = torch.ones_like(apart) if weight is None else weight
    return (mean_of(apart, weight) - radius).relu()


def mean_of(values: Tensor, weight: Tensor) -> Tensor:
    """The mean of ``values [batch]`` by ``weight [batch]``; 0 if all weights are 0."""
    total = weight.sum()
    return (values * weight).sum() / torch.where(total > 0, total, 1)
