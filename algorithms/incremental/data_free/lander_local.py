"""LANDER at the devices (Tran et al., 2024): features near anchors, and answers and features of synthetic samples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedemu.algorithms.incremental.data_free.losses import bounding_loss, mean_of
from fedemu.algorithms.incremental.data_free.rehearsal import parted
from fedemu.algorithms.incremental.exemplars import old_classes
from fedemu.algorithms.incremental.remembering import PREVIOUS
from fedemu.algorithms.interface import Batch, Facts, Forest, Model, Tree
from fedemu.algorithms.models.growing import SEEN, Growing
from fedemu.algorithms.training.class_losses import cross_entropy_among, distillation_among
from fedemu.algorithms.training.objective import Loss, cross_entropy


@dataclass(frozen=True, eq=False)
class AnchoredLoss:
    """The loss of LANDER's first task: ``CE + anchoring · L_B``. ``metrics`` holds CE as ``loss``."""

    model: Model
    anchors: Tensor
    anchoring: float
    radius: float

    def __call__(self, variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
        outputs, buffers = self.model.apply(variables, batch.x, True)
        learning = cross_entropy(outputs.logits, batch, facts)
        bound = bounding_loss(outputs.features, self._of(batch), self.radius, batch.weight)
        return Loss(learning + self.anchoring * bound, buffers, {"loss": learning.detach()})

    def _of(self, batch: Batch) -> Tensor:
        """The anchors of the rows of a batch."""
        return self.anchors.to(batch.y.device).index_select(0, batch.y)


@dataclass(frozen=True, eq=False)
class AnchoredDistillingLoss(AnchoredLoss):
    """The loss of LANDER's later tasks, over batches whose last ``synthetic_batch`` rows are synthetic.

    Real and synthetic samples go through the model one after the other, so that batch normalisation never mixes them.
    ``metrics`` holds the cross-entropy of the real ones as ``loss``.
    """

    classifier: Growing
    synthetic_batch: int
    current: float
    previous: float
    temperature: float

    def __call__(self, variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
        real, made = parted(batch, self.synthetic_batch)
        outputs, buffers = self.model.apply(variables, real.x, True)
        new, old = self.classifier.brought(facts), shared[PREVIOUS][SEEN] > 0
        learning = cross_entropy_among(outputs.logits, real.y, new, real.weight)
        bound = bounding_loss(outputs.features, self._of(real), self.radius, real.weight)
        answers, buffers = self.model.apply({**variables, **buffers}, made.x, True)
        pool = shared["synthetic"]
        taught, features = (pool[name].index_select(0, made.y) for name in ("logits", "features"))
        kept = distillation_among(answers.logits, taught, old, self.temperature, made.weight)
        drift = mean_of((answers.features - features).square().mean(-1), made.weight)
        current, previous = balance(old_classes(self.classifier, shared[PREVIOUS], facts).sum(), new.sum())
        value = self.current * current * (learning + self.anchoring * bound)
        value = value + self.previous * previous * (kept + drift)
        return Loss(value, buffers, {"loss": learning.detach()})


def balance(known: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of ``current`` and of ``previous``, with ``known`` classes of earlier tasks and ``new`` ones."""
    total = known + new
    alpha, beta = (total / 2 + 1).log2(), (known / total).sqrt()
    return (1 + 1 / alpha) / beta, alpha * beta
