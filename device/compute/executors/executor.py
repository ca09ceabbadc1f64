"""What an executor is, and what it is given: jobs, their results, and the data behind them.

The executors run the same programs: ``serial.py`` one device after the other, ``vmapped.py`` many devices at once,
``checked.py`` both ways. ``cohort.py`` prepares what they read. Which executor runs is decided in ``compute/rule.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.data.resident import Resident
from fedemu.algorithms.interface import Forest, LocalProgram, Tree
from fedemu.algorithms.replay.buffer import Buffer
from fedemu.algorithms.training.job_device import gpu_lacks_memory
from fedemu.device.compute.executors.batch_planner import Planner
from fedemu.protocol.code.own_code import account
from fedemu.protocol.errors import MachineFault, TrainingError, lacks_memory

RESIDENT_SHARE: Final = 0.1
"""The most of a GPU's free memory that the training split may take. A larger one stays in host memory."""


@dataclass(frozen=True)
class Job:
    """What a device asks of a trainer: to run one program on its samples.

    ``indices`` ``[examples]`` are the device's samples in ``corpus.train``. ``each`` is its own part of the ask, which
    reaches the program as ``shared["each"]``. ``own`` is its own state, None on a first visit. ``buffer`` is its replay
    buffer, None if it has none; the buffer keeps at most ``budget`` samples. ``sealed`` holds the samples of earlier
    periods that the device has yet to select from, by period. The first ``replayed`` of ``indices`` are samples of the
    replay buffer, with its ``notes``.
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
    replayed: int = 0
    notes: Tree = field(default_factory=dict)

    def over_all(self) -> Job:
        """The job with the samples of the replay buffer (R_t) before those of the period (X_t). All weigh the same."""
        if self.buffer is None:
            return self
        indices = np.concatenate([self.buffer.indices, self.indices])
        return replace(self, indices=indices, replayed=len(self.buffer), notes=self.buffer.notes)


@dataclass(frozen=True)
class JobResult:
    """The result of one job.

    ``own`` is the device's next own state. ``metrics`` are means over the steps, weighted by the samples of each step.
    ``label_counts`` ``[classes]`` is None unless the program declares label counts. ``buffer`` is the replay buffer
    after the job. Non-finite values are results too; the coordinator judges them. Tensors lie in host memory, in C
    order.
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
    """What training reads besides its job: the data, the seed of all random draws, and the device to compute on."""

    corpus: Corpus
    seed: int
    device: torch.device

    @cached_property
    def planner(self) -> Planner:
        """The planner of all batches; it remembers the plans that draw no random numbers."""
        return Planner(self.seed)

    def batch(self, indices: NDArray[np.integer[Any]]) -> tuple[Tensor, Tensor]:
        """The training samples and labels at ``indices [n]`` on the device, as ``Corpus.batch`` gives them."""
        if self._resident is not None:
            return self._resident.batch(indices)
        x, y = self.corpus.batch(self.corpus.train, indices)
        return x.to(self.device), y.to(self.device)

    @cached_property
    def _resident(self) -> Resident | None:
        """The training split on a GPU, unless it would take too much of what is free there. None on a processor."""
        split = self.corpus.train
        if self.device.type != "cuda" or not len(split):
            return None
        free, _ = torch.cuda.mem_get_info(self.device)
        room = RESIDENT_SHARE * free
        return Resident(self.corpus, split, self.device) if split.x.nbytes + split.y.nbytes <= room else None


def failed(device: int, said: str, error: BaseException) -> TrainingError:
    """The error of a device's job: what could not be done, and why. Its cause is ``error``.

    Somebody else's code may also end by SystemExit. The trainer goes on, because another one would come to the same.

    Raises MachineFault if it is not the job that is at fault. A device must not fail because a machine is small.
    """
    if isinstance(error, MachineFault):
        raise error
    if is_machine_fault(error):
        advice = _LESS_MEMORY if is_out_of_memory(error) else ""
        raise MachineFault(f"device {device}: {said}{advice}: {account(error)}") from error
    failure = TrainingError(f"device {device}: {said}: {account(error)}")
    failure.__cause__ = error
    return failure


_FAULTS: Final = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error")
"""What torch says of a GPU that failed. Not all of it has a class of its own."""
_LESS_MEMORY: Final = " (a smaller local.stack or local.batch_size takes less memory)"


def is_machine_fault(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is one of memory or of a GPU."""
    return is_out_of_memory(error) or any(
        isinstance(each, RuntimeError) and any(words in str(each) for words in _FAULTS) for each in _with_causes(error)
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or its cause, says that the memory of this machine, or of its GPU, does not suffice."""
    return any(lacks_memory(each) or gpu_lacks_memory(each) for each in _with_causes(error))


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


class Executor(Protocol):
    """Runs a program for several devices.

    A device's result is the same to the bit whatever the other jobs are, how many they are, and in which order.
    """

    @property
    def capacity(self) -> int:
        """The number of jobs that make best use of one call of ``run``."""
        ...

    def run(
        self, program: LocalProgram, shared: Forest, jobs: Sequence[Job], source: Source
    ) -> list[JobResult | TrainingError]:
        """The results in the order of the jobs. A job whose program fails is a TrainingError; the other jobs go on."""
        ...
