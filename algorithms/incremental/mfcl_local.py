"""MFCL at the devices (Babakniya et al., 2023, section 3.2, equations 6 to 9): they rehearse while they learn.

Every batch of real samples gets synthetic samples of earlier classes at its end. The paper draws as many of them as a
batch has real samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedemu.algorithms.incremental.generator.training import Targets, intended_classes, told
from fedemu.algorithms.incremental.remembering import PREVIOUS, TaskSGD
from fedemu.algorithms.interface import Batch, Facts, Forest, Kind, Model, Tree
from fedemu.algorithms.models.growing import SEEN, Growing
from fedemu.algorithms.models.image_generator import Generator
from fedemu.algorithms.training.class_losses import cross_entropy_among, feature_distillation
from fedemu.algorithms.training.local_sgd import Training
from fedemu.algorithms.training.objective import Loss, cross_entropy

NOISE = "synthetic"
"""The name of the noise. Synthetic samples are made from it, or it draws them among stored ones."""

Synthetic = Callable[[Forest, Tensor], tuple[Tensor, Tensor]]
"""(shared, noise) -> ``x [batch, ...]``, ``y [batch]``; pure, and usable under ``vmap``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RehearsingSGD(TaskSGD):
    """Local training on batches to which ``synthetic`` adds ``synthetic_batch`` rows at the end.

    ``noise`` holds the noise for ``synthetic``, under the name ``NOISE``. ``kind`` is the kind of the network that
    takes most of the time: the generator's, if samples are made in each step.
    """

    synthetic: Synthetic
    synthetic_batch: int
    kind: Kind

    @property
    def passes(self) -> float:
        """How often an example is processed. A synthetic sample counts like a real one.

        Forward passes without a backward pass are not counted.
        """
        return super().passes * (1 + self.synthetic_batch / self.batch_size)

    @property
    def processed(self) -> float:
        return super().processed * (1 + self.synthetic_batch / self.batch_size)

    def step(
        self, carry: Training, batch: Batch, shared: Forest, own: Tree, facts: Facts, noise: Tree
    ) -> tuple[Training, Tree]:
        x, y = self.synthetic(shared, noise[NOISE])
        weight = torch.ones_like(y, dtype=batch.weight.dtype)
        # Without real samples in this step a device takes no step: its synthetic samples have the weight 0.
        weight = weight * (batch.weight.sum() > 0)
        joined = batch._replace(
            x=torch.cat([batch.x, x]), y=torch.cat([batch.y, y]), weight=torch.cat([batch.weight, weight])
        )
        return super().step(carry, joined, shared, own, facts, noise)


@dataclass(frozen=True)
class StableLoss:
    """The loss of MFCL at devices (equation 9), over batches whose last ``synthetic_batch`` rows are synthetic.

    It is the sum of three losses:

    - the cross-entropy of the real samples among the classes of the current task (equation 6), or among all classes
      seen if ``split`` is false;
    - ``fine_tuning`` times the cross-entropy of all samples among all classes seen (equation 7), for the last layer
      alone: the features are constants;
    - ``distillation`` times the feature distillation of all samples from ``shared["previous"]`` in evaluation mode
      (equation 8), divided by the number of that model's classes if ``distillation_scale`` is ``mean``.

    A weight of 0 leaves a loss out. ``metrics`` holds the first loss as ``loss``.
    """

    model: Model
    classifier: Growing
    synthetic_batch: int
    split: bool
    fine_tuning: float
    distillation: float
    distillation_scale: Literal["sum", "mean"]

    def __call__(self, variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
        outputs, buffers = self.model.apply(variables, batch.x, True)
        rows = len(batch.y) - self.synthetic_batch
        real = Batch(batch.x[:rows], batch.y[:rows], batch.weight[:rows])
        logits = outputs.logits[:rows]
        if self.split:
            learning = cross_entropy_among(logits, real.y, self.classifier.brought(facts), real.weight)
        else:
            learning = cross_entropy(logits, real, facts)
        value = learning
        if self.fine_tuning:
            tuned = self.classifier.classify(variables, outputs.features.detach())
            value = value + self.fine_tuning * cross_entropy(tuned, batch, facts)
        if self.distillation:
            value = value + self.distillation * self._drift(outputs.features, batch, shared[PREVIOUS])
        return Loss(value, buffers, {"loss": learning.detach()}, outputs)

    def _drift(self, features: Tensor, batch: Batch, previous: Tree) -> Tensor:
        before, _ = self.classifier.apply(previous, batch.x, False)
        # Classes that the previous model had not learnt get rows of zeros.
        head = previous[self.classifier.head.weight] * previous[SEEN][:, None]
        drift = feature_distillation(features, before.features, head, batch.weight)
        return drift / previous[SEEN].sum() if self.distillation_scale == "mean" else drift


def generated(generator: Generator, classifier: Growing, targets: Targets, signal: float) -> Synthetic:
    """Synthetic samples that ``shared["generator"]`` makes, one for each row of noise ``[batch, generator.noise]``.

    Their classes are those that the noise stands for (``targets`` is ``noise``), or what ``shared["previous"]`` says.
    ``signal`` is how clearly the generator is told the class; see ``training.told``.
    """

    def synthetic(shared: Forest, noise: Tensor) -> tuple[Tensor, Tensor]:
        previous = shared[PREVIOUS]
        seen = previous[SEEN] > 0
        images = generator.images(shared["generator"], told(classifier, seen, noise, signal))
        if targets == "model":
            outputs, _ = classifier.apply(previous, images, False)
            return images, outputs.logits.argmax(-1)
        return images, intended_classes(classifier, seen, noise)

    return synthetic


def stored(shared: Forest, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Samples from ``shared["synthetic"]``. Each value of noise ``[batch]`` draws one; all are equally likely."""
    x, y = shared["synthetic"]["x"], shared["synthetic"]["y"]
    rows = (torch.special.ndtr(noise) * len(y)).long().clamp(max=len(y) - 1)
    return x.index_select(0, rows), y.index_select(0, rows)
