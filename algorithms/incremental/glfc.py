"""GLFC: class-aware gradient compensation, class-semantic relation distillation, and the best old model as the teacher.

Dong et al., "Federated Class-Incremental Learning", CVPR 2022. The losses are those of the authors' code, where each
class is a binary decision (sigmoid); exemplars are those of replay (herding in the authors' code).

What is left out: devices of the paper send gradients of perturbed prototype samples, from which a proxy server
reconstructs samples, on which it tests old models. Here the devices themselves test each round's global model on the
samples that they hold, and the model with the best mean accuracy over classes teaches in the next task. The paper also
guesses from entropies when a new task begins; here the stream says it. In the authors' code some devices never get data
of new tasks, and others join; here this follows from the partition and the availability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from fedemu.algorithms.analytic.classifiers import answers_by_class
from fedemu.algorithms.incremental.exemplars import (
    SurveyingFedAvg,
    old_classes,
    one_hot,
    programs_of,
    remembered,
    sigmoid_cross_entropy,
    survey_of,
)
from fedemu.algorithms.incremental.remembering import PREVIOUS, RememberingState, classifier_of
from fedemu.algorithms.interface import Batch, Context, Facts, Forest, Script, Tree
from fedemu.algorithms.models.growing import SEEN, Growing
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import Loss

BEST: Final = "best"
"""The key of the best global model of the present task. It is kept, but not sent to devices."""
SCORE: Final = "score"
"""The key of the accuracy of that model, as the tree ``{"accuracy": [1]}``."""


def gradient_compensation(logits: Tensor, labels: Tensor, old: Tensor, weight: Tensor) -> Tensor:
    """A weight for each sample, ``[B]``: its gradient measure over the mean of its group's.

    The measure is ``1 - sigmoid`` of the logit of the sample's class, the size of the loss's gradient by this logit.
    Samples of the classes ``old [C]`` (bool) are one group, all others the other. Both have the mean weight 1, however
    well they have been learnt. It passes no gradient. ``logits [B, C]``, ``labels [B]``; ``weight [B]`` is 0 for
    padding.
    """
    chosen = one_hot(logits, labels)
    measure = 1 - (logits.detach().sigmoid() * chosen).sum(-1)
    of_old = (chosen * old).sum(-1)
    compensation = torch.zeros_like(measure)
    for group in (of_old * weight, (1 - of_old) * weight):
        mean = (measure * group).sum() / group.sum().clamp(min=1)
        compensation = compensation + group * measure / torch.where(mean > 0, mean, 1)
    return compensation


@dataclass(frozen=True)
class CompensatedLoss:
    """``compensation · L_GC + distillation · L_RD``; in the first task the sigmoid cross-entropy alone.

    L_GC is the sigmoid cross-entropy with ``gradient_compensation``. L_RD is it with the answers of the previous model
    as the targets of old classes, and the labels as those of new ones. ``metrics`` holds L_GC as ``loss``.
    """

    classifier: Growing
    compensation: float
    distillation: float
    first: bool

    def __call__(self, variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
        outputs, buffers = self.classifier.apply(variables, batch.x, True)
        logits, seen = outputs.logits, variables[SEEN] > 0
        targets = one_hot(logits, batch.y)
        if self.first:
            value = sigmoid_cross_entropy(logits, targets, seen, batch.weight)
            return Loss(value, buffers, {"loss": value.detach()}, outputs)
        old = old_classes(self.classifier, shared[PREVIOUS], facts)
        weight = gradient_compensation(logits, batch.y, old, batch.weight)
        surprise = sigmoid_cross_entropy(logits, targets, seen, batch.weight, weight)
        value = self.compensation * surprise
        if self.distillation:
            relations = remembered(self.classifier, shared[PREVIOUS], batch.x, targets, old)
            value = value + self.distillation * sigmoid_cross_entropy(logits, relations, seen, batch.weight)
        return Loss(value, buffers, {"loss": surprise.detach()}, outputs)


class GLFC(SurveyingFedAvg):
    """GLFC's rounds. The survey counts the right answers of the new global model by class."""

    def remember(self, state: RememberingState, context: Context) -> Script[Forest]:
        """The best model of the task that is over; its last one if nobody was there to test any."""
        kept = yield from super().remember(state, context)
        return {PREVIOUS: state.kept.get(BEST, kept[PREVIOUS])}

    def surveyed(self, state: RememberingState, sums: Tree) -> Forest:
        found = mean_accuracy(sums)
        if SCORE in state.kept and found <= state.kept[SCORE]["accuracy"]:
            return state.kept
        return {**state.kept, BEST: state.variables, SCORE: {"accuracy": found}}

    def remarks(self, state: RememberingState) -> dict[str, Any]:
        """The accuracy by which the best model of the task so far was chosen; nothing before the first survey."""
        return {"best_old_model": float(state.kept[SCORE]["accuracy"])} if SCORE in state.kept else {}


def mean_accuracy(sums: Tree) -> Tensor:
    """The mean accuracy ``[1]`` over the classes that have samples; 0 if there are none."""
    counts = sums["counts"]
    return ((sums["right"] / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1))[None]


def glfc(ingredients: Ingredients, compensation: NonNegativeFloat = 0.5, distillation: NonNegativeFloat = 0.5) -> GLFC:
    """GLFC (Dong et al., CVPR 2022). ``compensation`` and ``distillation`` weigh its two losses.

    Raises ConfigurationError if the stream has no tasks, if devices keep no samples, or for another criterion than
    cross-entropy.
    """
    classifier = classifier_of(ingredients, "glfc")
    first, later = (CompensatedLoss(classifier, compensation, distillation, begins) for begins in (True, False))
    programs = programs_of(ingredients, "glfc", first, later)
    return GLFC(*programs, classifier, survey_of(ingredients, classifier, answers_by_class(ingredients.classes)))
