"""The pictures of what a method generated: for each class a real sample, and below it the images of its generator.

As in figure 6 of Babakniya et al., "A Data-Free Approach to Mitigate Catastrophic Forgetting", 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedemu.ops.pages.colours import GREY, INK
from fedemu.ops.pages.style import literal

FEW_CLASSES: Final = 10
"""Up to this number of classes a picture fits beside another one.

A picture of more classes takes the width of the page, with 20 classes in a band.
"""
MOST_ROWS: Final = 16
"""The largest number of rows of generated samples in all bands together. Each band has at least two rows."""
LONGEST_NAME: Final = 14
"""A longer name of a class is cut."""
CELL: Final = 0.56
"""The width of an image, in inches."""
LEFT, RIGHT, TOP, BOTTOM, SPACE = 0.75, 0.1, 0.42, 0.1, 0.06
"""The margins of a picture, and the space between its bands, in inches."""

Generated = Mapping[str, NDArray[Any]]
"""What was generated in one task: the arrays of ``generated/task-N.npz``, by name."""
Image = NDArray[np.uint8]


def is_broad(generated: Generated) -> bool:
    """Whether the picture takes the width of the HTML page."""
    return len(generated["names"]) > FEW_CLASSES


def samples_of_task(task: int, generated: Generated) -> Figure | None:
    """For each class a real sample, and below it the images of the generator. None if nothing was generated.

    ``task`` counts from 0, and the picture counts from 1.
    """
    classes = np.unique(generated["y"])
    if not len(classes):
        return None
    columns = 20 if is_broad(generated) else FEW_CLASSES
    bands = [classes[start : start + columns] for start in range(0, len(classes), columns)]
    most = max(2, MOST_ROWS // len(bands))
    rows = min(most, int(np.bincount(generated["y"]).max()))
    names = {int(label): _name(generated, int(label)) for label in classes}
    sideways = max(map(len, names.values())) > 6
    head = 0.08 * max(map(len, names.values())) + 0.1 if sideways else 0.2
    mosaics = [_mosaic(generated, band, columns, rows) for band in bands]
    height, width = mosaics[0].shape[:2]
    inches = columns * CELL
    tall = inches * height / width
    figure = Figure(figsize=(LEFT + inches + RIGHT, TOP + len(bands) * (head + tall + SPACE) + BOTTOM))
    whole_width, whole_height = figure.get_size_inches()
    figure.text(0.1 / whole_width, 1 - 0.26 / whole_height, f"Generated in task {task + 1}", weight="bold", size=11)
    for place, (band, mosaic) in enumerate(zip(bands, mosaics, strict=True)):
        bottom = whole_height - TOP - (place + 1) * (head + tall) - place * SPACE
        axes = figure.add_axes(
            (LEFT / whole_width, bottom / whole_height, inches / whole_width, tall / whole_height), frameon=False
        )
        axes.imshow(mosaic, extent=(0, columns, 0, rows + 1), aspect="auto", interpolation=_interpolation(generated))
        axes.set_axis_off()
        axes.axhline(rows, xmax=len(band) / columns, color=GREY, linewidth=0.8)
        for column, label in enumerate(band):
            turned: dict[str, Any] = {"rotation": 90} if sideways else {}
            axes.text(column + 0.5, rows + 1.08, literal(names[int(label)]), ha="center", va="bottom", size=8, **turned)
        for text, middle in (("real", rows + 0.5), ("generated", rows / 2)):
            axes.text(-0.12, middle, text, ha="right", va="center", size=8, color=INK)
    return figure


def _mosaic(generated: Generated, band: NDArray[Any], columns: int, rows: int) -> Image:
    """The band's images, on top of each column a real one and below it generated ones: ``[pixels, pixels, rgba]``.

    What lies between them can be seen through.
    """
    height, width = generated["x"].shape[2:]
    gap = max(1, round(0.06 * width))
    cells = np.zeros(((rows + 1), columns, height + 2 * gap, width + 2 * gap, 4), dtype=np.uint8)
    for column, label in enumerate(band):
        real = generated["real"][generated["real_y"] == label][:1]
        made = generated["x"][generated["y"] == label][:rows]
        for first, images in ((0, real), (1, made)):
            pixels = np.broadcast_to(images.transpose(0, 2, 3, 1), (len(images), height, width, 3))
            cells[first : first + len(images), column, gap:-gap, gap:-gap, :3] = pixels
            cells[first : first + len(images), column, gap:-gap, gap:-gap, 3] = 255
    return cells.transpose(0, 2, 1, 3, 4).reshape((rows + 1) * (height + 2 * gap), -1, 4)


def _interpolation(generated: Generated) -> str:
    """How images are scaled: small ones are enlarged pixel by pixel, large ones are reduced smoothly."""
    return "none" if generated["x"].shape[3] <= 64 else "antialiased"


def _name(generated: Generated, label: int) -> str:
    """The name of a class, cut if it is long, or its number if it has no name."""
    name = str(generated["names"][label]) if label < len(generated["names"]) else str(label)
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
