"""``fedemu bench gpu``: device updates on a GPU, one by one and in stacks of 8 to 128.

Each line shows the rate, the share of the time in which kernels run (the rest are gaps, in which the GPU waits for
Python), and the arithmetic that was reached, as a share of what a large product of matrices reaches on the same GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from rich.console import Console, Group
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from fedemu.algorithms.trees import map_leaves
from fedemu.coordinator.record.summary import machine, versions
from fedemu.device.compute.executors.executor import Executor, Job, Source
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.device.compute.trainer import open_device
from fedemu.ops.assembly.learning import open_algorithm
from fedemu.ops.bench.measuring.measure import Effort, Spread, Tell
from fedemu.ops.bench.training.workloads import WORKLOADS
from fedemu.ops.figures import percent
from fedemu.protocol.errors import ConfigurationError, TrainingError

STACKS: Final = (1, 8, 16, 32, 64, 128)
"""The sizes of stacks. 1 stands for one device after the other."""
_PRODUCT: Final = 8192
"""Rows and columns of the matrices whose product tells what the GPU can do."""
_REPETITIONS: Final = 3


@dataclass(frozen=True)
class Line:
    """One work by one executor. ``busy`` is the share of the time with kernels, None on a processor.

    ``why`` tells why nothing was measured, such as a lack of memory.
    """

    work: str
    stack: int
    updates_per_second: Spread | None
    busy: float | None = None
    teraflops: float | None = None
    roof: float | None = None
    why: str = ""


@dataclass(frozen=True)
class GpuStudy:
    """All lines, and what they were measured on. ``peak`` are 10^12 operations per second of a large product."""

    about: Mapping[str, Any]
    peak: float
    lines: list[Line]

    def table(self) -> dict[str, Any]:
        """The study for JSON."""
        return asdict(self)

    def __rich_console__(self, console: Console, options: Any) -> Iterator[Group]:
        drawn = Table(box=None, pad_edge=False)
        for column in ("work", "stack", "updates/s", "kernels", "TFLOP/s", "of the peak"):
            drawn.add_column(column, justify="left" if column == "work" else "right")
        for each in self.lines:
            rate = f"{each.updates_per_second.median:,.1f}" if each.updates_per_second else each.why
            drawn.add_row(
                each.work,
                "one by one" if each.stack == 1 else str(each.stack),
                rate,
                "" if each.busy is None else percent(each.busy),
                "" if each.teraflops is None else f"{each.teraflops:.2f}",
                "" if each.roof is None else percent(each.roof),
            )
        said = ", ".join(f"{name} {value}" for name, value in self.about.items())
        yield Group(said, f"peak: {self.peak:.1f} TFLOP/s, a product of matrices in float32", drawn)


def study(
    effort: Effort,
    tell: Tell,
    device_type: str = "cuda",
    works: Sequence[str] = tuple(WORKLOADS),
    stacks: Sequence[int] = STACKS,
    product: int = _PRODUCT,
) -> GpuStudy:
    """Measure every work with every stack. Raises ConfigurationError if torch finds no GPU."""
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "fedemu bench gpu needs an NVIDIA GPU, and torch finds no CUDA device here; "
            "fedemu bench training measures processors"
        )
    device = open_device(device_type)
    peak = _peak(device, product)
    lines = []
    for name in works:
        work = WORKLOADS[name](1)
        model, algorithm = open_algorithm(work.experiment, work.corpus)
        program: Any = algorithm.programs["train"]
        shared = {"model": map_leaves(lambda leaf: leaf.to(device), model.init(1))}
        source = Source(work.corpus, work.experiment.seed, device)
        held = [indices for cohort in work.cohorts for indices in cohort]

        def jobs(count: int, round: int, held: Sequence[Any] = held) -> list[Job]:
            return [Job(device=n, round=round, task=0, indices=held[n % len(held)]) for n in range(count)]

        with FlopCounterMode(display=False) as counter:
            _run(Serial(), program, shared, jobs(len(held), 1), source)
        each_update = counter.get_total_flops() / len(held)
        for stack in stacks:
            tell(f"gpu: {name}, stack of {stack}")
            executor: Executor = Serial() if stack == 1 else Vmapped(stack)
            count = max(effort.count(128, stack), stack)
            try:
                rates = [_rate(executor, program, shared, jobs(count, n), source) for n in range(_REPETITIONS + 1)][1:]
                busy = _busy(executor, program, shared, jobs(count, 9), source) if device.type == "cuda" else None
            except Exception as error:
                lines.append(Line(name, stack, None, why=str(error).splitlines()[0][:60]))
                continue
            reached = Spread.of(rates).median * each_update / 1e12
            lines.append(Line(name, stack, Spread.of(rates), busy, reached, reached / peak))
    return GpuStudy({**machine(), "torch": versions()["torch"]}, peak, lines)


def _run(executor: Executor, program: Any, shared: Any, jobs: Sequence[Job], source: Source) -> None:
    for start in range(0, len(jobs), max(executor.capacity, 1)):
        for result in executor.run(program, shared, jobs[start : start + max(executor.capacity, 1)], source):
            if isinstance(result, TrainingError):
                raise result


def _rate(executor: Executor, program: Any, shared: Any, jobs: Sequence[Job], source: Source) -> float:
    """Updates per second. The results lie in host memory at the end, so nothing is left to wait for."""
    began = time.perf_counter()
    _run(executor, program, shared, jobs, source)
    return len(jobs) / (time.perf_counter() - began)


def _busy(executor: Executor, program: Any, shared: Any, jobs: Sequence[Job], source: Source) -> float:
    """The share of the time in which the GPU runs kernels or copies."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        began = time.perf_counter()
        _run(executor, program, shared, jobs, source)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    used = float(sum(event.self_device_time_total for event in profile.key_averages()))
    return min(1.0, used / 1e6 / seconds)


def _peak(device: torch.device, size: int) -> float:
    """10^12 operations per second of a product of two matrices ``[size, size]``, the best of some."""
    left = torch.randn(size, size, device=device)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        (left @ left)[0, 0].item()  # to read a value waits for the product
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best / 1e12
