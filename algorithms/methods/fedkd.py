"""FedKD: FedAvg with plain distillation from the global model in the local loss, over all classes.

It is the control of FedNTD (Lee et al., 2022, appendix H), which distils over all classes but the true one. Everything
else is as in ``fedntd``, so that the two differ in nothing but the classes. The local loss is cross-entropy plus
``beta · tau² · KL(teacher ‖ student)``. Equation 3 has the weights ``1 - β`` and ``β`` for the two summands: that is
``beta = β / (1 - β)`` here, and a learning rate ``1 - β`` times as large.

The appendix is not part of the text that was read. The authors' code of this name does not run as published: its loss
has no cross-entropy and is used before it is defined. Its configuration has ``beta`` = 1 and ``tau`` = 3.
"""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedemu.algorithms.interface import Model
from fedemu.algorithms.methods.fedavg import FedAvg
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.losses import distillation
from fedemu.algorithms.training.objective import Pass, Term


def imitation(beta: float, tau: float) -> Term:
    """``beta`` times the distillation, at temperature ``tau``, from the global model that was sent."""

    def term(model: Model, at: Pass) -> Tensor:
        teacher, _ = model.apply(at.shared["model"], at.batch.x, False)
        return beta * distillation(at.outputs.logits, teacher.logits, tau, at.batch.weight)

    return term


def fedkd(ingredients: Ingredients, beta: NonNegativeFloat = 1.0, tau: PositiveFloat = 1.0) -> FedAvg:
    """FedKD. ``beta`` is the coefficient of the distillation (0 is FedAvg), ``tau`` is its temperature."""
    ingredients.require_classes("fedkd")
    ingredients.require_unheated("fedkd", tau=tau)
    return FedAvg(ingredients.local_sgd(imitation(beta, tau)))
