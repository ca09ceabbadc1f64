"""An executor that tests another one: it runs every job twice and compares the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fedemu.algorithms.interface import Forest, LocalProgram
from fedemu.algorithms.trees import flatten
from fedemu.device.compute.executors.executor import Executor, Job, JobResult, Source
from fedemu.protocol.errors import TrainingError

TOLERANCE: Final = 1e-3
"""The largest difference of two elements on a processor, as a share of the scale that ``Checked`` explains."""
GPU_TOLERANCE: Final = 1e-2
"""The same on a GPU. On an NVIDIA H200 cuDNN's gradient of a kernel for three channels, in the memory order of a stack,
was off by 1.5e-3 of its norm from that in float64, where that of a processor was off by 2e-6.
"""
NORMALISED_ROUNDING: Final = float(np.finfo(np.float32).eps) * 1e-5**-0.5
"""The rounding of a float32, enlarged by batch normalisation where a batch has no variance, 3.8e-5.

The rows of a batch from a single sample are copies, so that the variance is 0. The gradients of the layer before are
then 0 up to rounding, and normalisation divides them by the root of its epsilon, 1e-5 as in torch.
"""


class Disagreement(TrainingError):
    """Two executors computed the same job, and their results differ by more than rounding."""


@dataclass(frozen=True)
class Checked:
    """Runs both executors and returns the candidate's results, or ``Disagreement`` where they differ beyond rounding.

    Two leaves agree if no element differs by more than ``tolerance`` times a scale. The scale is the largest magnitude
    in the reference leaf, but at least a thousandth of the largest magnitude in all leaves: some leaves, such as the
    key biases of attention, get no gradient but rounding.

    With batch normalisation, elements may also differ by ``NORMALISED_ROUNDING`` times the largest magnitude in all
    leaves. Elements of half precision may also differ by two steps of the largest shared variable of their type: both
    executors train on this coarse grid.
    """

    reference: Executor
    candidate: Executor
    tolerance: float = TOLERANCE

    @property
    def capacity(self) -> int:
        """The capacity of the candidate."""
        return self.candidate.capacity

    def run(
        self, program: LocalProgram, shared: Forest, jobs: Sequence[Job], source: Source
    ) -> list[JobResult | TrainingError]:
        expected = self.reference.run(program, shared, jobs, source)
        results = self.candidate.run(program, shared, jobs, source)
        normalised = any(name.endswith("running_var") for name in flatten(shared))
        floor = NORMALISED_ROUNDING if normalised else 0.0
        grids = _grids(shared)
        return [self._compared(*pair, floor, grids) for pair in zip(expected, results, strict=True)]

    def _compared(
        self,
        expected: JobResult | TrainingError,
        result: JobResult | TrainingError,
        floor: float,
        grids: Mapping[torch.dtype, float],
    ) -> JobResult | TrainingError:
        if isinstance(expected, TrainingError) or isinstance(result, TrainingError):
            if type(expected) is type(result):
                return result
            failure = expected if isinstance(expected, TrainingError) else result
            return TrainingError(f"one executor fails where the other does not: {failure}")
        if difference := self._difference(expected, result, floor, grids):
            return Disagreement(f"the executors disagree on {difference}")
        return result

    def _difference(
        self, expected: JobResult, result: JobResult, floor: float, grids: Mapping[torch.dtype, float]
    ) -> str | None:
        """What differs, None if nothing does.

        ``floor`` times the largest magnitude in all leaves is always allowed, and of half precision two of ``grids``.
        """
        if replace(expected, payload={}, own={}, metrics={}) != replace(result, payload={}, own={}, metrics={}):
            return "examples, steps or label counts"
        theirs = {**flatten(expected.payload), **flatten({"own": expected.own})}
        ours = {**flatten(result.payload), **flatten({"own": result.own})}
        if theirs.keys() != ours.keys():
            return "the names of the payload's tensors"
        sizes = {name: _largest(reference) for name, reference in theirs.items()}
        largest = max(sizes.values(), default=0.0)
        for name, reference in theirs.items():
            distance = (reference.double() - ours[name].double()).abs().nan_to_num(0.0)
            bound = max(self.tolerance * max(sizes[name], 1e-3 * largest), floor * largest)
            bound = max(bound, 2 * grids.get(reference.dtype, 0.0))
            same_kind = torch.equal(reference.double().isfinite(), ours[name].double().isfinite())
            if not same_kind or (distance.numel() and float(distance.max()) > bound):
                return f"{name} by {float(distance.max()):.3g}, where {bound:.3g} would be rounding"
        return None


def _grids(shared: Forest) -> dict[torch.dtype, float]:
    """The distance between neighbouring numbers at the largest shared variable, for each type of half precision."""
    found: dict[torch.dtype, float] = {}
    for leaf in flatten(shared).values():
        if leaf.dtype in (torch.float16, torch.bfloat16):
            step = torch.finfo(leaf.dtype).eps * _largest(leaf)
            found[leaf.dtype] = max(found.get(leaf.dtype, 0.0), step)
    return found


def _largest(leaf: Tensor) -> float:
    """The largest finite magnitude of a leaf, or 0 if it has none."""
    return float(leaf.double().abs().nan_to_num(0.0, 0.0, 0.0).max()) if leaf.numel() else 0.0
