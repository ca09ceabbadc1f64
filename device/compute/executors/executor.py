"""What an executor is, and what it is given: jobs, their results, and the data behind them.

The executors run the same programs: ``serial.py`` one device after the other, ``vmapped.py`` many devices at once,
``checked.py`` both ways. ``cohort.py`` prepares what they read. Which executor runs is decided in ``compute/rule.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.interface import Forest, LocalProgram, Tree
from fedemu.algorithms.replay.buffer import Buffer
from fedemu.device.compute.executors.batch_planner import Planner
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
