"""The form of one tensor of a payload."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedemu.protocol.tensors import DTYPES


@dataclass(frozen=True)
class Leaf:
    """The dtype and shape that one tensor of a payload must have."""

    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @cached_property
    def bytes(self) -> int:
        """The size in bytes."""
        return self.size * DTYPES[self.dtype].itemsize


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bits, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
