"""Training at the coordinator on the public data: a resumable server job that stops early on validation accuracy.

A method brings the loss and the *lessons*: what the loss needs beside a model's logits and the labels, such as the
teachers' logits of all training samples. Lessons are made once, when the job begins, and are part of its carry.

On a class-incremental stream the public samples of a class are there from its task on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedemu.algorithms.interface import Context, Labelled, Model, PublicData, Script, ServerJob, Tree
from fedemu.algorithms.models.growing import SEEN
from fedemu.algorithms.training.local_sgd import SGD
from fedemu.algorithms.trees import flatten, map_leaves, scale, squared_norm, unflatten, without
from fedemu.protocol.seeds import generator

LessonLoss = Callable[[Tensor, Tensor, Tree, Tensor], Tensor]
"""(logits ``[batch, classes]``, y ``[batch]``, lessons, positions ``[batch]`` in the training part) -> mean loss."""

_ROWS = 100
"""Samples per forward pass where nothing is learnt; larger batches leave the processor's caches."""


class Optimiser(Protocol):
    """What ``local_sgd.SGD`` and ``adam.Adam`` are; ``memory`` is flat."""

    def begin(self, trained: Tree) -> Tree: ...

    def step(self, trained: Tree, gradients: Tree, memory: Tree, lr: Tensor) -> tuple[Tree, Tree]: ...


class Trained(NamedTuple):
    """The best model of a server training, buffers included, and the lessons that it was given."""

    variables: Tree
    lessons: Tree


class _Carry(NamedTuple):
    """What a job goes on from; ``stop`` holds the best model's right answers and its age in steps (``stale``)."""

    model: Tree
    memory: Tree
    lessons: Tree
    best: Tree
    stop: Tree

    def after(self, model: Tree, memory: Tree, right: Tensor) -> _Carry:
        """One step further, with so many right answers."""
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

    One step of the job is ``batches`` batches, or one pass over the training part where that is None; there are
    ``steps`` at most. Training ends after ``patience`` steps in a row without more right answers on the validation
    part. The best model counts: of equals the earliest, and the one that training began with is among them. The loss
    never decides, because one weighted by classes can fall below 0 and mean nothing.

    ``rate`` gives the learning rate by batch, counted from 0 over the whole job. Gradients longer than ``clip_norm``
    in the Euclidean norm are shortened to it. The order of the samples is a function of (seed, round, pass).
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

    @classmethod
    def by_passes(
        cls, model: Model, loss: LessonLoss, lr: float, momentum: float, batch_size: int, passes: int, patience: int
    ) -> ServerTraining:
        """Training by SGD at a constant learning rate, at most ``passes`` times over the training part."""
        return cls(model, loss, SGD(momentum), lambda batch: lr, batch_size, passes, patience)

    def train(
        self, name: str, variables: Tree, prepare: Callable[[Labelled], Tree], context: Context
    ) -> Script[Trained]:
        """Part of a round: train the model ``variables`` in a server job of this name.

        ``prepare`` makes the lessons from the training part, flat; it is called in the job's process.
        """
        carry = _Carry.unpacked((yield self.job(name, variables, prepare, context)))
        return Trained(carry.best, carry.lessons)

    def job(self, name: str, variables: Tree, prepare: Callable[[Labelled], Tree], context: Context) -> ServerJob:
        assert context.public is not None, "a method that trains at the server is not built without public data"
        public = _of_classes_seen(context.public, variables)

        def init() -> Tree:
            memory = self.optimiser.begin(without(variables, self.model.buffers))
            right = self._right(variables, public.validation)
            return _Carry(variables, memory, prepare(public.train), variables, _stop(right, 0)).packed()

        def step(carry: Tree, index: int) -> tuple[Tree, bool]:
            if not len(public.train):
                return carry, True
            before = _Carry.unpacked(carry)
            trained, memory = self._advance(before, public.train, index, context)
            after = before.after(trained, memory, self._right(trained, public.validation))
            return after.packed(), int(after.stop["stale"]) >= self.patience

        return ServerJob(name, init, step, self.steps, checkpoint_every=1)

    def _advance(self, carry: _Carry, data: Labelled, index: int, context: Context) -> tuple[Tree, Tree]:
        """The variables and the optimiser's memory after the batches of step ``index``."""
        variables, memory = map_leaves(_channels_last, carry.model), carry.memory
        count = self.batches or -(-len(data) // self.batch_size)
        first = index * count
        for number, rows in enumerate(positions(len(data), self.batch_size, first, count, context), first):
            gradients, buffers = self._gradients(variables, carry.lessons, data, rows)
            before, lr = without(variables, self.model.buffers), torch.tensor(self.rate(number))
            trained, memory = self.optimiser.step(before, gradients, memory, lr)
            variables = {**variables, **buffers, **trained}
        return variables, memory

    def _gradients(self, variables: Tree, lessons: Tree, data: Labelled, rows: Tensor) -> tuple[Tree, Tree]:
        """Of the loss on these samples by the trained variables, clipped; and the buffers after the forward pass."""
        # Not torch.func.grad, whose first use imports a compiler: a second in the process of every job.
        trained = map_leaves(lambda leaf: leaf.detach().requires_grad_(), without(variables, self.model.buffers))
        outputs, buffers = self.model.apply({**variables, **trained}, _channels_last(data.x[rows]), True)
        loss = self.loss(outputs.logits, data.y[rows], lessons, rows)
        gradients = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
        named = dict(zip(trained, gradients, strict=True))
        return clipped(named, self.clip_norm), map_leaves(Tensor.detach, buffers)

    def _right(self, variables: Tree, data: Labelled) -> Tensor:
        """The number of samples that the model classifies rightly, int64: it compares exactly, as a mean would not."""
        return (predict(self.model, variables, data.x).argmax(-1) == data.y).sum()


def predict(model: Model, variables: Tree, x: Tensor) -> Tensor:
    """The logits ``[n, classes]`` of samples ``x [n, ...]`` in evaluation mode, without gradients."""
    variables = map_leaves(_channels_last, variables)
    with torch.no_grad():
        outputs = [model.apply(variables, _channels_last(part), False)[0] for part in torch.split(x, _ROWS)]
    return torch.cat([part.logits for part in outputs])


def positions(samples: int, batch_size: int, first: int, count: int, context: Context) -> Iterator[Tensor]:
    """The samples of ``count`` batches from batch ``first`` on, int64 each.

    Passes follow each other, each in an order of its own; the last batch of a pass may be smaller.
    """
    per_pass = -(-samples // batch_size)
    for number in range(first, first + count):
        done, place = divmod(number, per_pass)
        if number == first or place == 0:
            draws = generator(context.seed, round=context.round, purpose=f"server/{done}")
            order = torch.from_numpy(draws.permutation(samples))
        yield order[place * batch_size : (place + 1) * batch_size]


def clipped(gradients: Tree, norm: float) -> Tree:
    """The gradients, shortened to this Euclidean norm over all leaves where they are longer."""
    if math.isinf(norm):
        return gradients
    return scale(gradients, (norm / (squared_norm(gradients).sqrt() + 1e-6)).clamp(max=1))


def _of_classes_seen(public: PublicData, variables: Tree) -> PublicData:
    """The samples of classes that a task has brought, where classes come task by task; otherwise all.

    A model has no answer to learn for other classes: their logits are out of the running.
    """
    if SEEN not in variables:
        return public
    parts = ((part, variables[SEEN][part.y] > 0) for part in (public.train, public.validation))
    return PublicData(*(Labelled(part.x[seen], part.y[seen]) for part, seen in parts))


def _channels_last(leaf: Tensor) -> Tensor:
    """A third less time for convolutions on a CPU."""
    return leaf.contiguous(memory_format=torch.channels_last) if leaf.dim() == 4 else leaf
