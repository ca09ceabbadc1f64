"""The asymmetric cross-entropy of ER-ACE (Caccia et al., "New Insights on Reducing Abrupt Representation Change in
Online Continual Learning", ICLR 2022) as a criterion.

A new sample is classified among the classes of the new samples only, so that learning them does not push away the
representations of earlier classes. A replayed sample is classified among all classes seen. The loss is the mean over
the rows of a batch; the paper adds the means of a batch of new samples and of one of replayed samples.

In the paper the classes of the new samples are those of the batch. Here this holds on streams without tasks. On a
stream that brings classes task by task they are the classes of the task, and samples of these classes are new. So a
device that has few of them learns them all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedemu.algorithms.interface import REPLAYED, Batch, Facts
from fedemu.algorithms.models.growing import Growing
from fedemu.algorithms.training.losses import true_class


@dataclass(frozen=True)
class AsymmetricCrossEntropy:
    """The mean asymmetric cross-entropy in nats. ``model`` is the growing model of a stream of tasks, None without.

    Without tasks, rows that have no note REPLAYED compete among all classes, such as single samples in questions.
    """

    model: Growing | None

    @property
    def notes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the notes that the loss reads."""
        return {REPLAYED: ()} if self.model is None else {}

    def __call__(self, logits: Tensor, batch: Batch, facts: Facts) -> Tensor:
        true = true_class(logits, batch.y)
        if self.model is not None:
            present = self.model.brought(facts)
            new = (true & present).any(-1)
        else:
            replayed = batch.notes.get(REPLAYED, batch.weight.new_zeros(0))
            missing = len(batch.y) - len(replayed)
            new = torch.cat([replayed, replayed.new_ones(missing)]) == 0
            present = (true & new[:, None] & (batch.weight > 0)[:, None]).any(0)
        return asymmetric_cross_entropy(logits, batch.y, new, present, batch.weight)


def asymmetric_cross_entropy(logits: Tensor, targets: Tensor, new: Tensor, present: Tensor, weight: Tensor) -> Tensor:
    """Cross-entropy in nats, the mean over rows by ``weight [B]``; new rows compete among the ``present`` classes only.

    ``logits [B, C]``, ``targets [B]``, ``new [B]`` bool, ``present [C]`` bool. All targets of new rows with a positive
    weight must be present. The result is 0 for a batch of padding.
    """
    true = true_class(logits, targets)
    # The true class is always one of them, so that a row of padding is finite.
    among = ~new[:, None] | present | true
    likelihoods = torch.where(among, logits, -torch.inf).log_softmax(-1)
    share = weight / weight.sum().clamp(min=1)
    return -(torch.where(true, likelihoods, 0).sum(-1) * share).sum()
