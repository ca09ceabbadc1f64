"""Local programs that send sums over a device's samples, such as sums of features by class.

The coordinator adds what devices send, with the reducer ``total``. If sums are added over several rounds,
no sample may count twice, although a device may take part in several rounds of a task. So its own state is a ledger:
how many of its samples have been counted. Samples come in the order of their arrival, so the ledger names exactly the
samples that are still to be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.interface import Batch, Facts, Forest, Model, Outcome, Outputs, Stage, Tree, mixes
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.trees import SUM_UNIT, add, scale

SUMS: Final = "sums"
"""The key of the sums in a payload. They travel in ``SUM_UNIT``."""
BATCH: Final = 64
"""The number of samples in one forward pass."""

Summed = Callable[[Outputs, Tensor, Tensor], Tree]
"""(outputs of a model, labels ``[batch]``, weight ``[batch]`` float64) -> the batch's sums, float64.

A sample of weight 0 adds nothing. The sums of an empty batch are zeros of the right shapes.
"""


class Counting(NamedTuple):
    """The carry: the samples passed so far, those that were counted in earlier rounds, and the sums."""

    passed: Tensor
    counted: Tensor
    sums: Tree


def blank_ledger() -> Tree:
    """The own state of a device of which nothing has been counted: ``counted`` samples of the period ``task``."""
    return {"counted": torch.zeros((), dtype=torch.int64), "task": torch.zeros((), dtype=torch.int64)}


@dataclass(frozen=True, eq=False)
class LedgerSGD(LocalSGD):
    """Local training at a device that keeps a ledger. Training does not change the ledger."""

    takes_terms: ClassVar[bool] = False
    """Devices train in the first task only, in which local terms have nothing to remember."""

    def initial_own(self, shared: Forest) -> Tree:
        return blank_ledger()


@dataclass(frozen=True, eq=False)
class Sums:
    """One forward pass of ``shared["model"]`` in evaluation mode over a device's samples. It sends ``{"sums": ...}``.

    With ``once`` a sample is counted in one round only; without it every round counts all samples, and a device keeps
    nothing. With ``cumulative`` a device's samples of all periods so far come one after the other, otherwise those of
    the task alone. ``classes`` and ``width`` are the sizes of the model's logits and features.
    """

    model: Model
    summed: Summed
    classes: int
    width: int
    once: bool = True
    cumulative: bool = False
    passes: float = 1.0
    declares_label_counts: bool = False

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        return {}

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """One stage: all samples once, in their order."""
        return (Stage(in_order, self.step, rows_matter=mixes(self.model, train=False)),)

    def learning_rate(self, round: int, task: int) -> float:
        return 0.0

    def initial_own(self, shared: Forest) -> Tree:
        return blank_ledger() if self.once else {}

    def payload(self, shared: Forest) -> Forest:
        return {SUMS: self.zero}

    @property
    def zero(self) -> Tree:
        """The sums over no sample."""
        outputs = Outputs(torch.zeros(0, self.classes), torch.zeros(0, self.width), {})
        return self.summed(outputs, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float64))

    def begin(self, shared: Forest, own: Tree, facts: Facts) -> Counting:
        zero = {name: leaf.to(facts.examples.device) for name, leaf in self.zero.items()}
        passed = torch.zeros_like(facts.examples)
        return Counting(passed, self._counted(own, facts) if self.once else passed, zero)

    def step(
        self, carry: Counting, batch: Batch, shared: Forest, own: Tree, facts: Facts, noise: Tree
    ) -> tuple[Counting, Tree]:
        outputs, _ = self.model.apply(shared["model"], batch.x, False)
        place = carry.passed + torch.arange(len(batch.y), device=batch.y.device)
        weight = batch.weight.double() * (place >= carry.counted)
        sums = self.summed(outputs, batch.y, weight)
        passed = carry.passed + batch.weight.sum().to(carry.passed.dtype)
        return Counting(passed, carry.counted, add(carry.sums, sums)), {}

    def finish(self, carry: Counting, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        payload = {SUMS: scale(carry.sums, 1 / SUM_UNIT)}
        if not self.once:
            return Outcome(payload, own)
        counted = torch.maximum(carry.counted, facts.examples.to(carry.counted.dtype))
        return Outcome(payload, {"counted": counted, "task": facts.task.to(own["task"].dtype)})

    def _counted(self, own: Tree, facts: Facts) -> Tensor:
        """How many of the device's samples, from its first one on, earlier rounds have counted."""
        goes_on = torch.ones_like(facts.first_visit) if self.cumulative else own["task"] == facts.task
        return torch.where(goes_on, own["counted"], 0).to(facts.examples.dtype)


def in_order(examples: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """The plan of one pass over all samples in their order, in batches of ``BATCH``. It draws nothing."""
    batches = -(-examples // BATCH)
    positions = np.full(batches * BATCH, -1, np.int64)
    positions[:examples] = np.arange(examples)
    return positions.reshape(batches, BATCH)
