"""MOON (Li et al., 2021): FedAvg with a model-contrastive term in the local loss, equation 3.

The term moves the features of the model in training towards those of the global model, and away from those of the
device's previous local model. Both models are in evaluation mode, and see the same batch. A device keeps its previous
model with its buffers as its own state; it sends only the delta. On a first visit the previous model is the global one,
so the term is constant. The authors' code has no term in the first round, and compares with a randomly drawn network if
a device takes part later for the first time.

Defaults are the authors': ``mu`` = 1 and ``temperature`` = 0.5. The authors' model has ``projection = 256``. FedNTD
compares with ``mu`` = 0.1 and no projection head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedemu.algorithms.interface import Facts, Forest, Model, Outcome, Tree
from fedemu.algorithms.methods.fedavg import FedAvg
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD, Training
from fedemu.algorithms.training.losses import model_contrastive
from fedemu.algorithms.training.objective import Pass, Term
from fedemu.algorithms.trees import zeros_like


@dataclass(frozen=True, eq=False)
class ModelKeepingSGD(LocalSGD):
    """Local training that keeps the local model as the device's own state."""

    def initial_own(self, shared: Forest) -> Tree:
        return zeros_like(shared["model"])

    def finish(self, carry: Training, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        return Outcome(super().finish(carry, shared, own, facts).payload, carry.variables)


def contrast(mu: float, temperature: float) -> Term:
    """``mu`` times the model-contrastive loss; ``own`` holds the device's previous model."""

    def term(model: Model, at: Pass) -> Tensor:
        common = model.apply(at.shared["model"], at.batch.x, False)[0].features
        kept = model.apply(at.own, at.batch.x, False)[0].features
        previous = torch.where(at.facts.first_visit, common, kept)
        return mu * model_contrastive(at.outputs.features, common, previous, temperature, at.batch.weight)

    return term


def moon(ingredients: Ingredients, mu: NonNegativeFloat = 1.0, temperature: PositiveFloat = 0.5) -> FedAvg:
    """MOON. ``mu`` is the coefficient of the term (0 is FedAvg), and ``temperature`` divides its cosines."""
    ingredients.require_classes("moon")
    ingredients.require_features("moon")
    return FedAvg(ingredients.training(ModelKeepingSGD, contrast(mu, temperature)))
