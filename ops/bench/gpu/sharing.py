"""Several trainers on one GPU: what they reach together, with and without NVIDIA's Multi-Process Service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Final

from fedemu.device.compute.environment import COMPUTE_ENVIRONMENT
from fedemu.ops.bench.gpu.mps import mps
from fedemu.ops.bench.measuring.measure import Effort, Spread, Tell
from fedemu.ops.bench.measuring.worker import BenchmarkError, Worker, at_once

TRAINERS: Final = (1, 2, 4)
"""The numbers of trainers that share a GPU."""
WORKS: Final[Mapping[str, int]] = {"digits": 20, "cifar": 120}
"""The works, with their sizes: cohorts of 30 devices, and devices."""
_REPETITIONS: Final = 3
_SECONDS: Final = 300.0


@dataclass(frozen=True)
class Share:
    """What some trainers reach together. ``why`` tells why nothing was measured. ``service`` says whether with MPS."""

    work: str
    trainers: int
    service: bool
    updates_per_second: Spread | None
    why: str = ""


def shares(
    effort: Effort,
    tell: Tell,
    device_type: str = "cuda",
    works: Sequence[str] = tuple(WORKS),
    trainers: Sequence[int] = TRAINERS,
) -> Iterator[Share]:
    """The rates of all works by all numbers of trainers, first without MPS, then with it.

    Raises Absent after those without MPS if this machine does not have it, or if it does not start.
    """
    for service in (False, True):
        daemon: AbstractContextManager[Mapping[str, str]] = mps() if service else nullcontext({})
        with daemon as variables:
            for work in works:
                for count in trainers:
                    tell(f"gpu: {work}, {count} trainers, {'with' if service else 'without'} MPS")
                    yield _measured(effort, work, count, service, device_type, variables)


def _measured(
    effort: Effort, work: str, count: int, service: bool, device_type: str, variables: Mapping[str, str]
) -> Share:
    size = effort.count(WORKS[work], count)
    try:
        with ExitStack() as stack:
            workers = [
                stack.enter_context(
                    Worker(
                        "fedemu.ops.bench.training.sides:ours",
                        {"workload": work, "size": size, "part": part, "parts": count, "device_type": device_type},
                        {**COMPUTE_ENVIRONMENT, **variables},
                        _SECONDS,
                    )
                )
                for part in range(count)
            ]
            for worker in workers:
                worker.ready()
            at_once(workers)
            samples = [at_once(workers) for _ in range(_REPETITIONS)]
    except BenchmarkError as error:
        return Share(work, count, service, None, str(error))
    return Share(work, count, service, Spread.of(sample.work / sample.wall for sample in samples))
