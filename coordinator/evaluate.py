"""Accuracy and loss of a model on the test split, or on any other samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.corpus import Corpus, Split
from fedemu.algorithms.interface import Model, Tree

CACHE_LIMIT = 256 * 2**20
"""Bytes up to which the normalised test split is kept in memory."""


BATCH_SIZE = 512


@dataclass(frozen=True)
class Evaluation:
    """``accuracy`` is over samples, ``loss`` the mean cross-entropy of plain logits in nats.

    ``class_accuracy`` and ``class_loss`` ``[classes]`` are NaN (null in the run directory) for a class without samples.
    """

    accuracy: float
    loss: float
    class_accuracy: tuple[float, ...]
    class_loss: tuple[float, ...]


class Answers(NamedTuple):
    """What a model made of each sample: ``hits [n]``, whether it was right, and its cross-entropy ``losses [n]``."""

    hits: NDArray[np.bool_]
    losses: NDArray[np.float64]


class Evaluator:
    """Evaluates one model on one corpus's test split, in chunks of ``batch_size`` samples, as often as asked.

    With ``samples`` it takes so many of them, evenly spaced; 0 is all. Sums are kept in float64 over per-sample losses,
    so chunks change a loss by no more than the model's own rounding.
    """

    def __init__(self, model: Model, corpus: Corpus, batch_size: int = BATCH_SIZE, samples: int = 0) -> None:
        if len(corpus.test) == 0:
            raise ValueError(f"the data set {corpus.name!r} has no test samples to evaluate on")
        self._model = model
        self._corpus = corpus
        self._batch_size = batch_size
        self._indices = evenly_spaced(len(corpus.test), samples)
        self._labels = corpus.test.y[self._indices]
        small = 4 * int(np.prod(corpus.input_shape)) * len(self) <= CACHE_LIMIT
        self._cache = list(self._read()) if small else None

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._indices)

    def evaluate(self, variables: Tree) -> Evaluation:
        hits, losses = answer(self._model, variables, self._cache if self._cache is not None else self._read())
        return Evaluation(
            accuracy=float(hits.mean()),
            loss=float(losses.mean()),
            class_accuracy=self._by_class(hits),
            class_loss=self._by_class(losses),
        )

    def _by_class(self, values: NDArray[Any]) -> tuple[float, ...]:
        return tuple(mean_by(self._labels, values, self._corpus.classes).tolist())

    def _read(self) -> Iterator[tuple[Tensor, Tensor]]:
        return read(self._model, self._corpus, self._corpus.test, self._indices, self._batch_size)


@torch.inference_mode()
def answer(model: Model, variables: Tree, batches: Iterable[tuple[Tensor, Tensor]]) -> Answers:
    """What the model makes of batches of ``read``, sample by sample, in their order."""
    laid_out = {name: _laid_out(model, tensor) for name, tensor in variables.items()}
    hits, losses = [torch.empty(0, dtype=torch.bool)], [torch.empty(0, dtype=torch.float64)]
    for x, y in batches:
        outputs, _ = model.apply(laid_out, x, False)
        logits = outputs.logits.double()
        hits.append(logits.argmax(1) == y)
        losses.append(torch.nn.functional.cross_entropy(logits, y, reduction="none"))
    return Answers(torch.cat(hits).numpy(), torch.cat(losses).numpy())


def read(
    model: Model, corpus: Corpus, split: Split, indices: NDArray[np.int64], batch_size: int = BATCH_SIZE
) -> Iterator[tuple[Tensor, Tensor]]:
    """The split's samples at these indices, in batches as the model takes them, and their labels."""
    for start in range(0, len(indices), batch_size):
        x, y = corpus.batch(split, indices[start : start + batch_size])
        yield _laid_out(model, x), y


def mean_by(groups: NDArray[np.int64], values: NDArray[Any], count: int) -> NDArray[np.float64]:
    """The mean ``[count]`` of the ``values [n]`` of each of the ``groups [n]``; NaN for a group without values."""
    with np.errstate(invalid="ignore"):
        means: NDArray[np.float64] = np.bincount(groups, values, count) / np.bincount(groups, minlength=count)
    return means


def evenly_spaced(total: int, wanted: int) -> NDArray[np.int64]:
    """``wanted`` positions out of ``total``, from the first on; all of them where ``wanted`` is 0 or more than that."""
    count = min(wanted, total) or total
    return np.arange(count) * total // count


def _laid_out(model: Model, tensor: Tensor) -> Tensor:
    """Convolutions on a CPU are faster on channels-last memory."""
    if model.kind == "convolutional" and tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor
