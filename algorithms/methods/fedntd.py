"""FedNTD (Lee et al., 2022): FedAvg with not-true distillation from the global model in the local loss, equation 10.

The teacher is the global model in evaluation mode on the same batch. The loss compares all classes except the true one
(equation 11), so that what the model knows about the others stays. On a stream of classes these are the classes that
have come so far. The traffic is that of FedAvg, and a device keeps nothing.

Defaults are the paper's, ``beta`` = 1 and ``tau`` = 1. The factor tau², which equation 3 has and equations 10 and 11
leave out, is applied as in the authors' code; at the default it is 1. Local models are averaged by their numbers of
examples as in equation 2 and in that code; Algorithm 1 writes an even mean. The paper trains at a learning rate of 0.1,
all of the authors' configurations at 0.01.
"""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedemu.algorithms.interface import Model
from fedemu.algorithms.methods.fedavg import FedAvg
from fedemu.algorithms.models.growing import SEEN
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.losses import not_true_distillation
from fedemu.algorithms.training.objective import Pass, Term


def preservation(beta: float, tau: float) -> Term:
    """``beta`` times the not-true distillation, at temperature ``tau``, from the global model that was sent."""

    def term(model: Model, at: Pass) -> Tensor:
        sent, batch = at.shared["model"], at.batch
        teacher, _ = model.apply(sent, batch.x, False)
        # Logits of classes that have not come are told from the highest one, which may be that of the true class.
        seen = sent[SEEN] > 0 if SEEN in sent else None
        return beta * not_true_distillation(at.outputs.logits, teacher.logits, batch.y, tau, batch.weight, seen)

    return term


def fedntd(ingredients: Ingredients, beta: NonNegativeFloat = 1.0, tau: PositiveFloat = 1.0) -> FedAvg:
    """FedNTD. ``beta`` is the coefficient of the distillation (0 is FedAvg), ``tau`` is its temperature."""
    ingredients.require_classes("fedntd")
    return FedAvg(ingredients.local_sgd(preservation(beta, tau)))
