"""Federated averaging (McMahan et al., 2017): the mean of the local models, weighted by their numbers of examples.

FedProx (Li et al., 2020) is the same with a proximal term in the local loss: half the squared distance from the global
model. The FedProx of MFCL's code (Babakniya et al., 2023) has the sum of the tensors' distances, which are not squared.
Its pull does not weaken near the global model, and does not grow far from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeFloat
from torch import Tensor

from fedemu.algorithms.interface import (
    Ask,
    Context,
    LocalProgram,
    Model,
    Query,
    Reducer,
    Reply,
    Script,
    Tree,
    weighted_mean,
)
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.losses import tensor_distances
from fedemu.algorithms.training.objective import Pass, Term, proximity
from fedemu.algorithms.trees import add, without

Distance = Literal["squared", "tensors"]
"""What FedProx keeps small: the squared distance from the global model, or the sum of the tensors' distances."""


@dataclass(frozen=True)
class FedAvgState:
    """The global model: all of its variables."""

    variables: Tree


class FedAvg:
    """One ask a round. The global model moves by the mean of the deltas, and so do running statistics.

    ``local`` is the devices' program, or the ingredients of FedAvg's own one. ``average`` is the reducer of the deltas.
    """

    _average: Reducer = weighted_mean  # also for a subclass whose own __init__ does not call this one

    def __init__(self, local: LocalSGD | Ingredients, average: Reducer = weighted_mean) -> None:
        program = local.local_sgd() if isinstance(local, Ingredients) else local
        self.programs: Mapping[str, LocalProgram | Query] = {"train": program}
        self._average = average

    def init(self, variables: Tree, context: Context) -> FedAvgState:
        return FedAvgState(variables)

    def round(self, state: FedAvgState, context: Context) -> Script[FedAvgState]:
        reply: Reply = yield Ask("train", shared={"model": state.variables}, reduce={"delta": self._average})
        return FedAvgState(add(state.variables, reply.values["delta"]))

    def variables(self, state: FedAvgState) -> Tree:
        return state.variables


def fedavg(ingredients: Ingredients) -> FedAvg:
    """FedAvg. It has no options."""
    return FedAvg(ingredients)


def fedprox(ingredients: Ingredients, mu: NonNegativeFloat = 1.0, distance: Distance = "squared") -> FedAvg:
    """FedProx. ``mu`` is the coefficient of the proximal term. FedNTD and WSM compare with 1. With 0 it is FedAvg.

    ``distance = "tensors"`` is the term of MFCL's code, which goes with its ``mu`` of 0.01.
    """
    term = proximity(mu) if distance == "squared" else tensor_proximity(mu)
    return FedAvg(ingredients.local_sgd(term))


def tensor_proximity(coefficient: float) -> Term:
    """``coefficient / 2 · Σ ‖w_i - w_i,global‖`` over the trained tensors w_i, as in MFCL's code."""

    def term(model: Model, at: Pass) -> Tensor:
        return coefficient * tensor_distances(without(at.variables, model.buffers), at.shared["model"])

    return term
