"""``fedemu bench gpu``: training on an NVIDIA GPU.

Device updates one by one and in stacks of 8 to 128, beside what the GPU can do; server jobs; several trainers on one
GPU; and pfl-research at the work of its own benchmark.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fedemu.coordinator.record.summary import machine, versions
from fedemu.device.compute.trainer import open_device
from fedemu.ops.bench.gpu.jobs import JobLine, job_lines
from fedemu.ops.bench.gpu.lines import Line, lines
from fedemu.ops.bench.gpu.sharing import Share, shares
from fedemu.ops.bench.measuring.measure import Effort, Spread, Tell
from fedemu.ops.bench.peers.environments import Absent
from fedemu.ops.bench.peers.peers import Comparison, compare
from fedemu.ops.bench.peers.work import PFL
from fedemu.ops.figures import percent
from fedemu.protocol.errors import ConfigurationError

_PRODUCT: Final = 8192
"""Rows and columns of the matrices whose product tells what the GPU can do."""


@dataclass(frozen=True)
class GpuStudy:
    """All that was measured, and on what. ``peak`` are 10^12 operations per second of a large product.

    ``no_service`` tells why there are no shares with MPS.
    """

    about: Mapping[str, Any]
    peak: float
    lines: Sequence[Line] = ()
    jobs: Sequence[JobLine] = ()
    shares: Sequence[Share] = ()
    no_service: str = ""
    pfl: Comparison = field(default_factory=lambda: Comparison([], {}))

    def table(self) -> dict[str, Any]:
        """The study for JSON."""
        return asdict(self)

    def __rich_console__(self, console: Console, options: Any) -> Iterator[Any]:
        said = Text(", ".join(f"{name} {value}" for name, value in self.about.items()))
        yield Group(said, f"peak: {self.peak:.1f} TFLOP/s, a product of matrices in float32", _roofline(self.lines))
        if self.jobs:
            yield Group("", _apart(self.jobs))
        if self.shares:
            yield Group("", _together(self.shares))
        if self.no_service:
            yield Group(Text(f"no trainers with MPS: {self.no_service}"))
        if self.pfl.standings or self.pfl.absent:
            yield Group("")
            yield self.pfl


def study(effort: Effort, environments: Path, tell: Tell) -> Iterator[GpuStudy]:
    """Measure everything. The study as it grows.

    ``environments`` holds that of pfl-research. Raises ConfigurationError if torch finds no GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "fedemu bench gpu needs an NVIDIA GPU, and torch finds no CUDA device here; "
            "fedemu bench training measures processors"
        )
    device = open_device("cuda")
    made = GpuStudy({**machine(), "torch": versions()["torch"]}, peak_of(device))
    for line in lines(effort, tell, device, made.peak):
        made = replace(made, lines=[*made.lines, line])
        yield made
    for job in job_lines(effort, tell, device):
        made = replace(made, jobs=[*made.jobs, job])
        yield made
    try:
        for share in shares(effort, tell):
            made = replace(made, shares=[*made.shares, share])
            yield made
    except Absent as reason:
        made = replace(made, no_service=str(reason))
    for pfl in compare(effort, environments, tell, ("plain", "trainer", "pfl"), (PFL,), "cuda"):
        made = replace(made, pfl=pfl)
        yield made


def peak_of(device: torch.device, size: int = _PRODUCT) -> float:
    """10^12 operations per second of a product of two matrices ``[size, size]``, the best of some."""
    left = torch.randn(size, size, device=device)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        (left @ left)[0, 0].item()  # to read a value waits for the product
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best / 1e12


def _roofline(measured: Sequence[Line]) -> Table:
    drawn = Table(box=None, pad_edge=False)
    for column in (
        *("work", "precision", "stack", "graphs", "updates/s", "GFLOP", "kernels", "gaps", "TFLOP/s", "of the peak"),
        "while kernels run",
    ):
        drawn.add_column(column, justify="left" if column in ("work", "precision") else "right")
    for each in measured:
        drawn.add_row(
            each.work,
            each.precision,
            "one by one" if each.stack == 1 else str(each.stack),
            "yes" if each.graphs else "",
            _rate(each.updates_per_second, each.why),
            f"{each.gflop:.3g}",
            "" if each.kernel_ms is None else f"{each.kernel_ms:.3g} ms",
            "" if each.gap_ms is None else f"{each.gap_ms:.3g} ms",
            "" if each.teraflops is None else f"{each.teraflops:.2f}",
            "" if each.roof is None else percent(each.roof),
            "" if each.kernel_roof is None else percent(each.kernel_roof),
        )
    return drawn


def _together(shared: Sequence[Share]) -> Table:
    drawn = Table(box=None, pad_edge=False)
    for column in ("work", "trainers on the GPU", "MPS", "updates/s"):
        drawn.add_column(column, justify="left" if column == "work" else "right")
    for each in shared:
        rate = _rate(each.updates_per_second, each.why)
        drawn.add_row(each.work, str(each.trainers), "yes" if each.service else "", rate)
    return drawn


def _apart(measured: Sequence[JobLine]) -> Table:
    drawn = Table(box=None, pad_edge=False)
    for column in ("server job, a step", "ordinary", "with graphs", "gain", "bits"):
        drawn.add_column(column, justify="left" if column in ("server job, a step", "bits") else "right")
    for each in measured:
        if each.ordinary_ms is None or each.graphs_ms is None:
            drawn.add_row(each.job, Text(each.why))
            continue
        gain = each.ordinary_ms.median / each.graphs_ms.median
        times = (f"{spread.median:,.1f} ms" for spread in (each.ordinary_ms, each.graphs_ms))
        drawn.add_row(each.job, *times, f"{gain:.1f}", "the same" if each.same else "NOT THE SAME")
    return drawn


def _rate(rate: Spread | None, why: str) -> Text:
    return Text(f"{rate.median:,.1f}" if rate else why)
