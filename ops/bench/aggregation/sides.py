"""Both sides of the aggregation benchmark, on one thread each. Payloads are spilled as the coordinator spills them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fedemu.algorithms.interface import weighted_mean
from fedemu.coordinator.asks.payload import Payload, spill
from fedemu.coordinator.sums.partial import Partial
from fedemu.ops.bench.measuring.measure import Sample, timed
from fedemu.protocol.tensors import pack


def reduction(folder: str, parameters: int, payloads: int, times: int) -> Callable[[], Sample]:
    """A measurement of ``times`` weighted means of ``payloads`` replies. Its work is GB of float32 input."""
    replies = _replies(folder, parameters, payloads)
    examples = list(range(1, payloads + 1))

    def fold() -> float:
        for _ in range(times):
            sums = Partial({"delta": weighted_mean}, replies[0].leaves)
            sums.fold([reply.load() for reply in replies], examples)
            sums.finish()
        return _gigabytes(parameters, payloads, times)

    return timed(fold)


def copy(folder: str, parameters: int, payloads: int, times: int) -> Callable[[], Sample]:
    """A measurement of ``times`` copies of the same bytes, from the same place, into memory that exists already."""
    arrays = [array for reply in _replies(folder, parameters, payloads) for array in reply.load().values()]
    targets = [np.zeros_like(array) for array in arrays]

    def copy_all() -> float:
        for _ in range(times):
            for target, array in zip(targets, arrays, strict=True):
                np.copyto(target, array)
        return _gigabytes(parameters, payloads, times)

    return timed(copy_all)


def _replies(folder: str, parameters: int, payloads: int) -> list[Payload]:
    """Replies of two random tensors each. One tensor holds most of the parameters, as a model's first dense layer."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    small = parameters // 10
    replies = []
    for device in range(payloads):
        specs, frames = pack(
            {
                "delta/dense": random.standard_normal(parameters - small, np.float32),
                "delta/rest": random.standard_normal(small, np.float32),
            }
        )
        replies.append(spill(Path(folder), device, specs, frames))
    return replies


def _gigabytes(parameters: int, payloads: int, times: int) -> float:
    return 4e-9 * parameters * payloads * times
