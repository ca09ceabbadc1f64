"""Aggregation: the replies of a cohort folded into their mean, against a memory copy of the same bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from fedemu.ops.bench.measure import Effort, Figure, Tell, paired, rate
from fedemu.ops.bench.worker import Worker

REACH = 0.3
PAYLOADS = 30
CNN_PARAMETERS = 2_156_490
"""Of the two-convolution network for CIFAR-10."""
MLP_PARAMETERS = 4_810
"""Of the perceptron 64-64-10; folding so little is mostly the calls, so nothing is promised for it."""


def figures(effort: Effort, tell: Tell) -> Iterator[Figure]:
    for name, parameters, times, reach in (
        ("30 replies of 8.6 MB (CNN), weighted mean", CNN_PARAMETERS, 1, REACH),
        ("30 replies of 19 kB (MLP), weighted mean", MLP_PARAMETERS, effort.count(200), None),
    ):
        tell(f"aggregation: {name}")
        with tempfile.TemporaryDirectory(prefix="fedemu-bench-") as folder:
            arguments = {
                "folder": folder,
                "parameters": effort.count(parameters, 10) if times == 1 else parameters,
                "payloads": PAYLOADS,
                "times": times,
            }
            sides = "fedemu.ops.bench.aggregation_sides"
            with Worker(f"{sides}:reduction", arguments) as ours, Worker(f"{sides}:copy", arguments) as floor:
                pairs = paired(ours.ready().measure, floor.ready().measure, effort)
        yield rate("aggregation", name, "GB/s in", pairs, reach)
