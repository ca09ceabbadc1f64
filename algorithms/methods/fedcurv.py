"""FedCurv (Shoham et al., "Overcoming Forgetting in Federated Learning on Non-IID Data", 2019).

After training, device j has weights ``θ_j`` and the diagonal ``u_j`` of their Fisher information: the mean over its
samples of the squared gradient of the loss, at the true labels. Device i then minimises

    ``loss(θ) + penalty · sum_{j≠i} sum_k u_jk (θ_k - θ_jk)²``,

which up to a constant is ``loss + penalty · (⟨P, θ²⟩ - 2⟨Q, θ⟩)`` with ``P = sum_{j≠i} u_j`` and
``Q = sum_{j≠i} u_j θ_j``. ``penalty`` is the paper's λ.

The coordinator keeps the sums over the latest terms of all devices that have replied so far. A device keeps its own
terms, subtracts them from the sums that it receives, and sends their changes. So the sums always are those of the terms
that the accepted devices keep. The traffic is that of three models in place of one, both ways. The gradient of each
single sample takes a step; with 5 epochs of training a round takes two to three times as long as in federated
averaging.

Defaults: λ = 1, and at most 500 samples for the diagonal (FedNTD's comparison); models are averaged by examples.

FedNTD's code differs in two points. It squares the mean gradients of minibatches instead of those of samples, which
makes the diagonal smaller by about the size of a batch (``fisher = "batches"``, as in FedNTD's presets). By mistake it
also removes a device's terms from the sums for all devices that train after it; this is not offered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from fedemu.algorithms.interface import (
    REPLAYED,
    Ask,
    Batch,
    Context,
    Facts,
    Forest,
    LocalProgram,
    Model,
    Outcome,
    Query,
    Reply,
    Script,
    Stage,
    Tree,
    total,
    weighted_mean,
)
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD, Training, first_batches
from fedemu.algorithms.training.losses import curvature_penalty
from fedemu.algorithms.training.mixing import rows_matter
from fedemu.algorithms.training.objective import LossFunction, Objective, Pass, Term
from fedemu.algorithms.trees import add, flatten, map_leaves, only, subtract, unflatten, widened, without, zeros_like

Fisher = Literal["samples", "batches"]
"""Which gradients are squared: those of single samples, or the mean gradients of batches."""


class Curving(NamedTuple):
    """The carry: local training, then the sum of squared gradients, and the number of ``batches`` in this sum."""

    training: Training
    squares: Tree
    batches: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class CurvatureSGD(LocalSGD):
    """Local training, and then the Fisher diagonal of ``likelihood`` at the trained weights.

    The diagonal is the mean, over at most ``fisher_batches`` batches, of the squared mean gradient of
    ``fisher_batch_size`` samples. ``shared`` holds ``model``, and the fleet's sums as ``fisher`` and ``weighted``. The
    payload holds ``delta``, and the changes of the device's own terms as ``fisher`` and ``weighted``. ``own`` holds the
    terms themselves. A device without samples keeps its terms.
    """

    likelihood: LossFunction
    fisher_batches: int
    fisher_batch_size: int

    @property
    def passes(self) -> float:
        """The epochs, and one pass for the diagonal. That is too much if the diagonal uses only some of the samples."""
        return super().passes + 1.0

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        some = first_batches(self.fisher_batches, self.fisher_batch_size)
        matter = rows_matter(self.model)
        training = Stage(self.plan, self.train, self.augment, matter)
        return training, Stage(some, self.square, self.augment, matter)

    def initial_own(self, shared: Forest) -> Tree:
        return flatten({key: zeros_like(shared[key]) for key in ("fisher", "weighted")})

    def payload(self, shared: Forest) -> Forest:
        return {"delta": shared["model"], "fisher": shared["fisher"], "weighted": shared["weighted"]}

    def begin(self, shared: Forest, own: Tree, facts: Facts) -> Any:
        return Curving(super().begin(shared, own, facts), zeros_like(shared["fisher"]), torch.zeros_like(facts.lr))

    def train(
        self, carry: Curving, batch: Batch, shared: Forest, own: Tree, facts: Facts, noise: Tree
    ) -> tuple[Curving, Tree]:
        """A step of the first stage: local training."""
        training, metrics = self.step(carry.training, batch, shared, own, facts, noise)
        return carry._replace(training=training), metrics

    def square(
        self, carry: Curving, batch: Batch, shared: Forest, own: Tree, facts: Facts, noise: Tree
    ) -> tuple[Curving, Tree]:
        """A step of the second stage: it adds one squared gradient."""
        buffers = only(carry.training.variables, self.model.buffers)
        if self.fisher_batch_size == 1:
            # A new sample alone has no other to be told from, and the loss of er_ace would be 0.
            batch = batch._replace(notes={name: note for name, note in batch.notes.items() if name != REPLAYED})

        def value(trained: Tree) -> Tensor:
            return self.likelihood({**trained, **buffers}, batch, shared, own, facts).value

        gradients = torch.func.grad(value)(without(carry.training.variables, self.model.buffers))
        squares = map_leaves(lambda square, leaf: torch.addcmul(square, leaf, leaf), carry.squares, widened(gradients))
        return carry._replace(squares=squares, batches=carry.batches + 1), {}

    def finish(self, carry: Any, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        trained = super().finish(carry.training, shared, own, facts).payload
        batches = carry.batches.clamp(min=1)
        fisher = map_leaves(lambda square: square / batches, carry.squares)
        weighted = map_leaves(torch.mul, fisher, carry.training.variables)
        made = carry.batches > 0
        terms = map_leaves(
            lambda new, old: torch.where(made, new, old), flatten({"fisher": fisher, "weighted": weighted}), own
        )
        return Outcome({**trained, **unflatten(subtract(terms, own))}, terms)


def curvature(penalty: float) -> Term:
    """``penalty · (⟨P, θ²⟩ - 2⟨Q, θ⟩)`` over the trained variables; P and Q are the fleet's sums minus the device's."""

    def term(model: Model, at: Pass) -> Tensor:
        others = {key: subtract(at.shared[key], terms) for key, terms in unflatten(at.own).items()}
        trained = widened(without(at.variables, model.buffers))
        return penalty * curvature_penalty(trained, others["fisher"], others["weighted"])

    return term


@dataclass(frozen=True)
class FedCurvState:
    """All variables of the global model, and the fleet's sums of ``u`` and ``u·θ`` for the trained variables.

    The sums are float32 at least.
    """

    variables: Tree
    fisher: Tree
    weighted: Tree


class FedCurv:
    """One ask a round. Models are averaged by examples, and the changes of the Fisher terms are added up."""

    def __init__(self, local: CurvatureSGD) -> None:
        self.programs: Mapping[str, LocalProgram | Query] = {"train": local}
        self._buffers = local.model.buffers

    def init(self, variables: Tree, context: Context) -> FedCurvState:
        trained = widened(without(variables, self._buffers))
        return FedCurvState(variables, zeros_like(trained), zeros_like(trained))

    def round(self, state: FedCurvState, context: Context) -> Script[FedCurvState]:
        reply: Reply = yield Ask(
            "train",
            shared={"model": state.variables, "fisher": state.fisher, "weighted": state.weighted},
            reduce={"delta": weighted_mean, "fisher": total, "weighted": total},
        )
        return FedCurvState(
            add(state.variables, reply.values["delta"]),
            add(state.fisher, reply.values["fisher"]),
            add(state.weighted, reply.values["weighted"]),
        )

    def variables(self, state: FedCurvState) -> Tree:
        return state.variables


def fedcurv(
    ingredients: Ingredients, penalty: NonNegativeFloat = 1.0, samples: PositiveInt = 500, fisher: Fisher = "samples"
) -> FedCurv:
    """FedCurv. ``penalty`` is λ, and at most ``samples`` samples of a device make its Fisher diagonal.

    With ``fisher = "batches"`` this number is rounded up to whole batches.
    Raises ConfigurationError if the model has batch normalisation but gradients of single samples are needed.
    """
    if fisher == "samples":
        ingredients.require_no_batch_statistics("fedcurv", "the gradient of a single sample has no batch")
    size = 1 if fisher == "samples" else ingredients.batch_size
    local = ingredients.training(
        CurvatureSGD,
        curvature(penalty),
        likelihood=Objective(ingredients.model, ingredients.criterion),
        fisher_batches=math.ceil(samples / size),
        fisher_batch_size=size,
    )
    return FedCurv(local)
