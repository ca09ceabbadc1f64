"""The inputs of a Hugging Face split, block by block: images as channels-first uint8, or rows of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import datasets  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from fedemu.ops.data.columns import is_vector, listed, number_type
from fedemu.ops.data.images import image_blocks
from fedemu.ops.data.source import DataSource
from fedemu.protocol.errors import DataError

_ROWS = 1024


def blocks(source: DataSource, split: datasets.Dataset, inputs: Sequence[str], grey: bool) -> Iterator[NDArray[Any]]:
    """Consecutive samples ``[k, ...]``, so few at a time that the whole split need not fit into memory."""
    if isinstance(split.features[inputs[0]], datasets.Image):
        return _images(source, split, inputs[0], grey)
    wrong = [name for name in inputs if not number_type(split.features[name]) and not is_vector(split.features[name])]
    if wrong:
        raise DataError(f"the column {listed(wrong)} of {source.dataset!r} holds neither images nor numbers")
    if source.image_size:
        raise DataError(f"the data set {source.dataset!r} holds numbers and no images; leave out data.image_size")
    return _numbers(source, split, inputs)


def _images(source: DataSource, split: datasets.Dataset, column: str, grey: bool) -> Iterator[NDArray[np.uint8]]:
    files = split.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    return image_blocks(source, len(files), lambda start, stop: files[start:stop][column], grey)


def _numbers(source: DataSource, split: datasets.Dataset, inputs: Sequence[str]) -> Iterator[NDArray[Any]]:
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
