"""Flat arrays with offsets, as partitions and streams are: who owns which entry."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def owners_of(offsets: Indices) -> Indices:
    """The owner of each entry, ``[entries]``, from the owners' ``offsets [owners + 1]``."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def offsets_of(owner: Indices, owners: int) -> Indices:
    """The ``offsets [owners + 1]`` of entries that are sorted by owner; ``owner [entries]`` may have any order."""
    return np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=owners))])
