"""What methods with exemplars have in common: samples of earlier tasks in replay buffers, losses of sigmoids, a survey.

Exemplars are the samples that replay keeps (``replay.strategy``). Devices train on them as on all their samples. After
each round the devices that are on-line are asked about the new global model: the *survey*, which sums over all samples
that they hold.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.analytic.sums import SUMS, Summed, Sums
from fedemu.algorithms.incremental.remembering import PREVIOUS, RememberingFedAvg, RememberingState, TaskSGD
from fedemu.algorithms.interface import Ask, Context, Facts, Forest, Reply, Script, Tree, total
from fedemu.algorithms.models.growing import SEEN, Growing
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.losses import true_class
from fedemu.algorithms.training.objective import LossFunction
from fedemu.algorithms.trees import SUM_UNIT, scale
from fedemu.protocol.errors import ConfigurationError


class SurveyingFedAvg(RememberingFedAvg):
    """The rounds of a method with exemplars. Only the previous model is sent to devices, beside the global one."""

    def __init__(self, first: TaskSGD, later: TaskSGD, classifier: Growing, survey: Sums) -> None:
        super().__init__(first, later, classifier)
        self.programs = {**self.programs, "survey": survey}

    def round(self, state: RememberingState, context: Context) -> Script[RememberingState]:
        state = yield from super().round(state, context)
        shared = {"model": state.variables}
        reply: Reply = yield Ask("survey", shared, {SUMS: total}, cohort="online", optional=True)
        if not reply.devices:
            return state
        return replace(state, kept=self.surveyed(state, scale(reply.values[SUMS], SUM_UNIT)))

    def shared(self, kept: Forest) -> Forest:
        return {PREVIOUS: kept[PREVIOUS]}

    def surveyed(self, state: RememberingState, sums: Tree) -> Forest:
        """The trees to keep after a survey of the global model: those of before and what follows from the sums."""
        raise NotImplementedError


def survey_of(ingredients: Ingredients, classifier: Growing, summed: Summed) -> Sums:
    """The program of the survey. It counts all samples that a device holds, each time anew."""
    width = classifier.init(0)[classifier.head.weight].shape[1]
    return Sums(classifier, summed, ingredients.classes, width, once=False)


def programs_of(
    ingredients: Ingredients, method: str, first: LossFunction, later: LossFunction
) -> tuple[TaskSGD, TaskSGD]:
    """Local training in the first task and in later ones.

    Raises ConfigurationError if another criterion than cross-entropy is asked for, or if devices keep no exemplars.
    """
    ingredients.require_cross_entropy(method)
    if ingredients.kept == 0:
        raise ConfigurationError(
            f"the method {method!r} needs samples of earlier tasks at the devices, but replay keeps none; "
            "set replay.strategy = 'herding' and replay.capacity = 20"
        )
    return ingredients.training(TaskSGD, loss=first), ingredients.training(TaskSGD, loss=later)


def sigmoid_cross_entropy(
    logits: Tensor, targets: Tensor, classes: Tensor, weight: Tensor, importance: Tensor | None = None
) -> Tensor:
    """The mean over the batch of ``- sum_c [t_c log s_c + (1 - t_c) log(1 - s_c)]`` in nats, over ``classes [C]``.

    s is the sigmoid of ``logits [B, C]``, t are ``targets [B, C]``. ``weight [B]`` is 0 for padding, and
    ``importance [B]`` multiplies the losses of samples. Losses are added over classes, so that each counts alike in all
    tasks. The result is 0 for a batch of padding.
    """
    surprise = functional.binary_cross_entropy_with_logits(
        torch.where(classes, logits, 0), torch.where(classes, targets, 0), reduction="none"
    )
    losses = torch.where(classes, surprise, 0).sum(-1)
    share = weight / weight.sum().clamp(min=1)
    return (losses * share if importance is None else losses * share * importance).sum()


def one_hot(logits: Tensor, labels: Tensor) -> Tensor:
    """``true_class`` as 0 and 1 in the dtype of ``logits``."""
    return true_class(logits, labels).to(logits.dtype)


def old_classes(classifier: Growing, previous: Tree, facts: Facts) -> Tensor:
    """The classes ``[C]`` (bool) that the previous model has seen, and the device's present task does not bring."""
    return (previous[SEEN] > 0) & ~classifier.brought(facts)


def remembered(classifier: Growing, previous: Tree, x: Tensor, targets: Tensor, old: Tensor) -> Tensor:
    """The targets ``[B, C]``, with the sigmoids of the previous model for the ``old [C]`` classes."""
    outputs, _ = classifier.apply(previous, x, False)
    return torch.where(old, outputs.logits.sigmoid(), targets)
