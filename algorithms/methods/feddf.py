"""FedDF (Lin et al., 2020), "Ensemble Distillation for Robust Model Fusion in Federated Learning".

The local models are averaged. Then the average learns, on public data without labels, to predict what the local models
predict together. The loss is ``KL(softmax(mean_k z_k / T) ‖ softmax(z / T))``, where ``z_k`` are the logits of the
local models in evaluation mode; their mean is even. The labels of the public data are read only in its validation part,
to stop early.

Defaults are the authors': T = 1, Adam at 0.001 with cosine decay to 0, at most 10,000 batches of 128, an evaluation
every 100 batches, the end after 1,000 batches without a better evaluation, and gradients clipped at a norm of 5. The
authors' devices train for 40 epochs a round, which is a setting of local training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.interface import Ask, Context, Handle, Labelled, Reply, Script, Tree, collect, weighted_mean
from fedemu.algorithms.methods.fedavg import FedAvg, FedAvgState
from fedemu.algorithms.models.growing import SEEN, among_seen
from fedemu.algorithms.training.adam import Adam
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.server_training import ServerTraining, predict
from fedemu.algorithms.trees import add


class FedDF(FedAvg):
    """FedAvg, whose average is trained further by a server job.

    A device without samples has trained nothing, so its model is no teacher.
    """

    def __init__(self, local: LocalSGD, server: ServerTraining, temperature: float) -> None:
        super().__init__(local)
        self._model = local.model
        self._server = server
        self._temperature = temperature

    def round(self, state: FedAvgState, context: Context) -> Script[FedAvgState]:
        reduce = {"delta": weighted_mean, "locals": collect.of("delta")}
        reply: Reply = yield Ask("train", {"model": state.variables}, reduce)
        average = add(state.variables, reply.values["delta"])
        teachers = [local for local, told in zip(reply.values["locals"], reply.devices, strict=True) if told.examples]
        if not teachers:
            return FedAvgState(average)
        prepare = partial(self._lessons, state.variables, teachers)
        trained = yield from self._server.train("distillation", average, prepare, context)
        return FedAvgState(trained.variables)

    def _lessons(self, variables: Tree, locals: Sequence[Handle], public: Labelled) -> Tree:
        """The probabilities ``[n, classes]`` that the local models predict together."""
        ensemble = torch.zeros(())
        for local in locals:
            ensemble = ensemble + predict(self._model, add(variables, local.load()), public.x) / len(locals)
        if SEEN in variables:
            # The mean of highest logits can lie far above the highest mean, if each model is sure of another class.
            ensemble = among_seen(variables, ensemble)
        return {"probabilities": (ensemble / self._temperature).softmax(-1)}


def agreement(temperature: float, logits: Tensor, y: Tensor, lessons: Tree, rows: Tensor) -> Tensor:
    """The server's loss: the mean of ``KL(ensemble ‖ softmax(logits / temperature))``. It does not use labels."""
    likelihoods = (logits / temperature).log_softmax(-1)
    return functional.kl_div(likelihoods, lessons["probabilities"][rows], reduction="batchmean")


def cosine(lr: float, batches: int, batch: int) -> float:
    """The learning rate at ``batch`` of ``batches``, from ``lr`` down to 0 along half a cosine."""
    return lr * (1 + math.cos(math.pi * batch / batches)) / 2


def feddf(
    ingredients: Ingredients,
    temperature: PositiveFloat = 1.0,
    server_lr: PositiveFloat = 1e-3,
    server_batch: PositiveInt = 128,
    server_batches: NonNegativeInt = 10_000,
    evaluate_every: PositiveInt = 100,
    patience: PositiveInt = 1_000,
    clip_norm: PositiveFloat = 5.0,
) -> FedDF:
    """FedDF. ``server_batches`` and ``patience`` are numbers of batches, rounded up to whole evaluations.

    Devices may train by any criterion. Raises ConfigurationError without public data or without classes.
    """
    ingredients.require_classes("feddf")
    ingredients.require_unheated("feddf", temperature=temperature)
    ingredients.require_public("feddf")
    steps = -(-server_batches // evaluate_every)
    server = ServerTraining(
        ingredients.model,
        partial(agreement, temperature),
        Adam(),
        partial(cosine, server_lr, steps * evaluate_every),
        server_batch,
        steps,
        -(-patience // evaluate_every),
        batches=evaluate_every,
        clip_norm=clip_norm,
    )
    return FedDF(ingredients.local_sgd(), server, temperature)
