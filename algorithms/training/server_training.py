"""Training at the coordinator on the public data: a server job that can be resumed, with early stopping.

A method provides the loss and the *lessons*: what the loss needs beside the model's logits and the labels, such as the
teachers' logits of all training samples. Lessons are made once, when the job begins, and are part of its carry.

On a class-incremental stream, the public samples of a class are used from its task on.

A large network is trained on the coordinator's GPU, if there is one (``job_device.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedemu.algorithms.graphs.repeated import Repeated, uploaded
from fedemu.algorithms.interface import Context, Labelled, Model, PublicData, Script, ServerJob, Tree
from fedemu.algorithms.layouts import channels_last
from fedemu.algorithms.measures.answers import right_answers
from fedemu.algorithms.models.growing import SEEN
from fedemu.algorithms.training.ingredients import normalises_by_batches, require_variance
from fedemu.algorithms.training.job_device import device_for, moved, same_every_time
from fedemu.algorithms.training.local_sgd import SGD
from fedemu.algorithms.trees import (
    flatten,
    gradients_of,
    map_leaves,
    scale,
    squared_norm,
    unflatten,
    variables_of,
    without,
)
from fedemu.protocol.seeds import generator

LessonLoss = Callable[[Tensor, Tensor, Tree, Tensor], Tensor]
"""(logits ``[batch, classes]``, y ``[batch]``, lessons, positions ``[batch]`` in the training part) -> mean loss.

The positions tell which rows of the lessons belong to the batch. All tensors lie on the device that trains.
"""

_ROWS = 100
"""Samples per forward pass without training. Larger batches do not fit into the processor's caches."""


class Optimiser(Protocol):
    """What an optimiser is, such as ``SGD`` and ``Adam``: pure functions of its memory, which is one tree."""

    def begin(self, trained: Tree) -> Tree:
        """The memory before the first step."""
        ...

    def step(self, trained: Tree, gradients: Tree, memory: Tree, lr: Tensor) -> tuple[Tree, Tree]:
        """The next variables and memory. Nothing is changed in place."""
        ...


class Trained(NamedTuple):
    """The best model of a server training with its buffers, the lessons that it was given, and the last model."""

    variables: Tree
    lessons: Tree
    last: Tree


class _Carry(NamedTuple):
    """The state of a job. ``stop`` holds the right answers of the best model and its age in steps (``stale``)."""

    model: Tree
    memory: Tree
    lessons: Tree
    best: Tree
    stop: Tree

    def after(self, model: Tree, memory: Tree, right: Tensor) -> _Carry:
        """The carry after one more step, whose model gives ``right`` answers on the validation part."""
        if right > self.stop["right"]:
            return _Carry(model, memory, self.lessons, model, _stop(right, 0))
        return _Carry(model, memory, self.lessons, self.best, _stop(self.stop["right"], int(self.stop["stale"]) + 1))

    def packed(self) -> Tree:
        return flatten(self._asdict())

    @classmethod
    def unpacked(cls, tree: Tree) -> _Carry:
        forest = unflatten(tree)
        return cls(*(forest.get(key, {}) for key in cls._fields))


def _stop(right: Tensor, stale: int) -> Tree:
    return {"right": right, "stale": torch.tensor(stale)}


@dataclass(frozen=True)
class ServerTraining:
    """How a model is trained on the public data.

    One step of the job is ``batches`` batches, or one pass over the training part if ``batches`` is None. There are at
    most ``steps`` steps. Training ends after ``patience`` steps in a row without more right answers on the validation
    part. The result is the model with the most right answers, the earliest of equals; the model at the beginning is
    among them. The loss does not decide, because a loss that is weighted by classes can fall below 0.

    ``rate`` is the learning rate as a function of the batch, counted from 0 over the whole job. Gradients whose
    Euclidean norm is above ``clip_norm`` are shortened to it. The order of the samples depends on (seed, round, pass).

    A single sample has no variance. So with batch normalisation a pass whose last batch would be a single sample joins
    it to the batch before, and a training part of one sample trains nothing. Raises ConfigurationError if each batch
    would be a single sample.
    """

    model: Model
    loss: LessonLoss
    optimiser: Optimiser
    rate: Callable[[int], float]
    batch_size: int
    steps: int
    patience: int
    batches: int | None = None
    clip_norm: float = math.inf

    def __post_init__(self) -> None:
        if self.steps:
            require_variance(self.model, "algorithm.options.server_batch", self.batch_size)

    @property
    def _fewest(self) -> int:
        """The number of samples that a batch has at least."""
        return 2 if normalises_by_batches(self.model) else 1

    @classmethod
    def by_passes(
        cls, model: Model, loss: LessonLoss, lr: float, momentum: float, batch_size: int, passes: int, patience: int
    ) -> ServerTraining:
        """Training by SGD at a constant learning rate, at most ``passes`` times over the training part."""
        return cls(model, loss, SGD(momentum), lambda batch: lr, batch_size, passes, patience)

    def train(
        self, name: str, variables: Tree, prepare: Callable[[Labelled], Tree], context: Context
    ) -> Script[Trained]:
        """A part of a round: train the model ``variables`` in a server job of this name.

        ``prepare`` makes the lessons, one tree, from the training part, in host memory. It is called in the job's
        process. Use it as ``trained = yield from training.train(...)``.
        """
        carry = _Carry.unpacked((yield self.job(name, variables, prepare, context)))
        return Trained(carry.best, carry.lessons, carry.model)

    def job(self, name: str, variables: Tree, prepare: Callable[[Labelled], Tree], context: Context) -> ServerJob:
        """The server job that ``train`` yields."""
        assert context.public is not None, "a method that trains at the server is not built without public data"
        public = _of_classes_seen(context.public, variables)
        batches = Repeated(self._batch)

        @cache
        def here(device: torch.device) -> PublicData:
            parts = ((part.x.to(device), part.y.to(device)) for part in (public.train, public.validation))
            return PublicData(*(Labelled(x, y) for x, y in parts))

        def init() -> Tree:
            memory = self.optimiser.begin(without(variables, self.model.buffers))
            right = self._right(variables, public.validation)
            return _Carry(variables, memory, prepare(public.train), variables, _stop(right, 0)).packed()

        def step(carry: Tree, index: int) -> tuple[Tree, bool]:
            if len(public.train) < self._fewest:
                return carry, True
            device = device_for(self.model, variables)
            data = here(device)
            with same_every_time(device):
                before = _Carry.unpacked(moved(carry, device))
                trained, memory = self._advance(batches, before, data.train, index, context)
                after = before.after(trained, memory, self._right(trained, data.validation))
            return after.packed(), int(after.stop["stale"]) >= self.patience

        return ServerJob(name, init, step, self.steps, checkpoint_every=1)

    def _advance(
        self, batches: Repeated, carry: _Carry, data: Labelled, index: int, context: Context
    ) -> tuple[Tree, Tree]:
        """The variables and the optimiser's memory after the batches of step ``index``."""
        device = data.y.device
        count = self.batches or per_pass(len(data), self.batch_size, self._fewest)
        first = index * count
        rows = uploaded([*positions(len(data), self.batch_size, first, count, context, self._fewest)], device)
        rates = uploaded([torch.tensor(self.rate(number)) for number in range(first, first + count)], device)
        # Gradients lie with channels last, too. What lies so at the beginning is captured from the first batch on.
        memory = carry.memory if device.type == "cpu" else map_leaves(channels_last, carry.memory)
        samples = ({"x": data.x[some], "y": data.y[some], "rows": some} for some in rows)
        after = batches.over(
            flatten({"model": map_leaves(channels_last, carry.model), "memory": memory}),
            carry.lessons,
            ({**some, "lr": lr} for some, lr in zip(samples, rates, strict=True)),
            device,
        )
        forest = unflatten(after)
        return forest["model"], forest.get("memory", {})

    def _batch(self, carry: Tree, fixed: Tree, given: Tree) -> Tree:
        """An iteration: the ``model`` and the ``memory`` after a batch. What is fixed are the lessons."""
        forest = unflatten(carry)
        variables = forest["model"]
        memory: Tree = forest.get("memory", {})
        gradients, buffers = self._gradients(variables, fixed, Labelled(given["x"], given["y"]), given["rows"])
        before = without(variables, self.model.buffers)
        trained, memory = self.optimiser.step(before, gradients, memory, given["lr"])
        return flatten({"model": {**variables, **buffers, **trained}, "memory": memory})

    def _gradients(self, variables: Tree, lessons: Tree, batch: Labelled, rows: Tensor) -> tuple[Tree, Tree]:
        """The clipped gradients of the loss on a batch of these ``rows``, and the buffers after the forward pass."""
        trained = variables_of(without(variables, self.model.buffers))
        outputs, buffers = self.model.apply({**variables, **trained}, channels_last(batch.x), True)
        gradients = gradients_of(self.loss(outputs.logits, batch.y, lessons, rows), trained)
        return clipped(gradients, self.clip_norm), map_leaves(Tensor.detach, buffers)

    def _right(self, variables: Tree, data: Labelled) -> Tensor:
        """The number of samples that the model classifies correctly, int64. Unlike a mean it compares exactly."""
        return right_answers(predict(self.model, variables, data.x), data.y).sum()


def predict(model: Model, variables: Tree, x: Tensor) -> Tensor:
    """The logits ``[n, classes]`` of samples ``x [n, ...]`` in evaluation mode, without gradients.

    The variables and the samples may lie in host memory, where the logits are then, too. A large network is asked on
    the coordinator's GPU, if there is one and this is the process of a server job.
    """
    if not len(x):  # Many models cannot be applied to no samples.
        return predict(model, variables, x.new_zeros(1, *x.shape[1:]))[:0]
    device = x.device if x.device.type != "cpu" else device_for(model, variables)
    variables = map_leaves(channels_last, moved(variables, device))
    with torch.no_grad(), same_every_time(device):
        parts = (channels_last(part.to(device)) for part in torch.split(x, _ROWS))
        outputs = [model.apply(variables, part, False)[0] for part in parts]
    return torch.cat([part.logits for part in outputs]).to(x.device)


def per_pass(samples: int, batch_size: int, fewest: int = 1) -> int:
    """The number of batches of a pass. A last batch of less than ``fewest`` samples belongs to the batch before it."""
    whole, rest = divmod(samples, batch_size)
    return whole if whole and rest < fewest else whole + 1


def positions(
    samples: int, batch_size: int, first: int, count: int, context: Context, fewest: int = 1
) -> Iterator[Tensor]:
    """The positions of the samples of ``count`` batches, from batch ``first`` on: int64 ``[batch]`` each.

    Passes over the samples follow each other, each in its own order. The last batch of a pass may be smaller, but not
    below ``fewest``: then it is joined to the batch before it, if there is one.
    """
    batches = per_pass(samples, batch_size, fewest)
    for number in range(first, first + count):
        done, place = divmod(number, batches)
        if number == first or place == 0:
            draws = generator(context.seed, round=context.round, purpose=f"server/{done}")
            order = torch.from_numpy(draws.permutation(samples))
        yield order[place * batch_size : samples if place == batches - 1 else (place + 1) * batch_size]


def clipped(gradients: Tree, norm: float) -> Tree:
    """The gradients. If their Euclidean norm over all leaves is above ``norm``, they are shortened to it."""
    if math.isinf(norm):
        return gradients
    return scale(gradients, (norm / (squared_norm(gradients).sqrt() + 1e-6)).clamp(max=1))


def _of_classes_seen(public: PublicData, variables: Tree) -> PublicData:
    """The samples of the classes that tasks have brought so far; all samples if classes do not come task by task.

    A model cannot learn the other classes, because their logits are always the lowest.
    """
    if SEEN not in variables:
        return public
    parts = ((part, variables[SEEN][part.y] > 0) for part in (public.train, public.validation))
    return PublicData(*(Labelled(part.x[seen], part.y[seen]) for part, seen in parts))
