"""The data of an experiment as every process sees it: memory-mapped samples, labels and named columns.

``fedemu.ops.data.corpora`` finds and decodes a data set. ``fedemu.algorithms.data.partition`` says who holds which
sample.
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
"""The target of a token that is not to be predicted."""


@dataclass(frozen=True)
class Split:
    """Samples ``x [n, *input_shape]`` and labels ``y [n]`` int64, both read-only and usually memory-mapped.

    ``x`` is uint8 or float32; tokens are int16, int32 or int64. ``columns`` are further values per sample,
    ``[n]`` each, such as writers. A partition may divide by them.
    """

    x: NDArray[Any]
    y: NDArray[np.int64]
    columns: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Corpus:
    """A data set of two splits. The ``input_shape`` of images is ``(channels, height, width)``.

    ``mean`` and ``std`` (float64, one for each entry of the first axis of a sample) are those of ``train``, in the
    units in which ``x`` is stored. ``digest`` differs if samples, labels, columns or vocabulary differ, so that
    machines can be compared.

    A sample of language data is ``[2, length]``, int16 or int32: the tokens that a model reads, and the tokens that it
    should predict, with ``NO_TARGET`` for none. Other samples of signed whole numbers are tokens too, whose label is to
    be predicted. For both, ``mean`` is 0 and ``std`` 1.
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
    """The tokens of language data by number. Empty for other data."""
    left_out: tuple[str, ...] = ()
    """The columns of a table of numbers that are no numbers, and so no part of a sample."""
    own_test_split: bool = False
    """Whether the data set has a test split of its own, and none was set apart."""

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    @property
    def language(self) -> bool:
        """Whether the data are texts: samples ``[2, length]`` of tokens to read and to predict."""
        return bool(self.vocabulary)

    @property
    def tokens(self) -> bool:
        """Whether samples are whole numbers that name something, such as tokens. They are never normalised."""
        return self.train.x.dtype.kind == "i"

    @property
    def outputs(self) -> int:
        """The width of a model's last layer: a logit for each token of the vocabulary, or for each class."""
        return len(self.vocabulary) or self.classes

    @property
    def labelled(self) -> bool:
        """Whether there is more than one class. With a single class ``y`` is 0 for all samples."""
        return self.classes > 1

    def batch(self, split: Split, indices: NDArray[np.integer[Any]]) -> tuple[Tensor, Tensor]:
        """The samples and labels at ``indices [...]``: float32 ``[..., *input_shape]`` and int64 ``[...]``.

        Samples are normalised, ``(x - mean) / std``; tokens stay as they are, int64. The index -1 is the last sample,
        so that padding reads finite values.
        """
        import torch  # Here, so that light processes, which only look at labels and shapes, do without it.

        y = torch.from_numpy(split.y.take(indices, axis=0))
        if self.tokens:
            return torch.from_numpy(split.x.take(indices, axis=0).astype(np.int64)), y
        x = split.x.take(indices, axis=0).astype(np.float32, copy=False)
        np.multiply(x, self.scale, out=x)
        np.add(x, self.shift, out=x)
        return torch.from_numpy(x), y

    @cached_property
    def scale(self) -> NDArray[np.float32]:
        """What samples are multiplied by before ``shift`` is added, ``[channels, 1, ...]``."""
        return self._per_channel(1.0 / self.std)

    @cached_property
    def shift(self) -> NDArray[np.float32]:
        """What is added to samples after they were multiplied by ``scale``, ``[channels, 1, ...]``."""
        return self._per_channel(-self.mean / self.std)

    def _per_channel(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        return values.reshape(-1, *[1] * (len(self.input_shape) - 1)).astype(np.float32)
