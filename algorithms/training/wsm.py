"""Re-weighted softmax cross-entropy (WSM; Legate et al., 2023) as a criterion: softmax by what the device itself holds.

Equation 4 with the proportions of classes in the device's own training data; classes that it lacks take no part, so
their rows of the classifier are left alone. The true class's proportion in the numerator is a constant: no gradient
depends on it, but with it evenly held classes give cross-entropy itself. The authors' code counts the validation part
of a device's data too. There are no options. Evaluation goes by the plain logits.
"""

from __future__ import annotations

from torch import Tensor

from fedemu.algorithms.interface import Batch, Facts
from fedemu.algorithms.training.losses import unchecked_reweighted_cross_entropy


def reweighted_softmax(logits: Tensor, batch: Batch, facts: Facts) -> Tensor:
    """The mean re-weighted cross-entropy in nats, weighted by ``batch.weight``; goes in place of ``cross_entropy``.

    Nothing needs to be checked, as ``facts.label_counts`` counts the very samples that batches are made of.
    """
    proportions = facts.label_counts / facts.label_counts.sum()
    return unchecked_reweighted_cross_entropy(logits, batch.y, proportions, batch.weight)
