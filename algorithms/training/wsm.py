"""Re-weighted softmax cross-entropy (WSM; Legate et al., 2023) as a criterion.

The loss is equation 4 with the proportions of classes in the device's own training data. Classes that the device lacks
take no part, so their rows of the classifier do not change. The proportion of the true class in the numerator is a
constant: no gradient depends on it, but with it classes in equal numbers give cross-entropy itself. The authors' code
also counts the validation part of a device's data. There are no options. Evaluation uses the plain logits.
"""

from __future__ import annotations

from torch import Tensor

from fedemu.algorithms.interface import Batch, Facts
from fedemu.algorithms.training.losses import unchecked_reweighted_cross_entropy


def reweighted_softmax(logits: Tensor, batch: Batch, facts: Facts) -> Tensor:
    """The mean re-weighted cross-entropy in nats, weighted by ``batch.weight``. It replaces ``cross_entropy``.

    It checks nothing, because ``facts.label_counts`` counts the samples from which batches are made.
    """
    proportions = facts.label_counts / facts.label_counts.sum()
    return unchecked_reweighted_cross_entropy(logits, batch.y, proportions, batch.weight)
