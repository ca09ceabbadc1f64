"""Accuracy and loss of the global model on the test split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedemu.algorithms.corpus import Corpus
from fedemu.algorithms.interface import Model, Tree

CACHE_LIMIT = 256 * 2**20
"""Bytes up to which the normalised test split is kept in memory."""


@dataclass(frozen=True)
class Evaluation:
    """``accuracy`` is over samples, ``loss`` the mean cross-entropy of plain logits in nats.

    ``class_accuracy [classes]`` is NaN (null in the run directory) for a class that the test split does not hold.
    """

    accuracy: float
    loss: float
    class_accuracy: tuple[float, ...]


class Evaluator:
    """Evaluates one model on one corpus, in chunks of ``batch_size`` samples, as often as asked.

    Sums are kept in float64 over per-sample losses, so chunks change a loss by no more than the model's own rounding.
    """

    def __init__(self, model: Model, corpus: Corpus, batch_size: int = 512) -> None:
        if len(corpus.test) == 0:
            raise ValueError(f"the data set {corpus.name!r} has no test samples to evaluate on")
        self._model = model
        self._corpus = corpus
        self._batch_size = batch_size
        small = 4 * int(np.prod(corpus.input_shape)) * len(corpus.test) <= CACHE_LIMIT
        self._cache = list(self._read()) if small else None

    @torch.inference_mode()
    def evaluate(self, variables: Tree) -> Evaluation:
        classes = self._corpus.classes
        laid_out = {name: self._laid_out(tensor) for name, tensor in variables.items()}
        loss = torch.zeros((), dtype=torch.float64)
        right = torch.zeros(classes, dtype=torch.int64)
        seen = torch.zeros(classes, dtype=torch.int64)
        for x, y in self._cache if self._cache is not None else self._read():
            outputs, _ = self._model.apply(laid_out, x, False)
            logits = outputs.logits.double()
            loss += torch.nn.functional.cross_entropy(logits, y, reduction="sum")
            hits = logits.argmax(1) == y
            right += torch.bincount(y[hits], minlength=classes)
            seen += torch.bincount(y, minlength=classes)
        total = int(seen.sum())
        return Evaluation(
            accuracy=int(right.sum()) / total,
            loss=float(loss) / total,
            class_accuracy=tuple(
                hit / count if count else float("nan") for hit, count in zip(right.tolist(), seen.tolist(), strict=True)
            ),
        )

    def _read(self) -> Iterator[tuple[Tensor, Tensor]]:
        indices = np.arange(len(self._corpus.test))
        for start in range(0, len(indices), self._batch_size):
            x, y = self._corpus.batch(self._corpus.test, indices[start : start + self._batch_size])
            yield self._laid_out(x), y

    def _laid_out(self, tensor: Tensor) -> Tensor:
        """Convolutions on a CPU are faster on channels-last memory."""
        if self._model.kind == "convolutional" and tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor
