"""The wire: messages between a ROUTER and a DEALER in two processes. The floor is plain pyzmq with the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from fedemu.ops.bench.measuring.measure import Effort, Figure, Sample, Tell, paired, rate
from fedemu.ops.bench.measuring.worker import Worker, together
from fedemu.ops.bench.wire.sides import CASES
from fedemu.ops.running.launch import free_address

REACH = 0.5


def figures(effort: Effort, tell: Tell) -> Iterator[Figure]:
    """Messages or megabytes per second, for each of ``CASES``."""
    for name, case in CASES.items():
        tell(f"wire: {case.title}")
        count = effort.count(case.count, case.window // 4)
        with ExitStack() as stack:
            sides = {}
            for side in ("ours", "plain"):
                address = free_address()
                workers = [
                    stack.enter_context(
                        Worker(
                            f"fedemu.ops.bench.wire.sides:{side}",
                            {"role": role, "address": address, "case": name, "count": count},
                        )
                    )
                    for role in ("router", "dealer")
                ]
                sides[side] = [worker.ready() for worker in workers]
            pairs = paired(partial(_sample, sides["ours"]), partial(_sample, sides["plain"]), effort)
        yield rate("wire", case.title, "messages/s" if case.megabytes is None else "MB/s", pairs, REACH)


def _sample(workers: list[Worker]) -> Sample:
    """One sample of both ends: the time is that of the router's clock, the CPU time that of both processes."""
    router, dealer = together(workers)
    return Sample(router.work, router.wall, router.cpu + dealer.cpu)
