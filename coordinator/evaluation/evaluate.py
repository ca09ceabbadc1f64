"""Accuracy and loss of a model on the test split, on the test sets of a stream's periods, or on any other samples.

A classifier gives one answer to each sample, so samples are counted. A language model gives ``logits [batch, length,
vocabulary]``, so predicted tokens are counted. Then the targets are ``x[:, 1]``, and ``NO_TARGET`` marks the places
where nothing is predicted.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.data.corpus import NO_TARGET, Corpus, Split
from fedemu.algorithms.data.flat import owners_of
from fedemu.algorithms.interface import Model, Outputs, Tree, pure
from fedemu.algorithms.layouts import channels_last
from fedemu.algorithms.measures.answers import right_answers
from fedemu.algorithms.measures.continual import perplexity
from fedemu.algorithms.scripts import misfit
from fedemu.algorithms.streams.period_tests import PeriodTests
from fedemu.coordinator.evaluation.threads import in_order
from fedemu.protocol.errors import ConfigurationError

CACHE_LIMIT = 256 * 2**20
"""Samples of up to this size in bytes are kept in memory, in the form that the model takes."""
BATCH_SIZE = 512
BATCH_LOGITS = 2**24
"""The most logits of a batch. The largest vocabularies make a batch smaller than ``BATCH_SIZE``."""
BATCH_BYTES = 2**20
"""The most bytes of the samples of a batch, if these are at least ``LEAST_BATCH``: 64 images of 3 × 32 × 32 numbers.

What a network makes of 512 such images are blocks of memory above 32 MiB. glibc gives each of them back to the system,
and then half of the time goes into their pages.
"""
LEAST_BATCH = 16
BLOCK_LOGITS = 2**20
"""The number of logits of predicted tokens that are float64 at a time. A block that fits a processor's cache is
several times faster."""
Watch = Callable[[Outputs, Tensor], None]
"""Sees the outputs of a model for each batch, and the labels ``[batch]``."""


@dataclass(frozen=True)
class Evaluation:
    """The results of a model. ``accuracy`` is over samples or predicted tokens. ``loss`` is the mean cross-entropy of
    plain logits, in nats.

    ``class_accuracy`` and ``class_loss [classes]`` are by the samples' labels. ``perplexity`` is ``exp(loss)`` of
    predicted tokens, None for samples. ``period_accuracy`` and ``period_loss [periods]`` are those of each period's
    test set, None without periods; ``period_since`` is ``PeriodTests.since``. ``seen_accuracy`` and ``seen_loss`` are
    those of the test sets up to a period together, None if no period was named. A value without samples, such as that
    of a class that has none, is NaN.

    ``validation_accuracy`` is that on all devices' validation parts together, None if it is not asked for.

    ``test_samples`` is the number of samples. If they are a part of all, there is nothing by class or by period.
    """

    accuracy: float
    loss: float
    class_accuracy: tuple[float, ...] = ()
    class_loss: tuple[float, ...] = ()
    perplexity: float | None = None
    seen_accuracy: float | None = None
    seen_loss: float | None = None
    period_accuracy: tuple[float, ...] | None = None
    period_loss: tuple[float, ...] | None = None
    validation_accuracy: float | None = None
    period_since: tuple[int, ...] | None = None
    test_samples: int | None = None


class Answers(NamedTuple):
    """The answers of a model to ``n`` samples. A sample has one answer, or one for each predicted token.

    ``answers [n]`` is the number of answers to each sample, ``hits [n]`` the number of right ones among them, and
    ``losses [n]`` the sum of their cross-entropy in nats.
    """

    hits: NDArray[np.int64]
    losses: NDArray[np.float64]
    answers: NDArray[np.int64]

    def only(self, samples: NDArray[np.bool_]) -> Answers:
        """The answers to these samples alone."""
        return Answers(self.hits[samples], self.losses[samples], self.answers[samples])


class Evaluator:
    """Evaluates one model on one corpus, in chunks that ``read`` makes of at most ``batch_size``, as often as asked.

    Without ``tests`` the samples are those of the test split. With ``tests`` they are the test sets of all periods
    together, and there are results by period if there are several. ``samples`` is the number of samples to take, evenly
    spaced over all; 0 takes all. ``part`` is the number of samples, evenly spaced over those, that do where not all of
    them have to be used; 0 uses all. ``validation [n]`` are samples that devices hold back, as indices into the
    training split; the model is tested on them, too. Losses are summed in float64, so chunks change a loss by no more
    than the model's own rounding. Raises ValueError if there are no samples.

    ``threads`` is the most threads that compute chunks at the same time, if the model bears it. Results are the same to
    the bit.

    ``chance`` is the share of the most frequent class among the samples, None for language data. A model that always
    answers with this class has this accuracy. ``periods`` is the number of periods with test sets, 1 without ``tests``.
    """

    def __init__(
        self,
        model: Model,
        corpus: Corpus,
        tests: PeriodTests | None = None,
        batch_size: int = BATCH_SIZE,
        samples: int = 0,
        part: int = 0,
        validation: NDArray[np.int64] | None = None,
        threads: int = 1,
    ) -> None:
        self._split = corpus.test if tests is None else tests.split(corpus)
        indices = np.arange(len(self._split)) if tests is None else tests.indices
        if len(indices) == 0:
            raise ValueError(f"the data set {corpus.name!r} has no test samples to evaluate on")
        self._model = model
        self._corpus = corpus
        self._validation = validation
        self._threads = threads
        self._batch_size = batch_size
        taken = evenly_spaced(len(indices), samples)
        self._indices = indices[taken]
        self._labels = self._split.y[self._indices]
        self.chance = None if corpus.language else float(np.bincount(self._labels).max() / len(self._labels))
        self._periods = owners_of(tests.offsets)[taken] if tests is not None and len(tests) > 1 else None
        self.periods = 1 if tests is None else len(tests)
        self._since = None if tests is None else tests.since
        self._cache = list(self._read()) if _sample_bytes(corpus) * len(self) <= CACHE_LIMIT else None
        self._part = list(self._read(evenly_spaced(len(self), part))) if 0 < part < len(self) else None

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._indices)

    def of(self, model: Model) -> Evaluator:
        """An evaluator of another model on the same samples, which the two share."""
        other = copy.copy(self)
        other._model = model
        return other

    def evaluate(
        self, variables: Tree, period: int | None = None, on_all: bool = True, watch: Watch | None = None
    ) -> Evaluation:
        """The results of the model with these variables. The test sets up to ``period`` count as seen; where tests
        say from when on (``PeriodTests.since``), those of up to then.

        Without ``on_all`` they are accuracy and loss on a part of the samples, if the evaluator was given its size.
        ``watch`` sees the outputs for all samples.
        """
        if not on_all and self._part is not None:
            return self._summed(self._answer(variables, self._part))
        found = self._answer(variables, self._cache if self._cache is not None else self._read(), watch)
        class_accuracy, class_loss = _means_by(self._labels, found, self._corpus.classes)
        whole = replace(
            self._summed(found),
            class_accuracy=class_accuracy,
            class_loss=class_loss,
            validation_accuracy=self._validated(variables),
        )
        if self._periods is None:
            return whole
        period_accuracy, period_loss = _means_by(self._periods, found, self.periods)
        whole = replace(whole, period_accuracy=period_accuracy, period_loss=period_loss)
        if period is None:
            return whole
        seen = (self._periods if self._since is None else self._since[self._periods]) <= period
        seen_accuracy, seen_loss = _means(found.only(seen))
        since = None if self._since is None else tuple(self._since.tolist())
        return replace(whole, seen_accuracy=seen_accuracy, seen_loss=seen_loss, period_since=since)

    def _summed(self, found: Answers) -> Evaluation:
        """The results over all answers, without those by class and by period."""
        accuracy, loss = _means(found)
        level = float(perplexity(-loss, 1)) if self._corpus.language else None
        return Evaluation(accuracy, loss, perplexity=level, test_samples=len(found.answers))

    def _validated(self, variables: Tree) -> float | None:
        """The accuracy on the validation samples. None if there are none."""
        if self._validation is None or not len(self._validation):
            return None
        return _means(self.answers(variables, self._validation))[0]

    def answers(self, variables: Tree, indices: NDArray[np.int64]) -> Answers:
        """The model's answers to these samples of the training split, ``indices [n]``."""
        return self._answer(variables, read(self._model, self._corpus, self._corpus.train, indices, self._batch_size))

    def _answer(self, variables: Tree, batches: Iterable[tuple[Tensor, Tensor]], watch: Watch | None = None) -> Answers:
        """The model's answers. A perceptron answers faster than threads start."""
        threads = self._threads if pure(self._model) and self._model.kind != "dense" else 1
        return answer(self._model, variables, batches, watch, threads)

    def _read(self, positions: slice | NDArray[np.int64] = slice(None)) -> Iterator[tuple[Tensor, Tensor]]:
        return read(self._model, self._corpus, self._split, self._indices[positions], self._batch_size)


def answer(
    model: Model,
    variables: Tree,
    batches: Iterable[tuple[Tensor, Tensor]],
    watch: Watch | None = None,
    threads: int = 1,
) -> Answers:
    """The model's answers to the samples of batches from ``read``, in their order, from so many ``threads``.

    More than one thread needs a model that is ``pure``. Raises ConfigurationError if the model fails, and ``variables``
    are not those that it has.
    """
    laid_out = {name: _laid_out(model, tensor) for name, tensor in variables.items()}

    @torch.inference_mode()
    def judged(batch: tuple[Tensor, Tensor]) -> tuple[Outputs | None, Tensor, Answers]:
        x, y = batch
        try:
            outputs = model.apply(laid_out, x, False)[0]
        except Exception as error:
            if wrong := misfit(variables, model.init(0)):
                raise ConfigurationError(f"the model can't be evaluated: the algorithm's state {wrong}") from error
            raise
        logits = outputs.logits
        judgement = _of_samples(logits, y) if logits.dim() == 2 else _of_tokens(logits, x[:, 1])
        return outputs if watch is not None else None, y, judgement

    found = []
    for outputs, y, judgement in in_order(judged, batches, threads):
        if watch is not None and outputs is not None:
            with torch.inference_mode():
                watch(outputs, y)
        found.append(judgement)
    if not found:
        return Answers(np.zeros(0, np.int64), np.zeros(0, np.float64), np.zeros(0, np.int64))
    return Answers(*(np.concatenate(values) for values in zip(*found, strict=True)))


def read(
    model: Model, corpus: Corpus, split: Split, indices: NDArray[np.int64], batch_size: int = BATCH_SIZE
) -> Iterator[tuple[Tensor, Tensor]]:
    """The split's samples at these indices and their labels, in batches in the form that the model takes.

    A batch has at most ``batch_size`` samples, and fewer of large ones.
    """
    size = min(batch_size, _most_at_once(corpus))
    for start in range(0, len(indices), size):
        x, y = corpus.batch(split, indices[start : start + size])
        yield _laid_out(model, x), y


def _most_at_once(corpus: Corpus) -> int:
    """The most samples of a batch, a power of two unless the logits bound it."""
    answers = corpus.input_shape[-1] if corpus.language else 1
    fitting = max(LEAST_BATCH, BATCH_BYTES // _sample_bytes(corpus))
    return max(1, min(1 << fitting.bit_length() - 1, BATCH_LOGITS // (answers * corpus.outputs)))


def _sample_bytes(corpus: Corpus) -> int:
    return (8 if corpus.language else 4) * int(np.prod(corpus.input_shape))


def mean_by(
    groups: NDArray[np.int64], values: NDArray[Any], count: int, answers: NDArray[np.int64] | None = None
) -> NDArray[np.float64]:
    """The mean of the ``values [n]`` in each of ``count`` groups, ``[count]``. NaN for a group without values.

    ``groups [n]`` says to which group each value belongs. With ``answers [n]``, each value is the sum of that many.
    """
    with np.errstate(invalid="ignore"):
        means: NDArray[np.float64] = np.bincount(groups, values, count) / np.bincount(groups, answers, count)
    return means


def _means(found: Answers) -> tuple[float, float]:
    """Accuracy and loss over all answers; NaN if there are none."""
    count = found.answers.sum()
    if not count:
        return math.nan, math.nan
    return float(found.hits.sum() / count), float(found.losses.sum() / count)


def _means_by(groups: NDArray[np.int64], found: Answers, count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Accuracies and losses of ``count`` groups, ``[count]`` each. ``groups [n]`` is the group of each sample."""
    accuracy, loss = (mean_by(groups, values, count, found.answers) for values in (found.hits, found.losses))
    return tuple(accuracy.tolist()), tuple(loss.tolist())


def _of_samples(logits: Tensor, labels: Tensor) -> Answers:
    logits = logits.double()
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return Answers(right_answers(logits, labels).long().numpy(), losses.numpy(), np.ones(len(labels), np.int64))


def _of_tokens(logits: Tensor, targets: Tensor) -> Answers:
    predicted = targets != NO_TARGET
    hits = torch.zeros(targets.numel(), dtype=torch.int64)
    losses = torch.zeros(targets.numel(), dtype=torch.float64)
    rows, truth = logits.flatten(0, 1), targets.flatten()
    for some in torch.split(predicted.flatten().nonzero().squeeze(1), max(1, BLOCK_LOGITS // logits.shape[2])):
        block = rows[some].double()
        hits[some] = right_answers(block, truth[some]).long()
        losses[some] = torch.nn.functional.cross_entropy(block, truth[some], reduction="none")
    by_sample = (values.view(targets.shape).sum(1).numpy() for values in (hits, losses, predicted))
    return Answers(*by_sample)


def evenly_spaced(total: int, wanted: int) -> NDArray[np.int64]:
    """``wanted`` positions from 0 to ``total - 1``, the first one included.

    The result has all positions if ``wanted`` is 0, or larger than ``total``.
    """
    count = min(wanted, total) or total
    return np.arange(count) * total // count


def _laid_out(model: Model, tensor: Tensor) -> Tensor:
    """The tensor in the memory layout that suits the model: convolutions on a CPU are faster with channels last."""
    return channels_last(tensor) if model.kind == "convolutional" else tensor
