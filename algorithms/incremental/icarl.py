"""iCaRL as a whole: exemplars by herding, distillation from the previous model, and the nearest mean of exemplars.

Rebuffi, Kolesnikov, Sperl and Lampert, "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017. Herding
is ``replay.strategy = "herding"`` (algorithm 4). The loss is that of algorithm 3: each class is a binary decision, and
the targets of old classes are the sigmoids of the previous task's model. A sample belongs to the class with the nearest
mean (algorithm 1), by features of norm 1 and means of norm 1.

The federated reading is fedemu's own: devices train as in FedAvg, and send sums of features by class, whose totals give
the means. Class means are made anew after each round, with the new global model. Those of earlier tasks are means of
exemplars. Those of the present task are means of all its samples, as exemplars of it are chosen only when it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from fedemu.algorithms.analytic.classifiers import class_sums, nearest_means
from fedemu.algorithms.analytic.learner import with_head
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

MEANS: Final = "means"
"""The key of the sums of normalised features by class. They are kept, but not sent to devices."""


@dataclass(frozen=True)
class RepresentationLoss:
    """The loss of algorithm 3: a sigmoid for each class seen so far.

    With ``distilling``, the targets of old classes are the answers of ``shared["previous"]``, for all samples
    (``old_classes``). All other targets are the labels. ``metrics`` holds the whole as ``loss``.
    """

    classifier: Growing
    distilling: bool

    def __call__(self, variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
        outputs, buffers = self.classifier.apply(variables, batch.x, True)
        targets = one_hot(outputs.logits, batch.y)
        if self.distilling:
            old = old_classes(self.classifier, shared[PREVIOUS], facts)
            targets = remembered(self.classifier, shared[PREVIOUS], batch.x, targets, old)
        value = sigmoid_cross_entropy(outputs.logits, targets, variables[SEEN] > 0, batch.weight)
        return Loss(value, buffers, {"loss": value.detach()})


class ICaRL(SurveyingFedAvg):
    """iCaRL's rounds. The survey asks for sums of normalised features by class."""

    takes_terms: ClassVar[bool] = False
    """Local terms would remember the classifier by means, which is evaluated, and not the one that is trained."""
    shows_what_it_trains: ClassVar[bool] = False
    """Gradients of samples at ``variables`` would be those of the classifier by means."""

    def remember(self, state: RememberingState, context: Context) -> Script[Forest]:
        kept = yield from super().remember(state, context)
        return {**kept, **({MEANS: state.kept[MEANS]} if MEANS in state.kept else {})}

    def surveyed(self, state: RememberingState, sums: Tree) -> Forest:
        """The new sums. A class of which nobody on-line has a sample keeps its last ones."""
        known = sums["counts"] > 0
        before: Tree = state.kept.get(MEANS, sums)
        features = torch.where(known[:, None], sums["features"], before["features"])
        counts = torch.where(known, sums["counts"], before["counts"])
        return {**state.kept, MEANS: {"features": features, "counts": counts}}

    def variables(self, state: RememberingState) -> Tree:
        """The global model with the nearest mean of exemplars as its classifier. Training goes on with its own."""
        variables = super().variables(state)
        if MEANS not in state.kept:
            return variables
        head = self.classifier.head
        return with_head(variables, head, nearest_means(state.kept[MEANS], normalised=True))


def icarl(ingredients: Ingredients) -> ICaRL:
    """iCaRL (Rebuffi et al., 2017). It has no options; ``replay.strategy`` and ``replay.capacity`` say what is kept.

    Raises ConfigurationError if the stream has no tasks, if devices keep no samples, or for another criterion than
    cross-entropy.
    """
    classifier = classifier_of(ingredients, "icarl")
    first, later = (RepresentationLoss(classifier, distilling) for distilling in (False, True))
    programs = programs_of(ingredients, "icarl", first, later)
    survey = survey_of(ingredients, classifier, class_sums(ingredients.classes, normalised=True))
    return ICaRL(*programs, classifier, survey)
