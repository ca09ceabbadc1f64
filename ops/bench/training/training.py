"""Training: device updates by the trainer, without a fleet. The floor is a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec

from fedemu.device.compute.environment import COMPUTE_ENVIRONMENT
from fedemu.ops.bench.measuring.measure import Effort, Figure, Tell, paired, rate
from fedemu.ops.bench.measuring.worker import Worker, at_once

MLP_REACH = 5.0
CNN_REACH = 1.5
_SIDES = "fedemu.ops.bench.training.sides"


def figures(effort: Effort, tell: Tell) -> Iterator[Figure]:
    """Device updates per second of an MLP and a CNN, by one process and by two, and of two more models by one."""
    for workload, title, size, reach, most in (
        ("digits", "MLP 64-64-10, digits, cohorts of 30", effort.count(10), MLP_REACH, 2),
        ("cifar", "CNN of 2,156,490, images of 3 x 32 x 32", effort.count(6, 2), CNN_REACH, 2),
        ("resnet", "ResNet-18 of 11,173,962, a batch of 20 images", effort.count(1), None, 1),
        ("bert", "BERT of 2 layers of 64, 4 batches of 8 texts", effort.count(20), None, 1),
    ):
        if workload == "bert" and find_spec("transformers") is None:
            tell("training: no BERT, because the package transformers is missing")
            continue
        for processes in range(1, most + 1):
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
