"""Flat arrays with offsets, as partitions and streams are: who owns which entry, and reading them back from a blob."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.protocol.errors import DataError

Indices = NDArray[np.int64]


def owners_of(offsets: Indices) -> Indices:
    """The owner of each entry, ``[entries]``, from the owners' ``offsets [owners + 1]``."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def offsets_of(owner: Indices, owners: int) -> Indices:
    """The ``offsets [owners + 1]`` of entries that are sorted by owner; ``owner [entries]`` may have any order."""
    return np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=owners))])


def row(arrays: Mapping[str, NDArray[Any]], name: str, dtype: type[np.generic], what: str) -> NDArray[Any]:
    """The one-dimensional array ``name``. Raises DataError, which names ``what``, if there is none of this dtype."""
    if name not in arrays:
        raise DataError(f"the {what} lacks {name}")
    found = np.asarray(arrays[name])
    if found.dtype != dtype or found.ndim != 1:
        raise DataError(f"{name} of the {what} is {found.dtype} {list(found.shape)}, not a row of {dtype.__name__}")
    return found


def scalar(values: Indices, name: str, what: str) -> int:
    """The only value of a row. Raises DataError if the row has not exactly one."""
    if len(values) != 1:
        raise DataError(f"{name} of the {what} has {len(values)} values; it needs exactly 1")
    return int(values[0])


def check_offsets(offsets: Indices, indices: Indices, what: str) -> None:
    """Raise DataError if the offsets do not divide the indices, or if an index is negative."""
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(indices) or np.any(np.diff(offsets) < 0):
        raise DataError(f"the offsets of the {what} do not fit its {len(indices)} indices")
    if len(indices) and indices.min() < 0:
        raise DataError(f"the {what} holds the negative index {indices.min()}")
