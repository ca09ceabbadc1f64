"""What a round costs, against the number of devices, the size of the model, and the size of a cohort."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fedemu.ops.bench.growth.curve import WANTED, Curve, Point
from fedemu.ops.bench.growth.plot import draw, files, make_ready
from fedemu.ops.bench.growth.point import FEATURES
from fedemu.ops.bench.measuring.measure import Effort, Sample, Tell
from fedemu.ops.bench.measuring.worker import Worker
from fedemu.ops.figures import readable_bytes

_WARM: Final = 2
_SECONDS: Final = 1800.0

EXPLANATION: Final = (
    "All devices, a trainer and the coordinator run in one process, over a network in memory. Seconds are those of one "
    "round. A slope is that of a line through all points, and the last slope that of the last two points, both with "
    "logarithmic axes: 1 means twice the cost for twice the size. CPU tells it; wall time also has the disk's."
)


@dataclass(frozen=True)
class Axis:
    """What grows: its sizes, and the settings of a run of a size. ``unit`` is empty for counts."""

    title: str
    sizes: tuple[int, ...]
    settings: Mapping[int, tuple[str, ...]]
    unit: str = ""

    def written(self, size: int) -> str:
        """A size for people."""
        return readable_bytes(size) if self.unit == "B" else f"{size:,}"


def _models(sizes: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """Perceptrons of these sizes in bytes, each trained by two devices."""
    per_unit = 4 * (FEATURES + 1 + 2)  # a hidden unit: its weights, its bias, and what leads to two classes
    return {
        size: (
            f"model.hidden=[{round(size / per_unit)}]",
            "fleet.devices=4",
            "fleet.per_round=2",
            "availability={kind='always'}",
            "faults.crash_rate=0",
            "local.executor=serial",
        )
        for size in sizes
    }


_DEVICES: Final = (300, 1_000, 3_000, 10_000, 30_000)
_BYTES: Final = (5_000, 50_000, 500_000, 5_000_000, 50_000_000, 100_000_000)
_COHORTS: Final = (10, 30, 100, 300, 1_000)
AXES: Final = (
    Axis(
        "devices, of which 30 train",
        _DEVICES,
        {size: (f"fleet.devices={size}", "fleet.per_round=30") for size in _DEVICES},
    ),
    Axis("size of the model, trained by 2 devices", _BYTES, _models(_BYTES), "B"),
    Axis(
        "devices in a round, of 2,000",
        _COHORTS,
        {size: ("fleet.devices=2000", f"fleet.per_round={size}", "availability={kind='always'}") for size in _COHORTS},
    ),
)


@dataclass(frozen=True)
class Growth:
    """All curves, and the folder of their plot if it is wanted."""

    curves: tuple[Curve, ...]
    folder: Path | None = None

    @property
    def plots(self) -> tuple[Path, ...]:
        """The files of the plot."""
        return files(self.folder) if self.folder else ()

    def table(self) -> dict[str, Any]:
        """The curves for JSON."""
        curves = [asdict(each) | {"slope": each.slope, "last_slope": each.last_slope} for each in self.curves]
        return {"curves": curves, "wanted": WANTED, "plots": [str(path) for path in self.plots]}

    def __rich_console__(self, console: Console, options: Any) -> Iterator[Group]:
        for curve in self.curves:
            drawn = Table(box=None, pad_edge=False)
            for column in ("size", "CPU s", "wall s"):
                drawn.add_column(column, justify="right")
            for label, point in zip(curve.labels, curve.points, strict=True):
                drawn.add_row(label, f"{point.cpu:.3g}", f"{point.wall:.3g}")
            verdict = "reached" if curve.met else "missed"
            said = f"slope {curve.slope:.2f}, last slope {curve.last_slope:.2f}; wanted {WANTED} or less: {verdict}"
            yield Group(f"[bold]{curve.title}[/]", drawn, said, "")
        yield Group(EXPLANATION, *(Text(f"plot: {path}") for path in self.plots))


def grow(effort: Effort, folder: Path | None, tell: Tell, axes: Sequence[Axis] = AXES) -> Iterator[Growth]:
    """Measure all points. The curves as they grow, each from its second point on.

    If there is a ``folder``, it is made ready for their plot, which is drawn at the end as a PNG and an SVG. With less
    effort only the points of a tenth of the largest size and less are measured. Raises FedemuError if the disk does not
    take the plot.
    """
    if folder:
        make_ready(folder)
    curves: list[Curve] = []
    for axis in axes:
        sizes = [size for size in axis.sizes if effort.scale >= 1 or size <= axis.sizes[-1] // 10]
        points: list[Point] = []
        for size in sizes:
            tell(f"growth: {axis.title}: {axis.written(size)}")
            sample = _measured(axis.settings[size], effort)
            points.append(Point(size, sample.wall / sample.work, sample.cpu / sample.work))
            curve = Curve(axis.title, tuple(map(axis.written, sizes[: len(points)])), tuple(points))
            if len(points) > 1:
                yield Growth((*curves, curve), folder)
        curves.append(curve)
    if folder:
        draw(curves, folder)


def _measured(settings: Sequence[str], effort: Effort) -> Sample:
    """One point, in a process of its own."""
    arguments = {"overrides": list(settings), "warm": _WARM, "measured": max(2, effort.count(6))}
    with Worker("fedemu.ops.bench.growth.point:rounds", arguments, seconds=_SECONDS) as worker:
        return worker.ready().measure()
