"""FedLwF-2T: devices learn from two teachers, their own past model and the global model, in place of old samples.

Usmanova, Portet, Lalanda and Vega, "A Distillation-Based Approach Integrating Continual Learning and Federated Learning
for Pervasive Services", 2021. It is a baseline of MFCL (Babakniya et al., 2023, section 5). The loss is that of
``TwoTeachers``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedemu.algorithms.incremental.remembering import RememberingFedAvg, RememberingState, TaskSGD, classifier_of
from fedemu.algorithms.interface import Batch, Context, Facts, Forest, Model, Outcome, Script, Tree
from fedemu.algorithms.models.growing import SEEN
from fedemu.algorithms.training.class_losses import distillation_among
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import Training
from fedemu.algorithms.training.objective import Criterion, Loss
from fedemu.algorithms.trees import map_leaves, unflatten, zeros_like
from fedemu.protocol.errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class PastKeepingSGD(TaskSGD):
    """Local training at a device that keeps two models: its latest one, and its last one of an earlier task.

    The own state holds the latest model as ``last/NAME`` with its ``task``, and the earlier one as ``past/NAME``. There
    is an earlier one only if ``known`` is 1.
    """

    def initial_own(self, shared: Forest) -> Tree:
        nothing = zeros_like(shared["model"])
        return {
            **{f"last/{name}": leaf for name, leaf in nothing.items()},
            **{f"past/{name}": leaf for name, leaf in nothing.items()},
            "task": torch.zeros((), dtype=torch.int64),
            "known": torch.zeros(()),
        }

    def finish(self, carry: Training, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        past, known = past_model(shared, own, facts)
        kept = {
            **{f"last/{name}": leaf for name, leaf in carry.variables.items()},
            **{f"past/{name}": leaf for name, leaf in past.items()},
            "task": facts.task.to(own["task"].dtype),
            "known": known,
        }
        return super().finish(carry, shared, own, facts)._replace(own=kept)


def past_model(shared: Forest, own: Tree, facts: Facts) -> tuple[Tree, Tensor]:
    """A device's last model of an earlier task and the number 1; the global model and 0 if it has no such model."""
    forest = unflatten(own)
    newer = ~facts.first_visit & (own["task"] < facts.task)
    known = newer | (own["known"] > 0)

    def chosen(last: Tensor, past: Tensor, model: Tensor) -> Tensor:
        return torch.where(known, torch.where(newer, last, past), model)

    return map_leaves(chosen, forest["last"], forest["past"], shared["model"]), known.to(own["known"].dtype)


@dataclass(frozen=True)
class TwoTeachers:
    """The loss ``alpha · CE + beta · KD(past model) + (1 - alpha - beta) · KD(global model)``.

    Each teacher is asked about the classes that it has seen. If a device has no past model, ``beta`` goes to
    cross-entropy. ``metrics`` holds the cross-entropy as ``loss``. Usmanova et al., 2021.
    """

    model: Model
    criterion: Criterion
    alpha: float
    beta: float
    temperature: float

    def __call__(self, variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
        outputs, buffers = self.model.apply(variables, batch.x, True)
        past, known = past_model(shared, own, facts)

        def taught(teacher: Tree) -> Tensor:
            answers, _ = self.model.apply(teacher, batch.x, False)
            seen = teacher[SEEN] > 0
            return distillation_among(outputs.logits, answers.logits, seen, self.temperature, batch.weight)

        surprise = self.criterion(outputs.logits, batch, facts)
        value = (self.alpha + self.beta * (1 - known)) * surprise + self.beta * known * taught(past)
        value = value + (1 - self.alpha - self.beta) * taught(shared["model"])
        return Loss(value, buffers, {"loss": surprise.detach()}, outputs)


class TwoTeacherFedAvg(RememberingFedAvg):
    """Federated averaging whose devices remember by themselves: the coordinator keeps nothing of earlier tasks."""

    def remember(self, state: RememberingState, context: Context) -> Script[Forest]:
        yield from ()
        return {}


def fedlwf_2t(
    ingredients: Ingredients,
    alpha: NonNegativeFloat = 0.33,
    beta: NonNegativeFloat = 0.33,
    temperature: PositiveFloat = 2.0,
) -> TwoTeacherFedAvg:
    """FedLwF-2T (Usmanova et al., 2021): from the second task on, devices learn from labels and from two teachers.

    One teacher is the device's own model at the end of its last visit in an earlier task, which the device keeps. The
    other is the global model that it was sent. Defaults are those of FedCIL's comparison. Raises ConfigurationError if
    ``alpha + beta`` is above 1, or if the stream has no tasks.
    """
    if alpha + beta > 1:
        raise ConfigurationError(
            f"algorithm.options.alpha + beta = {alpha + beta:g} leaves less than nothing for the global model; "
            "set them so that their sum is 1 or less"
        )
    classifier = classifier_of(ingredients, "fedlwf_2t")
    first = ingredients.training(PastKeepingSGD)
    loss = TwoTeachers(ingredients.model, ingredients.criterion, alpha, beta, temperature)
    return TwoTeacherFedAvg(first, ingredients.training(PastKeepingSGD, loss=loss), classifier)
