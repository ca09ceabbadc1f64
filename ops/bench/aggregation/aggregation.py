"""Aggregation: the replies of a cohort are folded into their mean. The floor is a memory copy of the same bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from fedemu.ops.bench.measuring.measure import Effort, Figure, Tell, paired, rate
from fedemu.ops.bench.measuring.worker import Worker

PAYLOADS = 30


class Case(NamedTuple):
    """Replies with a number of float32 ``parameters``. One sample folds them ``times`` times."""

    title: str
    parameters: int
    times: int
    reach: float | None


CASES = (
    Case("8.6 MB (CNN)", 2_156_490, 1, 0.3),
    # Most of the time of such small folds is that of calls, so no ratio is promised for them.
    Case("19 kB (MLP)", 4_810, 200, None),
)


def figures(effort: Effort, tell: Tell) -> Iterator[Figure]:
    """GB/s of float32 input, for each of ``CASES``."""
    for case in CASES:
        name = f"{PAYLOADS} replies of {case.title}, weighted mean"
        tell(f"aggregation: {name}")
        with tempfile.TemporaryDirectory(prefix="fedemu-bench-") as folder:
            arguments = {
                "folder": folder,
                "parameters": case.parameters,
                "payloads": PAYLOADS,
                "times": effort.count(case.times),
            }
            sides = "fedemu.ops.bench.aggregation.sides"
            with Worker(f"{sides}:reduction", arguments) as ours, Worker(f"{sides}:copy", arguments) as floor:
                pairs = paired(ours.ready().measure, floor.ready().measure, effort)
        yield rate("aggregation", name, "GB/s in", pairs, case.reach)
