"""FedProx⁺: a proximal term holds local models near the global model of the previous task, without old samples.

It is a baseline of MFCL (Babakniya et al., 2023, section 5), which describes it in one sentence. The term is that of
FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", 2020, equation 2) with another reference.
"""

from __future__ import annotations

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from fedemu.algorithms.incremental.remembering import PREVIOUS, RememberingFedAvg, TaskSGD, classifier_of
from fedemu.algorithms.interface import Model
from fedemu.algorithms.models.growing import SEEN, Growing
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.losses import proximal
from fedemu.algorithms.training.objective import Pass, Term
from fedemu.algorithms.trees import without


def anchored(coefficient: float, classifier: Growing) -> Term:
    """The term ``coefficient / 2 · ‖w - w_previous‖²`` over the trained variables.

    The rows of classes that the previous model had not seen are left out.
    """
    rows = {classifier.head.weight, classifier.head.bias}

    def term(model: Model, at: Pass) -> Tensor:
        previous, trained = at.shared[PREVIOUS], without(at.variables, model.buffers)
        known = previous[SEEN] > 0

        def reference(name: str, leaf: Tensor) -> Tensor:
            if name not in rows:
                return previous[name]
            return torch.where(known.view(-1, *[1] * (leaf.dim() - 1)), previous[name], leaf)

        return coefficient * proximal(trained, {name: reference(name, leaf) for name, leaf in trained.items()})

    return term


def fedprox_plus(ingredients: Ingredients, mu: NonNegativeFloat = 1.0) -> RememberingFedAvg:
    """FedProx⁺ (Babakniya et al., 2023, section 5), with the proximal term from the second task on.

    ``mu`` is the coefficient of the term. Its value is not published; the default is that of FedProx here. Raises
    ConfigurationError if the stream has no tasks.
    """
    classifier = classifier_of(ingredients, "fedprox_plus")
    later = ingredients.training(TaskSGD, anchored(mu, classifier))
    return RememberingFedAvg(ingredients.training(TaskSGD), later, classifier)
