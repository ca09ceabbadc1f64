"""Federated averaging (McMahan et al., 2017): the mean of the local models, weighted by their numbers of examples.

FedProx (Li et al., 2020) is the same with a proximal term in the local loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import NonNegativeFloat

from fedemu.algorithms.interface import Ask, Context, LocalProgram, Query, Reply, Script, Tree, weighted_mean
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.objective import proximity
from fedemu.algorithms.trees import add


@dataclass(frozen=True)
class FedAvgState:
    """The global model: all of its variables."""

    variables: Tree


class FedAvg:
    """One ask a round. The global model moves by the weighted mean of the deltas, and so do running statistics."""

    def __init__(self, local: LocalSGD) -> None:
        self.programs: Mapping[str, LocalProgram | Query] = {"train": local}

    def init(self, variables: Tree, context: Context) -> FedAvgState:
        return FedAvgState(variables)

    def round(self, state: FedAvgState, context: Context) -> Script[FedAvgState]:
        reply: Reply = yield Ask("train", shared={"model": state.variables}, reduce={"delta": weighted_mean})
        return FedAvgState(add(state.variables, reply.values["delta"]))

    def variables(self, state: FedAvgState) -> Tree:
        return state.variables


def fedavg(ingredients: Ingredients) -> FedAvg:
    """FedAvg. It has no options."""
    return FedAvg(ingredients.local_sgd())


def fedprox(ingredients: Ingredients, mu: NonNegativeFloat = 1.0) -> FedAvg:
    """FedProx. ``mu`` is the coefficient of the proximal term. FedNTD and WSM compare with 1. With 0 it is FedAvg."""
    return FedAvg(ingredients.local_sgd(proximity(mu)))
