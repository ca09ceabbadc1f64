"""FedAvg with server fine-tuning: after averaging, the global model is trained on the labels of the public data.

This is a baseline of Flashback (section 5, figure 6), which separates the effect of public labels from that of
distillation. The paper gives no details. Here the server trains by cross-entropy in the same way in which Flashback's
server trains by distillation.
"""

from __future__ import annotations

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.interface import Context, Script, Tree
from fedemu.algorithms.methods.fedavg import FedAvg, FedAvgState
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.server_training import ServerTraining


class FinetunedFedAvg(FedAvg):
    """A round of FedAvg, then a server job on the public data."""

    def __init__(self, local: LocalSGD, server: ServerTraining) -> None:
        super().__init__(local)
        self._server = server

    def round(self, state: FedAvgState, context: Context) -> Script[FedAvgState]:
        average = yield from super().round(state, context)
        trained = yield from self._server.train("fine-tuning", average.variables, lambda public: {}, context)
        return FedAvgState(trained.variables)


def labelled(logits: Tensor, y: Tensor, lessons: Tree, rows: Tensor) -> Tensor:
    """The server's loss: cross-entropy, without lessons."""
    return functional.cross_entropy(logits, y)


def fedavg_finetuned(
    ingredients: Ingredients,
    server_lr: PositiveFloat = 0.01,
    server_momentum: NonNegativeFloat = 0.9,
    server_batch: PositiveInt = 64,
    server_epochs: NonNegativeInt = 50,
    patience: PositiveInt = 5,
) -> FinetunedFedAvg:
    """FedAvg with fine-tuning, until ``patience`` epochs bring no better accuracy on the public validation part.

    Devices may train by any criterion. Raises ConfigurationError without public data or without classes.
    """
    ingredients.require_classes("fedavg_finetuned")
    ingredients.require_public("fedavg_finetuned")
    server = ServerTraining.by_passes(
        ingredients.model, labelled, server_lr, server_momentum, server_batch, server_epochs, patience
    )
    return FinetunedFedAvg(ingredients.local_sgd(), server)
