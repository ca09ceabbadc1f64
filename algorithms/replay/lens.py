"""How a device looks at its samples with the global model: their features, and the directions of their gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import torch

from fedemu.algorithms.interface import Facts, Forest, Memory, Model, Tree
from fedemu.algorithms.replay.sample_gradients import Directions, SampleGradients
from fedemu.algorithms.replay.selection.candidates import Floats
from fedemu.algorithms.training.objective import Criterion
from fedemu.algorithms.trees import only

_ROWS: Final = 256


@dataclass(eq=False)
class Recall:
    """Gram matrices and scales by what they were made of, all with one model; ``room`` in bytes is for the newest.

    ``variables`` are compared by identity: a trainer gets the same tree for as long as the model is the same. So what
    is found is what would be computed, and a process that knows nothing yet computes it.
    """

    room: int
    variables: Tree = field(default_factory=dict)
    found: dict[bytes, tuple[Floats, Floats]] = field(default_factory=dict)

    def of(self, gradients: SampleGradients, key: bytes) -> Directions:
        """``Directions.of(gradients)``, computed once for the same key and model."""
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
    """``memory`` in bytes bounds what gradients take at a time, and an eighth of it what is remembered of them.

    ``shared["model"]`` may have variables that are no part of ``model``, as where a method sends more with it.
    """

    def __init__(self, model: Model, criterion: Criterion, memory: int) -> None:
        self.model = model
        self._criterion = criterion
        self._memory = memory
        self._recall = Recall(memory // 8)
        self._seen: tuple[Tree, Tree] = {}, {}

    def directions(self, memory: Memory, shared: Forest, facts: Facts) -> Directions:
        """The directions of the gradients of the samples' losses by the model's variables, and their Gram matrix.

        It is not computed again where another iteration asks for the same.
        """
        # Whether the device was asked before is no matter of its samples.
        facts = facts._replace(first_visit=torch.zeros_like(facts.first_visit))
        variables = self._variables(shared["model"])
        gradients = SampleGradients(self.model, self._criterion, variables, memory.batch, facts, self._memory)
        key = b"".join([memory.indices.tobytes(), *(fact.cpu().numpy().tobytes() for fact in facts)])
        return self._recall.of(gradients, key)

    @torch.no_grad()
    def features(self, memory: Memory, shared: Forest) -> Floats:
        """``[n, features]`` by the model, as in evaluation."""
        x, variables = memory.batch.x, self._variables(shared["model"])
        blocks = (x[first : first + _ROWS] for first in range(0, len(x), _ROWS))
        rows = [self.model.apply(variables, block, False)[0].features.double().cpu().numpy() for block in blocks]
        return np.concatenate(rows) if rows else np.zeros((0, 1))

    def _variables(self, sent: Tree) -> Tree:
        """The model's own; the same tree where the same was sent, as ``Recall`` goes by that."""
        if sent is not self._seen[0]:
            self._seen = sent, only(sent, self._names) if sent.keys() - self._names else sent
        return self._seen[1]

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.model.init(0))
