"""The question that makes a device select what it keeps of a period, and what is told of the kept samples.

That is the census, which counts them, and for the objective the sum of the directions of their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fedemu.algorithms.interface import Batch, Facts, Forest, Memory, Outcome, Tree
from fedemu.algorithms.replay.lens import Lens
from fedemu.algorithms.replay.selection.candidates import Candidates, Positions, Strategy
from fedemu.algorithms.trees import map_leaves, without

CENSUS: Final = "census"
"""The key of the census in a payload."""
KEPT: Final = "kept"
"""The key of the sum of gradient directions of the kept samples in a payload."""
MODEL: Final = "model"
"""The key of the global model in what devices are sent."""


@dataclass(frozen=True)
class Census:
    """Counts the samples that a device keeps: in all, by label and by period.

    ``labels`` and ``periods`` are the numbers of labels and of periods; 0 leaves out these counts.
    """

    labels: int = 0
    periods: int = 0

    def of(self, memory: Memory, keep: Positions) -> Tree:
        """The counts of the samples at the positions ``keep``.

        They are ``samples [1]``, ``labels [labels]`` and ``periods [periods]``, int64.
        """
        counts = {"samples": torch.tensor([len(keep)])}
        if self.labels:
            counts["labels"] = _counts(memory.batch.y.cpu()[torch.from_numpy(keep)], self.labels)
        if self.periods:
            counts["periods"] = _counts(torch.from_numpy(memory.periods[keep]), self.periods)
        return counts

    def zero(self) -> Tree:
        """The census of a device that keeps nothing."""
        sizes = {"samples": 1, "labels": self.labels, "periods": self.periods}
        return {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items() if size}


def _counts(values: Tensor, size: int) -> Tensor:
    return torch.bincount(values, minlength=size)


@dataclass(frozen=True, eq=False)
class Select:
    """A device keeps what the strategy chooses among its buffer and the period's samples, and sends their census.

    A device that selects late, from a sealed period, does the same. ``passes`` is 0 for strategies that do not look at
    the model, and 1 for those that do: the forward pass of herding counts as a whole pass, and gradients count as one
    pass, as if all of them fitted into the memory. Products of gradients and the solver's work are not counted.

    If ``measured`` has KEPT, the answer also has the sum of the gradient directions of the kept samples, by which the
    coordinator finds the objective of what the fleet keeps. A gradient that is not finite makes it zero.
    """

    lens: Lens
    strategy: Strategy
    census: Census
    labelled: bool
    passes: float = 0.0
    declares_label_counts: bool = False
    measured: frozenset[str] = frozenset()

    def payload(self, shared: Forest) -> Forest:
        kept = {KEPT: without(shared[MODEL], self.lens.model.buffers)} if KEPT in self.measured else {}
        return {CENSUS: self.census.zero(), **kept}

    def ask(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> tuple[Outcome, Tensor | None]:
        keep = self.choose(memory, shared, own, facts)
        kept = {KEPT: self._sum(memory, keep, shared, facts)} if KEPT in self.measured else {}
        return Outcome({CENSUS: self.census.of(memory, keep), **kept}, {}), torch.from_numpy(keep)

    def choose(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> Positions:
        """The ascending positions of the samples to keep, by the strategy."""
        candidates = Candidates(
            fresh=memory.fresh,
            seen=memory.seen,
            labels=memory.batch.y.cpu().numpy() if self.labelled else None,
            gram=lambda: self.lens.directions(memory, shared, facts).gram,
            features=lambda: self.lens.features(memory, shared),
        )
        return self.strategy(candidates, memory.budget, memory.generator)

    def _sum(self, memory: Memory, keep: Positions, shared: Forest, facts: Facts) -> Tree:
        """The sum of the gradient directions of the samples at the positions ``keep``, over the trained leaves."""
        rows = torch.from_numpy(keep)
        x, y, weight = (leaf[rows.to(leaf.device)] for leaf in memory.batch[:3])
        kept = replace(
            memory,
            batch=Batch(x, y, weight),
            indices=memory.indices[keep],
            fresh=memory.fresh[keep],
            periods=memory.periods[keep],
        )
        summed = self.lens.directions(kept, shared, facts).weighted_sum(np.ones(len(keep)))
        finite = all(bool(leaf.isfinite().all()) for leaf in summed.values())
        return summed if finite else map_leaves(torch.zeros_like, summed)
