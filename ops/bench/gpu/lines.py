"""Works on a GPU by stacks of several sizes: the rate, kernels and gaps, and the arithmetic beside the peak."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, get_args

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedemu.algorithms.graphs.captures import Captures, GraphRecorder
from fedemu.algorithms.models.low_precision import Precision
from fedemu.algorithms.trees import map_leaves
from fedemu.device.compute.executors.executor import Executor, Job, Source, is_out_of_memory
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.device.compute.tapes.private_torch import product_formula
from fedemu.device.compute.trainer import open_device
from fedemu.ops.assembly.learning import open_algorithm
from fedemu.ops.bench.measuring.measure import Effort, Spread, Tell
from fedemu.ops.bench.training.workloads import WORKLOADS, Workload
from fedemu.protocol.errors import TrainingError

STACKS: Final = (1, 8, 16, 32, 64, 128)
"""The sizes of stacks. 1 stands for one device after the other."""
_GPU: Final = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
_REPETITIONS: Final = 3
_SECONDS: Final = 3.0
"""After so many seconds of measuring there is no further repetition."""
_UPDATES: Final = 128
_GFLOP: Final = 4000.0
"""A measurement takes 128 updates, or as many as have these 10^9 operations: about a second's work of a GPU."""
_PROFILED: Final = 16
"""Kernels are counted in so many updates, or in one stack: torch's profiler takes long to read many of them."""
_ROUNDED_GFLOP: Final = 10.0
"""Works whose update has so many 10^9 operations are measured in tf32 and bfloat16, too."""
_ROUNDED_STACKS: Final = (8, 32)


@dataclass(frozen=True)
class Line:
    """One work by one executor in one precision. On a processor nothing is known of kernels.

    ``graphs`` says whether steps were captured as CUDA graphs. ``gflop`` are the 10^9 operations of an update.
    ``kernel_ms`` and ``gap_ms`` are the milliseconds of an update in which the GPU runs kernels or copies, and in which
    it waits. ``teraflops`` is the arithmetic that was reached, ``roof`` its share of the peak, ``kernel_roof`` the
    share while kernels run. ``why`` tells why nothing was measured, such as a lack of memory.
    """

    work: str
    stack: int
    graphs: bool
    gflop: float
    precision: Precision = "float32"
    updates_per_second: Spread | None = None
    kernel_ms: float | None = None
    gap_ms: float | None = None
    teraflops: float | None = None
    roof: float | None = None
    kernel_roof: float | None = None
    why: str = ""


def lines(
    effort: Effort,
    tell: Tell,
    device: torch.device,
    peak: float,
    works: Sequence[str] = tuple(WORKLOADS),
    stacks: Sequence[int] = STACKS,
) -> Iterator[Line]:
    """Measure every work in all its cases. ``peak`` is in 10^12 operations per second."""
    for name in works:
        work = WORKLOADS[name](1)
        source = Source(work.corpus, work.experiment.seed, device)
        held = [indices for cohort in work.cohorts for indices in cohort]

        def jobs(count: int, round: int, held: Sequence[Any] = held) -> list[Job]:
            return [Job(device=n, round=round, task=0, indices=held[n % len(held)]) for n in range(count)]

        program, shared = _program(work, "float32", device)
        gflop = operations(program, shared, jobs(len(held), 1), source) / len(held) / 1e9
        for precision, stack, graphs in cases(gflop, stacks, device.type):
            said = "" if precision == "float32" else f" in {precision}"
            tell(f"gpu: {name}{said}, stack of {stack}{', captured' if graphs else ''}")
            line = Line(name, stack, graphs, gflop, precision)
            count = effort.count(round(min(_UPDATES, _GFLOP / gflop)), stack)
            executor = _executor(stack, graphs)
            try:
                program, shared = _program(work, precision, device)
                rates = _rates(executor, program, shared, partial(jobs, count), source)
                kernels = None
                if device.type == "cuda":
                    few = max(1, _PROFILED // stack) * stack
                    kernels = _kernel_seconds(executor, program, shared, jobs(few, 9), source) / few
            except Exception as error:
                why = (str(error) or type(error).__name__).splitlines()[0]
                why = "out of memory" if is_out_of_memory(error) else why
                yield replace(line, why=why[:60])
                continue
            yield _with_figures(line, Spread.of(rates), kernels, peak)


def cases(gflop: float, stacks: Sequence[int], device_type: str) -> Iterator[tuple[Precision, int, bool]]:
    """The precisions and stacks of a work, and whether steps are captured.

    On a GPU each stack is measured with and without graphs. Where an update has many operations (``gflop``, in 10^9),
    some stacks are measured with graphs in tf32 and bfloat16, too.
    """
    for stack in stacks:
        for graphs in (False, True) if stack > 1 and device_type == "cuda" else (False,):
            yield "float32", stack, graphs
    if device_type == "cuda" and gflop >= _ROUNDED_GFLOP:
        for precision in get_args(Precision)[1:]:
            yield from ((precision, stack, True) for stack in stacks if stack in _ROUNDED_STACKS)


def _program(work: Workload, precision: Precision, device: torch.device) -> tuple[Any, Any]:
    """The program of a work in some precision, and what it gets. From now on the GPU computes in this precision."""
    open_device(device.type, precision == "tf32")
    local = work.experiment.local.model_copy(update={"precision": precision})
    model, algorithm = open_algorithm(work.experiment.model_copy(update={"local": local}), work.corpus)
    shared = {"model": map_leaves(lambda leaf: leaf.to(device), model.init(1))}
    return algorithm.programs["train"], shared


def operations(program: Any, shared: Any, jobs: Sequence[Job], source: Source) -> int:
    """The floating-point operations of some jobs, one by one; a multiplication and an addition are two."""
    executor = Serial()
    _run(executor, program, shared, jobs, source)  # recording a step does it once more
    with FlopCounterMode(display=False, custom_mapping=product_formula()) as counter:
        _run(executor, program, shared, jobs, source)
    return int(counter.get_total_flops())


def _with_figures(line: Line, rate: Spread, kernels: float | None, peak: float) -> Line:
    """A line with what follows from a rate, and from the seconds of kernels in an update."""
    reached = rate.median * line.gflop / 1e3
    line = replace(line, updates_per_second=rate, teraflops=reached, roof=reached / peak)
    if not kernels:
        return line
    gap = max(0.0, 1 / rate.median - kernels)
    return replace(line, kernel_ms=1e3 * kernels, gap_ms=1e3 * gap, kernel_roof=line.gflop / 1e3 / kernels / peak)


def _executor(stack: int, graphs: bool) -> Executor:
    if stack == 1:
        return Serial()
    return Vmapped(stack, Captures(GraphRecorder()).run) if graphs else Vmapped(stack)


def _run(executor: Executor, program: Any, shared: Any, jobs: Sequence[Job], source: Source) -> None:
    for start in range(0, len(jobs), max(executor.capacity, 1)):
        for result in executor.run(program, shared, jobs[start : start + max(executor.capacity, 1)], source):
            if isinstance(result, TrainingError):
                raise result


def _rates(
    executor: Executor, program: Any, shared: Any, jobs: Callable[[int], Sequence[Job]], source: Source
) -> list[float]:
    """Updates per second of some repetitions, after one that is not measured. ``jobs`` gives those of a round."""
    _rate(executor, program, shared, jobs(0), source)
    end, rates = time.monotonic() + _SECONDS, list[float]()
    while len(rates) < _REPETITIONS and (not rates or time.monotonic() < end):
        rates.append(_rate(executor, program, shared, jobs(len(rates) + 1), source))
    return rates


def _rate(executor: Executor, program: Any, shared: Any, jobs: Sequence[Job], source: Source) -> float:
    """Updates per second. The results lie in host memory at the end, so nothing is left to wait for."""
    began = time.perf_counter()
    _run(executor, program, shared, jobs, source)
    return len(jobs) / (time.perf_counter() - began)


def _kernel_seconds(executor: Executor, program: Any, shared: Any, jobs: Sequence[Job], source: Source) -> float:
    """The seconds in which the GPU runs kernels or copies, one or several at a time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        _run(executor, program, shared, jobs, source)
        torch.cuda.synchronize()
    spans = [(event.time_range.start, event.time_range.end) for event in profile.events() if event.device_type == _GPU]
    return covered(spans) / 1e6


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what some spans cover together, each from its start to its end."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
