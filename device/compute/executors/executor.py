"""How the jobs of one ask are run: one device after the other, or many at once. All executors run the same program.

``executors_vmapped.py`` holds the one that stacks devices, ``executors_cohort.py`` what both do before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.interface import Forest, LocalProgram, Tree
from fedemu.algorithms.replay.buffer import Buffer
from fedemu.algorithms.trees import flatten
from fedemu.device.compute.executors.plan import Planner
from fedemu.protocol.errors import TrainingError


@dataclass(frozen=True)
class Job:
    """One device's part of an ask.

    ``indices`` ``[examples]`` are its samples in ``corpus.train``. ``each`` reaches the program as ``shared["each"]``.
    ``own`` is None on a first visit. ``buffer`` is the device's replay buffer, None where it has none, which keeps
    ``budget`` samples of a period; ``sealed`` are the samples of earlier periods that it has yet to select from.
    """

    device: int
    round: int
    task: int
    indices: NDArray[np.int64]
    each: Tree = field(default_factory=dict)
    own: Tree | None = None
    buffer: Buffer | None = None
    budget: int = 0
    sealed: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)


@dataclass(frozen=True)
class JobResult:
    """``metrics`` are means over the steps, by their samples. ``buffer`` is the replay buffer after the job.

    Non-finite values are results too; the coordinator judges them. Tensors lie in host memory, in C order.
    """

    payload: Forest
    own: Tree
    examples: int
    steps: int
    metrics: Mapping[str, float]
    label_counts: tuple[int, ...] | None
    buffer: Buffer | None = None


@dataclass(frozen=True)
class Source:
    """What training reads besides its job: the data, the seed of all draws, and where to compute."""

    corpus: Corpus
    seed: int
    device: torch.device

    @cached_property
    def planner(self) -> Planner:
        return Planner(self.seed)


class Executor(Protocol):
    """Results come in the order of the jobs; a job whose program fails is a TrainingError, its companions go on.

    A device's result is the same to the bit whatever its companions, their number and their order.
    """

    @property
    def capacity(self) -> int:
        """How many jobs make best use of one call."""
        ...

    def run(
        self, program: LocalProgram, shared: Forest, jobs: Sequence[Job], source: Source
    ) -> list[JobResult | TrainingError]: ...


@dataclass(frozen=True)
class Checked:
    """Runs both executors and returns the candidate's results; where they differ by more than rounding, an error.

    Two leaves agree if no element differs by more than ``tolerance`` times the reference leaf's largest magnitude, or
    where that is less, a thousandth of the largest of all leaves: some, as the key biases of attention, get no gradient
    but rounding.
    """

    reference: Executor
    candidate: Executor
    tolerance: float = 1e-3

    @property
    def capacity(self) -> int:
        return self.candidate.capacity

    def run(
        self, program: LocalProgram, shared: Forest, jobs: Sequence[Job], source: Source
    ) -> list[JobResult | TrainingError]:
        expected = self.reference.run(program, shared, jobs, source)
        results = self.candidate.run(program, shared, jobs, source)
        return [self._compared(*pair) for pair in zip(expected, results, strict=True)]

    def _compared(
        self, expected: JobResult | TrainingError, result: JobResult | TrainingError
    ) -> JobResult | TrainingError:
        if isinstance(expected, TrainingError) or isinstance(result, TrainingError):
            if type(expected) is type(result):
                return result
            failure = expected if isinstance(expected, TrainingError) else result
            return TrainingError(f"one executor fails where the other does not: {failure}")
        if difference := self._difference(expected, result):
            return TrainingError(f"the executors disagree on {difference}")
        return result

    def _difference(self, expected: JobResult, result: JobResult) -> str | None:
        if replace(expected, payload={}, own={}, metrics={}) != replace(result, payload={}, own={}, metrics={}):
            return "examples, steps or label counts"
        theirs = {**flatten(expected.payload), **flatten({"own": expected.own})}
        ours = {**flatten(result.payload), **flatten({"own": result.own})}
        if theirs.keys() != ours.keys():
            return "the names of the payload's tensors"
        sizes = {name: _largest(reference) for name, reference in theirs.items()}
        least = 1e-3 * max(sizes.values(), default=0.0)
        for name, reference in theirs.items():
            distance = (reference.double() - ours[name].double()).abs().nan_to_num(0.0)
            bound = self.tolerance * max(sizes[name], least)
            same_kind = torch.equal(reference.double().isfinite(), ours[name].double().isfinite())
            if not same_kind or (distance.numel() and float(distance.max()) > bound):
                return f"{name} by {float(distance.max()):.3g}, where {bound:.3g} would be rounding"
        return None


def _largest(leaf: Tensor) -> float:
    """The largest finite magnitude; 0 where there is none."""
    return float(leaf.double().abs().nan_to_num(0.0, 0.0, 0.0).max()) if leaf.numel() else 0.0
