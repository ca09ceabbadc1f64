"""Decodes images in several threads: into blocks of uint8, channels first, all of one size."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fedemu.ops.data.cache import Coloured
from fedemu.ops.data.own.pillow import channels_first, of_eight_bits
from fedemu.ops.data.source import DataSource
from fedemu.protocol.errors import DataError
from fedemu.protocol.host.hardware import cores

_BLOCK = 128
_CHUNK = 16
_SHORTER_SIDE = 8 / 7
"""The shorter side of an image, as a multiple of the square that is cut out: 256 for 224 pixels, as for ImageNet."""

Cell = Mapping[str, Any] | None
"""An image: its encoded ``bytes``, or else the ``path`` of its file. None if the cell is empty."""


def image_blocks(
    source: DataSource, rows: NDArray[np.int64], cells: Callable[[int, int], Sequence[Cell]], grey: bool
) -> Iterator[NDArray[np.uint8]]:
    """Decode the images of ``rows`` into blocks ``[k, channels, height, width]``. ``cells(start, stop)`` reads some.

    ``rows`` are their places in the data, for errors. With ``source.image_size`` all become squares of that size.
    Without it they have to be of one size already. With ``grey`` they get one channel, and ``Coloured`` is raised at
    the first one that needs three. Raises DataError if an image cannot be decoded or has another size.
    """
    shape: tuple[int, ...] | None = None
    with ThreadPoolExecutor(cores()) as pool:
        for start in range(0, len(rows), _BLOCK):
            block = cells(start, min(start + _BLOCK, len(rows)))
            # A thread gets several images at once, because handing over takes longer than decoding a small one.
            chunks = [(start + at, block[at : at + _CHUNK]) for at in range(0, len(block), _CHUNK)]
            decoded = pool.map(
                lambda chunk: [_named(source, rows[chunk[0] + i], cell, grey) for i, cell in enumerate(chunk[1])],
                chunks,
            )
            pixels = [image for chunk in decoded for image in chunk]
            shape = shape or pixels[0].shape
            for row, image, cell in zip(rows[start : start + _BLOCK], pixels, block, strict=True):
                if image.shape != shape:
                    raise DataError(
                        f"the images of {source.dataset!r} differ in size: {_size(shape)} first, "
                        f"{_size(image.shape)} in {_where(source, row, cell)}; set data.image_size to one for all"
                    )
            yield np.stack(pixels)


def _named(source: DataSource, row: int, cell: Cell, grey: bool) -> NDArray[np.uint8]:
    try:
        return _pixels(cell, grey, source.image_size)
    except (Coloured, MemoryError):
        raise
    except Exception as error:  # Pillow raises errors of many types for damaged images
        reason = (getattr(error, "strerror", None) or str(error)).partition(" <_io")[0].partition(" '/")[0]
        raise DataError(f"the image in {_where(source, row, cell)} can't be decoded: {reason}") from error


def _where(source: DataSource, row: int, cell: Cell) -> str:
    if cell is not None and cell["bytes"] is None and cell["path"] is not None:
        return str(cell["path"])
    return f"row {row + 1} of {source.dataset!r}"


def _pixels(cell: Cell, grey: bool, side: int) -> NDArray[np.uint8]:
    """The pixels of an image, ``[1, height, width]`` or ``[3, height, width]``.

    Transparency is dropped, and photographs that were taken sideways are turned upright.
    """
    if cell is None or (cell["bytes"] is None and cell["path"] is None):
        raise ValueError("there is none")
    with Image.open(io.BytesIO(cell["bytes"]) if cell["bytes"] is not None else cell["path"]) as image:
        # This loads the image, because some files tell behind their pixels how they are turned.
        ImageOps.exif_transpose(image, in_place=True)
        plain = of_eight_bits(image)
        if plain is None:
            raise ValueError(f"pixels of mode {image.mode} don't fit eight bits; convert them")
        channels = channels_first(_fitted(plain, side))
    if len(channels) == 1:
        return channels if grey else np.repeat(channels, 3, axis=0)
    if not grey:
        return channels
    if not (np.array_equal(channels[0], channels[1]) and np.array_equal(channels[0], channels[2])):
        raise Coloured
    return channels[:1]


def _fitted(image: Image.Image, side: int) -> Image.Image:
    """Resize an image bilinearly until its shorter side is 8/7 of ``side``, and cut out its centre, a square.

    An image that has this size already stays as it is. With ``side`` 0 every image stays as it is.
    """
    if not side or image.size == (side, side):
        return image
    width, height = image.size
    shorter = round(side * _SHORTER_SIDE)
    scale = shorter / min(width, height)
    width, height = max(shorter, int(width * scale)), max(shorter, int(height * scale))
    left, top = round((width - side) / 2), round((height - side) / 2)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return resized.crop((left, top, left + side, top + side))


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[2]} x {shape[1]}"
