"""FedProx⁺: local models are held near the global model of the previous task, without samples of old classes.

A baseline that MFCL (Babakniya et al., 2023, section 5) names and compares with.
"""

from __future__ import annotations

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from fedemu.algorithms.incremental.remembering import (
    RememberingFedAvg,
    TaskSGD,
    classifier_of,
)
from fedemu.algorithms.interface import Model
from fedemu.algorithms.models.growing import SEEN, Growing
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.losses import proximal
from fedemu.algorithms.training.objective import Pass, Term
from fedemu.algorithms.trees import without


def anchored(coefficient: float, classifier: Growing) -> Term:
    """``coefficient / 2 · ‖w - w_previous‖²`` over the trained variables, less the rows of classes new to the task."""
    rows = {classifier.head.weight, classifier.head.bias}

    def term(model: Model, at: Pass) -> Tensor:
        previous, trained = at.shared["previous"], without(at.variables, model.buffers)
        known = previous[SEEN] > 0

        def reference(name: str, leaf: Tensor) -> Tensor:
            if name not in rows:
                return previous[name]
            return torch.where(known.view(-1, *[1] * (leaf.dim() - 1)), previous[name], leaf)

        return coefficient * proximal(trained, {name: reference(name, leaf) for name, leaf in trained.items()})

    return term


def fedprox_plus(ingredients: Ingredients, mu: NonNegativeFloat = 1.0) -> RememberingFedAvg:
    """FedProx⁺: from the second task on, local models are held near the global model at the end of the last task.

    ``mu`` is the coefficient, which is unpublished; 1 as in FedProx.
    """
    classifier = classifier_of(ingredients, "fedprox_plus")
    later = ingredients.training(TaskSGD, anchored(mu, classifier))
    return RememberingFedAvg(ingredients.training(TaskSGD), later, classifier)
