"""Training: device updates by the trainer, without a fleet. The floor is a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial

from fedemu.device.compute.environment import COMPUTE_ENVIRONMENT
from fedemu.ops.bench.measuring.measure import Effort, Figure, Tell, paired, rate
from fedemu.ops.bench.measuring.worker import Worker, at_once

MLP_REACH = 5.0
CNN_REACH = 1.2
_SIDES = "fedemu.ops.bench.training.sides"


def figures(effort: Effort, tell: Tell) -> Iterator[Figure]:
    """Device updates per second of an MLP and a CNN, by one process and by two."""
    for workload, title, size, reach in (
        ("digits", "MLP 64-64-10, digits, cohorts of 30", effort.count(10), MLP_REACH),
        ("cifar", "CNN of 2,156,490, images of 3 x 32 x 32", effort.count(6, 2), CNN_REACH),
    ):
        for processes in (1, 2):
            name = f"{title}, {processes} process{'es' if processes > 1 else ''}"
            tell(f"training: {name}")
            with ExitStack() as stack:
                ours = _workers(stack, "ours", workload, size, processes, COMPUTE_ENVIRONMENT)
                floor = _workers(stack, "plain", workload, size, processes, {})
                pairs = paired(partial(at_once, ours), partial(at_once, floor), effort)
            yield rate("training", name, "updates/s", pairs, reach)


def _workers(
    stack: ExitStack, side: str, workload: str, size: int, processes: int, environment: Mapping[str, str]
) -> list[Worker]:
    started = [
        stack.enter_context(
            Worker(
                f"{_SIDES}:{side}", {"workload": workload, "size": size, "part": part, "parts": processes}, environment
            )
        )
        for part in range(processes)
    ]
    return [worker.ready() for worker in started]
