"""The data of an experiment as every process sees it: memory-mapped samples, labels and named columns.

How a data set is found and decoded is the business of ``fedemu.ops.data.corpora``; who holds which sample, that of
``fedemu.algorithms.data.partition``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedemu.protocol.ids import Digest

if TYPE_CHECKING:
    from torch import Tensor

NO_TARGET = -100
"""In place of a token that is not to be predicted."""


@dataclass(frozen=True)
class Split:
    """``x [n, *input_shape]`` and ``y [n]`` int64, both read-only and usually memory-mapped.

    ``x`` is uint8 or float32, and of language data int16 or int32.

    ``columns`` are further values per sample, ``[n]`` each, such as the natural id by which to partition.
    """

    x: NDArray[Any]
    y: NDArray[np.int64]
    columns: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Corpus:
    """A data set of two splits. Images are channels-first, so ``input_shape`` is ``(channels, height, width)``.

    ``mean`` and ``std`` (float64, one per entry of the first axis of a sample) are those of ``train``, in the units in
    which ``x`` is stored. ``digest`` tells apart machines whose samples, labels, columns or vocabulary differ.

    A sample of language data is ``[2, length]``, int16 or int32: the tokens that a model reads, and those that it is to
    predict, ``NO_TARGET`` where there are none. ``mean`` is then 0 and ``std`` 1.
    """

    name: str
    train: Split
    test: Split
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    digest: Digest
    vocabulary: tuple[str, ...] = ()
    """Of language data: the tokens by number."""

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def language(self) -> bool:
        """Whether samples are tokens and what is to be predicted of them: ``x [2, length]``."""
        return bool(self.vocabulary)

    @property
    def outputs(self) -> int:
        """What a model's last layer has: a logit for each token of the vocabulary, or for each class."""
        return len(self.vocabulary) or self.classes

    @property
    def labelled(self) -> bool:
        """Whether labels tell samples apart; where there is one class only, ``y`` is 0 for all."""
        return self.classes > 1

    def batch(self, split: Split, indices: NDArray[np.integer[Any]]) -> tuple[Tensor, Tensor]:
        """The samples at ``indices [...]``: normalised float32 ``[..., *input_shape]`` and int64 ``[...]``.

        Normalised means ``(x - mean) / std``; tokens are left as they are, int64. An index of -1 is the last sample, so
        padding reads something finite.
        """
        import torch  # kept out of the light processes that only look at labels and shapes

        y = torch.from_numpy(split.y.take(indices, axis=0))
        if self.language:
            return torch.from_numpy(split.x.take(indices, axis=0).astype(np.int64)), y
        x = split.x.take(indices, axis=0).astype(np.float32, copy=False)
        np.multiply(x, self._scale, out=x)
        np.add(x, self._shift, out=x)
        return torch.from_numpy(x), y

    @cached_property
    def _scale(self) -> NDArray[np.float32]:
        return self._per_channel(1.0 / self.std)

    @cached_property
    def _shift(self) -> NDArray[np.float32]:
        return self._per_channel(-self.mean / self.std)

    def _per_channel(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        return values.reshape(-1, *[1] * (len(self.input_shape) - 1)).astype(np.float32)
