"""What local training minimises: a criterion on the logits, plus the terms that a method adds to it.

``cross_entropy`` is a criterion; any other of its shape goes with every method that trains by cross-entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedemu.algorithms.interface import Batch, Facts, Forest, Model, Outputs, Tree
from fedemu.algorithms.losses import proximal
from fedemu.algorithms.trees import without


class Loss(NamedTuple):
    """``value``, zero-dimensional; the buffers after the forward pass; ``metrics``, zero-dimensional and detached."""

    value: Tensor
    buffers: Tree
    metrics: Tree


class LossFunction(Protocol):
    """A pure function of tensors, differentiated by the variables; usable under ``torch.func.vmap``."""

    def __call__(self, variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss: ...


class Pass(NamedTuple):
    """One forward pass in training, as the terms of an objective see it."""

    variables: Tree
    outputs: Outputs
    batch: Batch
    shared: Forest
    own: Tree
    facts: Facts


Criterion = Callable[[Tensor, Batch, Facts], Tensor]
"""(logits ``[batch, classes]``, batch, facts) -> the mean over the batch by its weights, zero-dimensional."""
Term = Callable[[Model, Pass], Tensor]
"""What a method adds to the criterion, zero-dimensional and already multiplied by its coefficient."""


def cross_entropy(logits: Tensor, batch: Batch, facts: Facts) -> Tensor:
    """The mean cross-entropy in nats, weighted by ``batch.weight``; 0 for a batch of padding."""
    share = batch.weight / batch.weight.sum().clamp(min=1)
    # A comparison, because one_hot reads values and so can't be mapped over devices.
    target = (torch.arange(logits.shape[-1], device=logits.device) == batch.y[:, None]) * share[:, None]
    return -(logits.log_softmax(-1) * target).sum()


@dataclass(frozen=True)
class Objective:
    """Criterion plus terms over one forward pass of the model; ``metrics`` holds the criterion as ``loss``."""

    model: Model
    criterion: Criterion = cross_entropy
    terms: tuple[Term, ...] = ()

    def __call__(self, variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
        outputs, buffers = self.model.apply(variables, batch.x, True)
        criterion = self.criterion(outputs.logits, batch, facts)
        value = criterion
        for term in self.terms:
            value = value + term(self.model, Pass(variables, outputs, batch, shared, own, facts))
        return Loss(value, buffers, {"loss": criterion.detach()})


def proximity(coefficient: float) -> Term:
    """FedProx's term: ``coefficient / 2 · ‖w - w_global‖²`` over the trained variables."""

    def term(model: Model, at: Pass) -> Tensor:
        return coefficient * proximal(without(at.variables, model.buffers), at.shared["model"])

    return term
