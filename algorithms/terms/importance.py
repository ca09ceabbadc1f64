"""The question that devices are asked when a task ends: how important are the variables for what they have learnt?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fedemu.algorithms.interface import Batch, Facts, Forest, Memory, Model, Outcome, Tree
from fedemu.algorithms.terms.local_term import COUNTS, Importance
from fedemu.algorithms.trees import SUM_UNIT, add, gradients_of, map_leaves, scale, widened, without, zeros_like
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.wording import an_object

MOST_BYTES: Final = 2**26
"""The size in bytes of the gradients of single samples that are held at once; at least one sample is."""


@dataclass(frozen=True, eq=False)
class AskImportance:
    """A device sums the importances of its new samples, for each term in ``measures``, with ``shared["model"]``.

    The payload holds a tree of the trained variables for each term, in ``SUM_UNIT``, and the numbers of samples under
    ``COUNTS``. A device with more samples than a term takes draws some of them, and multiplies their mean by the number
    of all of them. The samples of its replay buffer are of earlier tasks and are left out. The model is in evaluation
    mode. ``passes`` counts one pass for each term.
    """

    model: Model
    measures: Mapping[str, Importance]
    declares_label_counts: bool = False

    @property
    def passes(self) -> float:
        return float(len(self.measures))

    def payload(self, shared: Forest) -> Forest:
        trained = widened(without(shared["model"], self.model.buffers))
        return {**dict.fromkeys(self.measures, trained), COUNTS: dict.fromkeys(self.measures, torch.zeros(1))}

    def ask(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> tuple[Outcome, Tensor | None]:
        new = np.flatnonzero(memory.fresh)
        payload: dict[str, Tree] = {}
        for name, importance in self.measures.items():
            rows = new
            if len(new) > importance.samples:
                rows = np.sort(memory.generator.choice(new, importance.samples, replace=False))
            share = len(new) / max(1, len(rows))
            total = summed(self.model, importance, shared["model"], memory.batch, torch.from_numpy(rows), facts)
            payload[name] = scale(scale(total, share), 1 / SUM_UNIT)
        counts = dict.fromkeys(self.measures, torch.tensor([float(len(new))]))
        return Outcome({**payload, COUNTS: counts}, own), None


def summed(model: Model, importance: Importance, variables: Tree, batch: Batch, rows: Tensor, facts: Facts) -> Tree:
    """The sum over the samples at ``rows`` of the strengths of their gradients, by trained variable.

    It is float32 at least. Raises ConfigurationError if the value of a sample or a strength has another shape than it
    must.
    """
    trained = without(variables, model.buffers)
    total: Tree = zeros_like(widened(trained))
    size = sum(leaf.numel() * leaf.element_size() for leaf in trained.values())
    rows = rows.to(batch.y.device)
    for block in torch.split(rows, max(1, MOST_BYTES // max(1, size))):
        if not len(block):
            continue
        slopes = widened(_slopes(model, importance, variables, batch, block, facts))
        total = add(total, map_leaves(lambda leaf: _strength(importance, leaf).sum(0), slopes))
    return total


def _strength(importance: Importance, slope: Tensor) -> Tensor:
    made: object = importance.strength(slope)
    if not isinstance(made, Tensor) or made.shape != slope.shape:
        what = list(made.shape) if isinstance(made, Tensor) else an_object(made)
        raise ConfigurationError(
            f"the strength of gradients {list(slope.shape)} is {what}; it must be a tensor of the same shape"
        )
    return made


@torch.enable_grad()
def _slopes(model: Model, importance: Importance, variables: Tree, batch: Batch, rows: Tensor, facts: Facts) -> Tree:
    """The gradients ``[rows, ...]`` of single samples, by trained variable."""
    # Each sample gets variables of its own, so that gradients are not summed over samples.
    own = map_leaves(
        lambda leaf: leaf.detach().expand(len(rows), *leaf.shape).requires_grad_(), without(variables, model.buffers)
    )

    def value(own: Tree, x: Tensor, y: Tensor) -> Tensor:
        outputs, _ = model.apply({**variables, **own}, x[None], False)
        made: object = importance.value(outputs.logits, Batch(x[None], y[None], torch.ones(1, device=y.device)), facts)
        if not isinstance(made, Tensor) or made.ndim:
            what = f"a tensor of the shape {list(made.shape)}" if isinstance(made, Tensor) else an_object(made)
            raise ConfigurationError(f"the value of a sample is {what}; it must be a tensor without dimensions")
        return made

    values = torch.func.vmap(value)(own, batch.x[rows], batch.y[rows])
    return gradients_of(values.sum(), own)
