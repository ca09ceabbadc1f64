"""A selection that also notes the logits of each sample that enters the replay buffer, for dark experience replay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedemu.algorithms.interface import LOGITS, Facts, Forest, Measuring, Memory, Outcome, Query, Tree
from fedemu.algorithms.replay.lens import Lens


@dataclass(frozen=True, eq=False)
class NotingLogits:
    """The selection ``inner``, whose kept samples get the note LOGITS ``[kept, classes]``.

    A sample that was in the buffer keeps its note. A new one gets the logits of ``shared["model"]`` in evaluation mode,
    NaN for classes that this model has not seen. If no sample is kept, there is no note. ``passes`` are those of
    ``inner``: the forward pass is not counted.
    """

    inner: Query
    lens: Lens

    @property
    def passes(self) -> float:
        return self.inner.passes

    @property
    def declares_label_counts(self) -> bool:
        return self.inner.declares_label_counts

    @property
    def measured(self) -> frozenset[str]:
        """The trees that measure ``inner``."""
        return self.inner.measured if isinstance(self.inner, Measuring) else frozenset()

    def payload(self, shared: Forest) -> Forest:
        return self.inner.payload(shared)

    def ask(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> tuple[Outcome, Tensor | None]:
        outcome, keep = self.inner.ask(memory, shared, own, facts)
        if keep is None or not len(keep):
            return outcome, keep
        noted = self.lens.logits(memory, shared)
        before = memory.notes.get(LOGITS)
        if before is not None:
            noted = torch.cat([before.to(noted.device), noted[len(before) :]])
        return outcome._replace(own={**outcome.own, LOGITS: noted[keep.to(noted.device)]}), keep
