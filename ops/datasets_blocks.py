"""The inputs of a Hugging Face split, block by block: images as channels-first uint8, or rows of numbers."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fedemu.ops.datasets_columns import is_vector, listed, number_type
from fedemu.ops.datasets_source import Source
from fedemu.protocol.errors import DataError

_BLOCK = 128
_CHUNK = 16
_ROWS = 1024
_GREY = ("1", "L", "LA", "La")
_COLOUR = ("P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")


class Coloured(Exception):
    """An image needs three channels where one was tried."""


def blocks(source: Source, split: datasets.Dataset, inputs: Sequence[str], grey: bool) -> Iterator[NDArray[Any]]:
    """Consecutive samples ``[k, ...]``, so few at a time that the whole split need not fit into memory."""
    if isinstance(split.features[inputs[0]], datasets.Image):
        return _images(source, split, inputs[0], grey)
    wrong = [name for name in inputs if not number_type(split.features[name]) and not is_vector(split.features[name])]
    if wrong:
        raise DataError(f"the column {listed(wrong)} of {source.dataset!r} holds neither images nor numbers")
    return _numbers(source, split, inputs)


def _images(source: Source, split: datasets.Dataset, column: str, grey: bool) -> Iterator[NDArray[np.uint8]]:
    files = split.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    shape: tuple[int, ...] | None = None
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for start in range(0, len(files), _BLOCK):
            cells = files[start : start + _BLOCK][column]
            # Several images to a thread, because a small one decodes faster than it is handed over.
            chunks = [(start + at, cells[at : at + _CHUNK]) for at in range(0, len(cells), _CHUNK)]
            decoded = pool.map(
                lambda chunk: [_named(source, chunk[0] + i, c, grey) for i, c in enumerate(chunk[1])], chunks
            )
            pixels = [image for chunk in decoded for image in chunk]
            shape = shape or pixels[0].shape
            for row, image in enumerate(pixels, start):
                if image.shape != shape:
                    raise DataError(
                        f"the images of {source.dataset!r} differ in size: {_size(shape)} first, "
                        f"{_size(image.shape)} in row {row}; resize them to one"
                    )
            yield np.stack(pixels)


def _named(source: Source, row: int, cell: Mapping[str, Any] | None, grey: bool) -> NDArray[np.uint8]:
    try:
        return _pixels(cell, grey)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).partition(" <_io")[0]
        raise DataError(f"the image in row {row} of {source.dataset!r} can't be decoded: {reason}") from error


def _pixels(cell: Mapping[str, Any] | None, grey: bool) -> NDArray[np.uint8]:
    """``[1, height, width]`` or ``[3, height, width]``; transparency is dropped, turned photographs are set upright."""
    if cell is None or (cell["bytes"] is None and cell["path"] is None):
        raise ValueError("there is none")
    with Image.open(io.BytesIO(cell["bytes"]) if cell["bytes"] is not None else cell["path"]) as opened:
        image: Image.Image = opened
        if "exif" in image.info:
            image = ImageOps.exif_transpose(image)
        if image.mode in _GREY:
            pixels = np.asarray(image.convert("L"))[None]
            return pixels if grey else np.repeat(pixels, 3, axis=0)
        if image.mode not in _COLOUR:
            raise ValueError(f"pixels of mode {image.mode} don't fit eight bits; convert them")
        channels = np.asarray(image if image.mode == "RGB" else image.convert("RGB")).transpose(2, 0, 1)
    if not grey:
        return channels
    if not (np.array_equal(channels[0], channels[1]) and np.array_equal(channels[0], channels[2])):
        raise Coloured
    return channels[:1]


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[2]} x {shape[1]}"


def _numbers(source: Source, split: datasets.Dataset, inputs: Sequence[str]) -> Iterator[NDArray[Any]]:
    table = split.select_columns(list(inputs)).with_format("arrow")
    kinds = {_innermost(split.features[name]) for name in inputs}
    dtype = np.uint8 if kinds == {"uint8"} else np.float32
    shape: tuple[int, ...] | None = None
    for start in range(0, len(table), _ROWS):
        read = table[start : start + _ROWS]
        columns = [read.column(name).to_pylist() for name in inputs]
        try:
            # A single column of vectors is the sample as it is; numbers side by side are a vector.
            single = len(columns) == 1 and is_vector(split.features[inputs[0]])
            x = np.asarray(columns[0] if single else list(zip(*columns, strict=True)), dtype=np.float64)
        except (TypeError, ValueError):
            x = np.full(1, np.nan)
        if not np.isfinite(x).all() or (shape is not None and x.shape[1:] != shape):
            raise DataError(
                f"rows {start} to {start + len(read) - 1} of {source.dataset!r} hold an empty cell, a value that "
                f"is not finite or a vector of another length in {listed(inputs)}"
            )
        shape = x.shape[1:]
        yield x.astype(dtype)


def _innermost(feature: Any) -> str:
    while getattr(feature, "feature", None) is not None:
        feature = feature.feature
    return str(feature.dtype)
