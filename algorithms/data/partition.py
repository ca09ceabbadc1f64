"""Which device holds which training sample: the partition as flat arrays.

``partitioners.py`` draws partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.flat import Indices
from fedemu.protocol.errors import ConfigurationError


@dataclass(frozen=True)
class Partition:
    """Device ``i`` trains on ``train_indices[train_offsets[i]:train_offsets[i + 1]]``.

    Its validation samples are found in the same way.

    Offsets are ``[devices + 1]``. Indices point into ``Corpus.train`` and ascend within a device.
    """

    train_offsets: Indices
    train_indices: Indices
    validation_offsets: Indices
    validation_indices: Indices

    def __len__(self) -> int:
        """The number of devices."""
        return len(self.train_offsets) - 1

    def device(self, index: int) -> tuple[Indices, Indices]:
        """One device's training and validation indices (views). Raises IndexError if there is no such device."""
        if not 0 <= index < len(self):
            raise IndexError(f"device {index} of {len(self)}")
        train = slice(self.train_offsets[index], self.train_offsets[index + 1])
        validation = slice(self.validation_offsets[index], self.validation_offsets[index + 1])
        return self.train_indices[train], self.validation_indices[validation]

    @classmethod
    def of(cls, shares: Sequence[Indices], validation: float, generator: np.random.Generator) -> Partition:
        """The partition of these shares, one ascending index array per device.

        ``floor(validation * samples)`` samples of a device are drawn at random for validation, so at least one stays
        for training.
        """
        if not 0.0 <= validation < 1.0:
            raise ConfigurationError(f"the validation fraction is {validation}; it must be at least 0 and below 1")
        if not validation:  # a million devices take two seconds less
            return cls(*_flatten(shares), np.zeros(len(shares) + 1, np.int64), np.empty(0, np.int64))
        train: list[Indices] = []
        held_out: list[Indices] = []
        for share in shares:
            chosen = np.zeros(len(share), dtype=bool)
            if count := max(0, min(int(share_of(validation, len(share))), len(share) - 1)):
                chosen[generator.permutation(len(share))[:count]] = True
            train.append(share[~chosen])
            held_out.append(share[chosen])
        return cls(*_flatten(train), *_flatten(held_out))


@overload
def share_of(fraction: float, samples: int) -> float: ...
@overload
def share_of(fraction: float, samples: Indices) -> NDArray[np.float64]: ...
def share_of(fraction: float, samples: int | Indices) -> float | NDArray[np.float64]:
    """``fraction · samples``, before it is rounded up or down.

    A product that is not whole by a rounding error alone counts as whole.
    So 0.29 of 100 samples are 29, although the product of the floats is a little less.
    """
    share: float | NDArray[np.float64] = np.round(fraction * np.asarray(samples), 9)
    return share


def _flatten(parts: Sequence[Indices]) -> tuple[Indices, Indices]:
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)), out=offsets[1:])
    return offsets, np.concatenate([np.empty(0, dtype=np.int64), *parts])
