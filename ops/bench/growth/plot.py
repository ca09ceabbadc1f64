"""The plot of all curves: one panel each, both axes logarithmic, with a line of slope 1 to compare with."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fedemu.ops.bench.growth.curve import Curve
from fedemu.ops.pages.style import bare_figure, drawn, saved
from fedemu.protocol.host.files import usable, write_for_people


def files(folder: Path) -> tuple[Path, Path]:
    """The files of the plot in a folder."""
    return folder / "growth.png", folder / "growth.svg"


def make_ready(folder: Path) -> None:
    """Make the folder, in which the plot is written hours later. Raises ConfigurationError if that can't be done."""
    with usable(folder, "name another folder with --plots"):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def draw(curves: Sequence[Curve], folder: Path) -> None:
    """Write the plot into a folder that is ready. Raises FedemuError if the disk does not take it."""
    figure = drawn(_panels, curves)
    assert figure is not None
    png, svg = files(folder)
    write_for_people(png, saved(figure, "png"))
    write_for_people(svg, saved(figure, "svg"))


def _panels(curves: Sequence[Curve]) -> Figure:
    figure = bare_figure(10.0, 3.4)
    for place, curve in enumerate(curves, start=1):
        axes = figure.add_subplot(1, len(curves), place)
        sizes = [point.size for point in curve.points]
        last = curve.points[-1]
        axes.loglog(sizes, [point.cpu for point in curve.points], marker="o", label="CPU")
        axes.loglog(sizes, [point.wall for point in curve.points], marker="s", linestyle=":", label="wall")
        one = [last.cpu * size / last.size for size in sizes]
        axes.loglog(sizes, one, linestyle="--", linewidth=1, color="grey", label="slope 1")
        axes.set_title(f"slope {curve.slope:.2f}, at the end {curve.last_slope:.2f}")
        axes.set_xlabel(curve.title)
        axes.set_xticks(sizes[::2], curve.labels[::2])
        axes.minorticks_off()
        if place == 1:
            axes.set_ylabel("seconds of a round")
            axes.legend()
    return figure
