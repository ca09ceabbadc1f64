"""Random numbers as pure functions of a key, for models in training.

They are computed from the key, from the number of the draw and from the position in the tensor, by integer arithmetic
alone. So they are the same on all machines, for one device and in a stack of devices, and a draw can be mapped over
keys and recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KEY_SHAPE: Final = (2,)
"""The shape of a key, which is of int32."""
BITS: Final = 24
"""The number of random bits in one number: those that a float32 below 1 can have."""
_GOLDEN: Final = 0x9E3779B97F4A7C15


def keys(seeds: NDArray[np.uint64], steps: NDArray[np.int64]) -> NDArray[np.int32]:
    """One key ``[n, 2]`` for each seed and step, both ``[n]``. Keys of different steps are unrelated (SplitMix64)."""
    x: NDArray[np.uint64] = seeds + (steps.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int32).reshape(-1, 2)


class Draws:
    """Random tensors by the key ``[2]``, int32. Each call draws anew.

    ``count`` is the number of tensors that were drawn, and ``seeds`` that of seeds. The same calls give the same
    tensors under the same key.
    """

    def __init__(self, key: Tensor) -> None:
        self.key = key
        self.count = 0
        self.seeds = 0

    def seed(self) -> int:
        """A seed of 63 bits, for generators that know no key. Each call gives another one."""
        step, self.seeds = self.seeds, self.seeds + 1
        # Under torch.func a tensor may have no memory that numpy could read.
        key = np.array([int(word) for word in self.key], np.int32)
        return int(keys(key.view(np.uint64), np.array([step])).view(np.uint64)[0, 0]) >> 1

    def bits(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Random whole numbers from 0 to 2**24 - 1, int32.

        The position is hashed in two rounds with one half of the key each; the second is "lowbias32" of C. Wellons.
        """
        first, second = (part ^ _constant(2 * self.count + i) for i, part in enumerate(self.key.to(device).unbind()))
        self.count += 1
        x = torch.arange(math.prod(shape), dtype=torch.int32, device=device) ^ first
        x = _folded(x * _signed(0x9E3779B1), 15) + second
        x = _folded(x, 16) * _signed(0x7FEB352D)
        x = _folded(x, 15) * _signed(0x846CA68B)
        return _shifted(_folded(x, 16), 32 - BITS).reshape(tuple(shape))

    def uniform(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Uniform in the open interval from 0 to 1. Of complex numbers both parts are."""
        if dtype.is_complex:
            return torch.complex(*(self.uniform(shape, device, dtype.to_real()) for _ in range(2)))
        values = (self.bits(shape, device).to(_exact(dtype)) + 0.5) * 2.0**-BITS
        # The greatest values may be rounded up to 1.
        return values.to(dtype).clamp(max=1 - torch.finfo(dtype).eps / 2)

    def normal(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Standard normal; no number is larger than 5.5. Both parts of a complex number have the variance 1/2."""
        if dtype.is_complex:
            return math.sqrt(0.5) * torch.complex(*(self.normal(shape, device, dtype.to_real()) for _ in range(2)))
        return (torch.erfinv(2 * self.uniform(shape, device, _exact(dtype)) - 1) * math.sqrt(2)).to(dtype)

    def exponential(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Exponential with the mean 1."""
        return -self.uniform(shape, device, _exact(dtype)).log().to(dtype)

    def below(self, p: Any, shape: Sequence[int], device: torch.device) -> Tensor:
        """True with the probability ``p``, a number or a tensor that fits to ``shape``."""
        bits = self.bits(shape, device)
        return bits < ((p.to(torch.float32) * 2.0**BITS).round() if isinstance(p, Tensor) else round(p * 2**BITS))

    def kept(self, input: Tensor, p: float, shape: Sequence[int] | None = None) -> Tensor:
        """What dropout multiplies ``input`` by: 0 with the probability ``p``, else 1 / (1 - p)."""
        kept = self.below(1 - p, input.shape if shape is None else shape, input.device)
        return kept.to(input.dtype) * (1 / (1 - p) if p < 1 else 0.0)


def _constant(number: int) -> int:
    """32 bits that belong to this number."""
    seed = np.array([number], np.uint64) * np.uint64(0xD1342543DE82EF95)
    return int(keys(seed, np.zeros(1, np.int64))[0, 0])


def _shifted(x: Tensor, by: int) -> Tensor:
    """The 32 bits of ``x`` shifted to the right, where zeros come in from the left."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _folded(x: Tensor, by: int) -> Tensor:
    return x ^ _shifted(x, by)


def _signed(number: int) -> int:
    """The same 32 bits as a number with a sign."""
    return number - 2**32 if number >= 2**31 else number


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
