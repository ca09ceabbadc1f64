"""What local training minimises: a criterion on the logits, plus the terms that a method adds to it.

``cross_entropy`` is a criterion. Any other ``Criterion`` works with every method that trains by cross-entropy.
``token_cross_entropy`` is the criterion for language data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedemu.algorithms.data.corpus import NO_TARGET
from fedemu.algorithms.interface import Batch, Facts, Forest, Model, Outputs, Tree
from fedemu.algorithms.training.losses import proximal, true_class
from fedemu.algorithms.trees import without
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.wording import an_object


class Loss(NamedTuple):
    """The ``value``, the buffers after the forward pass, and detached ``metrics``. Value and metrics are scalars.

    ``outputs`` are those of the forward pass, if the loss function hands them on to local terms.
    """

    value: Tensor
    buffers: Tree
    metrics: Tree
    outputs: Outputs | tuple[()] = ()


class LossFunction(Protocol):
    """A pure function of tensors. It is differentiated by the variables, and usable under ``torch.func.vmap``."""

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
"""(logits, batch, facts) -> the mean over the batch by its weights, zero-dimensional.

Logits are ``[batch, classes]``, or for texts ``[batch, length, vocabulary]``.
"""
Term = Callable[[Model, Pass], Tensor]
"""(model, forward pass) -> what a method adds to the criterion: zero-dimensional, with its coefficient."""


def cross_entropy(logits: Tensor, batch: Batch, facts: Facts) -> Tensor:
    """The mean cross-entropy in nats, weighted by ``batch.weight``; 0 for a batch of padding."""
    share = batch.weight / batch.weight.sum().clamp(min=1)
    target = true_class(logits, batch.y) * share[:, None]
    return -(logits.log_softmax(-1) * target).sum()


def token_cross_entropy(logits: Tensor, batch: Batch, facts: Facts) -> Tensor:
    """The mean cross-entropy in nats over the tokens to be predicted, weighted by their samples' ``batch.weight``.

    ``logits [batch, length, vocabulary]``; ``batch.x [batch, 2, length]`` holds the targets in its second row. The
    result is 0 if there is no token to be predicted.
    """
    targets = batch.x[:, 1]
    asked = targets != NO_TARGET
    weight = torch.where(asked, batch.weight[:, None], 0)
    likelihoods = logits.log_softmax(-1).gather(-1, torch.where(asked, targets, 0)[..., None])[..., 0]
    total = weight.sum()
    return -(likelihoods * weight).sum() / torch.where(total > 0, total, 1)


_MUST = "it must give a tensor without dimensions, such as the mean over the batch"


@dataclass(frozen=True)
class Objective:
    """The criterion plus the terms, from one forward pass of the model. The metric ``loss`` is the criterion alone.

    Raises ConfigurationError if the criterion or a term gives something else than it must.
    """

    model: Model
    criterion: Criterion = cross_entropy
    terms: tuple[Term, ...] = ()

    def __call__(self, variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
        outputs, buffers = self.model.apply(variables, batch.x, True)
        criterion = self.criterion(outputs.logits, batch, facts)
        if not isinstance(criterion, Tensor):
            raise ConfigurationError(f"the loss gave {an_object(criterion)}; {_MUST}")
        if criterion.ndim:
            raise ConfigurationError(f"the loss gave a tensor of the shape {list(criterion.shape)}; {_MUST}")
        value = criterion
        for term in self.terms:
            value = value + _value_of(term, self.model, Pass(variables, outputs, batch, shared, own, facts))
        return Loss(value, buffers, {"loss": criterion.detach()})


@dataclass(frozen=True)
class LossWithTerms:
    """A loss of a method's own plus local ``terms``. The terms see the forward pass of that loss.

    If the loss does not hand on its outputs, the terms cost one more forward pass of ``model``. Raises
    ConfigurationError if a term gives something else than it must.
    """

    model: Model
    loss: LossFunction
    terms: tuple[Term, ...]

    def __call__(self, variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
        value, buffers, metrics, outputs = self.loss(variables, batch, shared, own, facts)
        if not isinstance(outputs, Outputs):
            outputs, _ = self.model.apply(variables, batch.x, True)
        for term in self.terms:
            value = value + _value_of(term, self.model, Pass(variables, outputs, batch, shared, own, facts))
        return Loss(value, buffers, metrics)


@dataclass(frozen=True)
class NamedTerm:
    """A term with the name by which errors speak of it; ``previous`` as of the ``LocalTerm``."""

    name: str
    term: Term
    previous: bool = False

    def __call__(self, model: Model, at: Pass) -> Tensor:
        return self.term(model, at)


def _value_of(term: Term, model: Model, at: Pass) -> Any:
    """What a term gives, which is a tensor without dimensions or a number. Raises ConfigurationError otherwise."""
    value: Any = term(model, at)
    if isinstance(value, Real) or (isinstance(value, Tensor) and not value.ndim):
        return value
    which = f"the term {term.name!r}" if isinstance(term, NamedTerm) else "a term of the loss"
    gave = f"a tensor of the shape {list(value.shape)}" if isinstance(value, Tensor) else an_object(value)
    raise ConfigurationError(f"{which} gave {gave}; {_MUST}")


def loss_with_terms(model: Model, loss: LossFunction, terms: tuple[Term, ...]) -> LossFunction:
    """The loss plus local terms; without terms it is the loss itself."""
    if not terms:
        return loss
    if isinstance(loss, Objective):
        return replace(loss, terms=(*loss.terms, *terms))
    return LossWithTerms(model, loss, terms)


def proximity(coefficient: float) -> Term:
    """The term of FedProx (Li et al., 2020): ``coefficient / 2 · ‖w - w_global‖²`` over the trained variables."""

    def term(model: Model, at: Pass) -> Tensor:
        return coefficient * proximal(without(at.variables, model.buffers), at.shared["model"])

    return term
