"""Dark experience replay: replayed samples keep the logits that they had when they entered the replay buffer.

DER++ (Buzzega et al., "Dark Experience for General Continual Learning: a Strong, Simple Baseline", 2020). The loss of a
batch with new samples and replayed ones is the mean over its rows of

    a new sample:       the cross-entropy
    a replayed sample:  ``beta`` · cross-entropy + ``alpha`` · the mean over classes of ``(z - z_noted)²``

The cross-entropies with weight 1 are those of the method; the term adds the rest. The logits ``z_noted`` are those of
the global model at the end of the sample's period, when the device chose to keep it. A device that chooses late takes
the model that it is sent then. They are kept in the device's replay buffer, beside the sample.

The paper learns from a stream on one machine. It notes the logits of the model in training, draws two batches of its
buffer for each batch of new samples, and takes the mean of each. Here a batch holds both kinds of samples, each sample
of a device is met once per epoch, and all rows count the same. Its networks have all classes from the beginning. Here
classes that the model had not seen when the sample was noted are left out. ``alpha`` 0.1 and ``beta`` 1 are choices of
this project; the paper tunes both for each data set.
"""

from __future__ import annotations

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from fedemu.algorithms.interface import LOGITS, REPLAYED, Model
from fedemu.algorithms.terms.local_term import LocalTerm
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import Pass, Term, cross_entropy
from fedemu.protocol.errors import ConfigurationError


def der(ingredients: Ingredients, alpha: NonNegativeFloat = 0.1, beta: NonNegativeFloat = 1.0) -> LocalTerm:
    """DER++; with ``beta = 0`` it is DER, whose replayed samples have no cross-entropy.

    Raises ConfigurationError if devices have no replay buffers, if the data are texts, or if ``beta`` is not 1 but the
    criterion is not cross-entropy. With another ``beta`` than 1 methods with a loss of their own refuse the term: what
    is not in their loss as a whole cannot be taken out of it, and the rest could fall without end.
    """
    if ingredients.kept == 0:
        raise ConfigurationError(
            "algorithm.terms.der learns from replay buffers, but replay.strategy = 'none'; "
            "set replay.strategy = 'naive_uniform' and replay.capacity"
        )
    if ingredients.language:
        raise ConfigurationError(
            "algorithm.terms.der compares classes, but the data are texts whose tokens are predicted; remove this term"
        )
    if beta != 1 and ingredients.criterion is not cross_entropy:
        raise ConfigurationError(
            f"algorithm.terms.der.beta = {beta:g} weighs the cross-entropy of replayed samples, but algorithm.loss is "
            "another loss; set beta = 1, or algorithm.loss = 'cross_entropy'"
        )
    notes = {LOGITS: (ingredients.classes,), REPLAYED: ()}
    otherwise = "" if beta == 1 else "algorithm.terms.der.beta = 1"
    return LocalTerm("der", remembered_logits(alpha, beta), previous=False, notes=notes, otherwise=otherwise)


def remembered_logits(alpha: float, beta: float) -> Term:
    """What the rows of replayed samples add to the mean cross-entropy of a batch."""

    def term(model: Model, at: Pass) -> Tensor:
        batch = at.batch
        if LOGITS not in batch.notes:
            raise ValueError("algorithm.terms.der needs notes of samples, but the method makes batches without them")
        noted, replayed = batch.notes[LOGITS], batch.notes[REPLAYED]
        # A method may have joined samples of its own to the end of the batch.
        rows = len(replayed)
        share = (batch.weight / batch.weight.sum().clamp(min=1))[:rows] * replayed
        value = alpha * (share * distance(at.outputs.logits[:rows], noted)).sum()
        if beta != 1:
            of_replayed = batch._replace(
                weight=batch.weight * torch.nn.functional.pad(replayed, (0, len(batch.y) - rows))
            )
            value = value + (beta - 1) * share.sum() * cross_entropy(at.outputs.logits, of_replayed, at.facts)
        return value

    return term


def distance(logits: Tensor, noted: Tensor) -> Tensor:
    """The mean over classes of ``(logits - noted)²`` for each row ``[batch]``; 0 for a row of which nothing is noted.

    ``logits`` and ``noted [batch, classes]``. Classes for which NaN is noted are left out.
    """
    known = noted.isfinite()
    squares = torch.where(known, logits - torch.where(known, noted, 0), 0).square()
    return squares.sum(-1) / known.sum(-1).clamp(min=1)
