"""A lens: how a device sees its samples with the global model, as features or as directions of gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fedemu.algorithms.interface import Facts, Forest, Memory, Model, Tree
from fedemu.algorithms.models.growing import SEEN
from fedemu.algorithms.replay.directions import Directions
from fedemu.algorithms.replay.sample_gradients import SampleGradients
from fedemu.algorithms.replay.selection.candidates import Floats
from fedemu.algorithms.training.objective import Criterion
from fedemu.algorithms.trees import only

_ROWS: Final = 256
"""The number of samples in one forward pass for features."""


@dataclass(eq=False)
class Recall:
    """Remembers the Gram matrices and scales that were computed with one model; the newest take at most ``room`` bytes.

    The model's ``variables`` are compared by identity, because a trainer gets the same tree as long as the model is the
    same. So a remembered matrix equals the one that would be computed.
    """

    room: int
    variables: Tree = field(default_factory=dict)
    found: dict[bytes, tuple[Floats, Floats]] = field(default_factory=dict)

    def of(self, gradients: SampleGradients, key: bytes) -> Directions:
        """``Directions.of(gradients)``, which is computed only once for the same key and model."""
        if gradients.variables is not self.variables:
            self.variables, self.found = gradients.variables, {}
        if key in self.found:
            return Directions(gradients, *self.found[key])
        directions = Directions.of(gradients)
        self.found[key] = directions.gram, directions.scales
        while sum(gram.nbytes for gram, _ in self.found.values()) > self.room:
            del self.found[next(iter(self.found))]
        return directions


class Lens:
    """Looks at samples with ``model`` and the loss ``criterion``.

    Gradients take at most ``memory`` bytes at a time, and remembered Gram matrices at most an eighth of it.
    ``shared["model"]`` may have variables that are no part of ``model``, if a method sends more with it.
    """

    def __init__(self, model: Model, criterion: Criterion, memory: int) -> None:
        self.model = model
        self._criterion = criterion
        self._memory = memory
        self._recall = Recall(memory // 8)
        self._seen: tuple[Tree, Tree] = {}, {}

    def directions(self, memory: Memory, shared: Forest, facts: Facts) -> Directions:
        """The directions of the gradients of the samples' losses by the model's variables, and their Gram matrix.

        If another iteration asks for the same, nothing is computed again.
        """
        # The loss of a sample does not depend on whether the device was asked before.
        facts = facts._replace(first_visit=torch.zeros_like(facts.first_visit))
        variables = self._variables(shared["model"])
        gradients = SampleGradients(self.model, self._criterion, variables, memory.batch, facts, self._memory)
        told = (fact.cpu().numpy().tobytes() for fact in facts if fact is not None)
        key = b"".join([memory.indices.tobytes(), *told])
        return self._recall.of(gradients, key)

    @torch.no_grad()
    def features(self, memory: Memory, shared: Forest) -> Floats:
        """The features ``[n, features]`` of the samples, by the model in evaluation mode."""
        x, variables = memory.batch.x, self._variables(shared["model"])
        blocks = (x[first : first + _ROWS] for first in range(0, len(x), _ROWS))
        rows = [self.model.apply(variables, block, False)[0].features.double().cpu().numpy() for block in blocks]
        return np.concatenate(rows) if rows else np.zeros((0, 1))

    @torch.no_grad()
    def logits(self, memory: Memory, shared: Forest) -> Tensor:
        """The logits ``[n, classes]`` of the samples, by the model in evaluation mode; NaN for unseen classes."""
        x, variables = memory.batch.x, self._variables(shared["model"])
        rows = [self.model.apply(variables, block, False)[0].logits for block in torch.split(x, _ROWS)]
        seen = variables.get(SEEN)
        logits = torch.cat(rows)
        return logits if seen is None else torch.where(seen > 0, logits, torch.nan)

    def _variables(self, sent: Tree) -> Tree:
        """The model's own variables. If the same tree was sent again, it is the same tree, as ``Recall`` needs."""
        if sent is not self._seen[0]:
            self._seen = sent, only(sent, self._names) if sent.keys() - self._names else sent
        return self._seen[1]

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.model.init(0))
