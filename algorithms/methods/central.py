"""Central training on the public data alone: no device is asked for anything.

Flashback (Aljahdali et al., 2024) draws it as a baseline in figures 3 and 12: what the coordinator reaches without the
devices' data. The paper gives no details. Here a round is some passes over the public training part by cross-entropy
and SGD, at the rates of ``fedavg_finetuned``. Each round goes on from the model of the round before, with a momentum
of 0. Nothing stops the training early, so the rows show what a reader would stop at.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from fedemu.algorithms.interface import Context, LocalProgram, Query, Script, Tree
from fedemu.algorithms.methods.fedavg import FedAvgState
from fedemu.algorithms.methods.finetuning import labelled
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.server_training import ServerTraining


class Central:
    """One server job a round."""

    def __init__(self, server: ServerTraining) -> None:
        self.programs: Mapping[str, LocalProgram | Query] = {}
        self._server = server

    def init(self, variables: Tree, context: Context) -> FedAvgState:
        return FedAvgState(variables)

    def round(self, state: FedAvgState, context: Context) -> Script[FedAvgState]:
        trained = yield from self._server.train("central training", state.variables, lambda public: {}, context)
        return FedAvgState(trained.last)

    def variables(self, state: FedAvgState) -> Tree:
        return state.variables


def central(
    ingredients: Ingredients,
    server_lr: PositiveFloat = 0.01,
    server_momentum: NonNegativeFloat = 0.9,
    server_batch: PositiveInt = 64,
    server_epochs: PositiveInt = 5,
) -> Central:
    """Central training. ``server_epochs`` is the number of passes over the public training part in each round.

    Raises ConfigurationError without public data, without classes, or with another criterion than cross-entropy.
    """
    ingredients.require_classes("central")
    ingredients.require_cross_entropy("central")
    ingredients.require_public("central")
    server = ServerTraining.by_passes(
        ingredients.model, labelled, server_lr, server_momentum, server_batch, server_epochs, patience=server_epochs
    )
    return Central(server)
