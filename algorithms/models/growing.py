"""Classifiers that grow with the tasks of a stream, for any model whose logits are linear in its features.

The classifier has rows for all classes from the beginning, so that shapes never change. A buffer of the model,
``classes_seen``, says which classes tasks have brought so far. The logits of the others are always the lowest, and
their rows get no gradient. The rows of a task are drawn when it begins, by (seed, task).
``incremental/task_by_task.py`` prepares a method for such a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from fedemu.algorithms.graphs.repeated import Constant
from fedemu.algorithms.interface import Facts, Model, Outputs, Tree
from fedemu.algorithms.models.around import ModelAround
from fedemu.algorithms.models.layer_statistics import observed
from fedemu.algorithms.models.layers import uniform
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.trees import add
from fedemu.protocol import seeds
from fedemu.protocol.code.own_code import account
from fedemu.protocol.errors import ConfigurationError

SEEN: Final = "classes_seen"
"""The name of the buffer ``[classes]`` float32 that is 1 for a class that a task has brought, and 0 for others."""
APART = 50.0
"""The distance of the logits of unseen classes below the highest logit of a seen class.

It is so large that a float32 does not notice these classes. It is finite, so that the loss of a sample whose class has
not come yet stays a number that can be shown. A loss that divides logits by a temperature divides this distance too:
up to temperature 3 a float32 hardly notices the classes (6e-8 each), at 10 each has 1/150 of the highest one's share.
Such a loss has to leave them out if its temperature may be higher. So has a loss that leaves out the highest class.
"""
MOST_HEAT: Final = 3.0
"""The highest temperature of a loss that does not leave unseen classes out."""

_HEADS: Final = (torch.float32, torch.float64)
"""What a classifier may be: in half precision its rows, logits and ``APART`` would be too coarse."""


@dataclass(frozen=True)
class Head:
    """The names of a classifier's ``weight [classes, width]`` and, if it has one, of its ``bias [classes]``."""

    weight: str
    bias: str | None

    def __call__(self, variables: Tree, features: Tensor) -> Tensor:
        logits = features @ variables[self.weight].t()
        return logits if self.bias is None else logits + variables[self.bias]


@dataclass(frozen=True, eq=False)
class Growing(ModelAround):
    """A model of the classes seen so far. A new model knows those of the first task."""

    model: Model
    tasks: ClassTasks
    head: Head

    @cached_property
    def buffers(self) -> frozenset[str]:
        return self.model.buffers | {SEEN}

    @cached_property
    def task_of(self) -> Tensor:
        """The task of each class, ``[classes]`` int64."""
        return torch.from_numpy(self.tasks.task)

    @cached_property
    def position(self) -> Constant:
        """The place of each class in the order in which classes come, ``[classes]`` int64."""
        return Constant(torch.from_numpy(self.tasks.position))

    @cached_property
    def since(self) -> Tensor:
        """The period in which some device first meets each class, ``[classes]`` int64."""
        return torch.from_numpy(self.tasks.since[self.tasks.task])

    @cached_property
    def _own(self) -> Tensor | None:
        """The task that each device meets in each period, ``[devices, tasks]``; None if all meet them in one order."""
        return None if self.tasks.own is None else torch.from_numpy(self.tasks.own)

    def init(self, seed: int) -> Tree:
        return {**self.model.init(seed), SEEN: (self.since == 0).float()}

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        inner = {name: leaf for name, leaf in variables.items() if name != SEEN}
        outputs, buffers = self.model.apply(inner, x, train)
        return outputs._replace(logits=among_seen(variables, outputs.logits)), {**buffers, SEEN: variables[SEEN]}

    def classify(self, variables: Tree, features: Tensor) -> Tensor:
        """The logits ``[batch, classes]`` of features ``[batch, width]``."""
        return among_seen(variables, self.head(variables, features))

    def observed(self) -> Growing:
        """The same model with ``Outputs.statistics``. Raises ConfigurationError if the inner model has none."""
        return replace(self, model=observed(self.model))

    def brought(self, facts: Facts) -> Tensor:
        """Whether the device's present task brings each class, ``[classes]`` bool.

        Under ``vmap`` each device may have its own task.
        """
        task_of = self.task_of.to(facts.task.device)
        if self._own is None or facts.device is None:
            return task_of == facts.task
        own = self._own.to(facts.task.device)
        return task_of == own.flatten().index_select(0, (facts.device * own.shape[1] + facts.task)[None])

    def brought_before(self, facts: Facts) -> Tensor:
        """Whether an earlier task of the device brings each class, ``[classes]`` bool."""
        task_of = self.task_of.to(facts.task.device)
        if self._own is None or facts.device is None:
            return task_of < facts.task
        own = self._own.to(facts.task.device)
        met = own.index_select(0, facts.device[None])[0]
        earlier = torch.arange(len(met), device=met.device) < facts.task
        return ((task_of[:, None] == met) & earlier).any(-1)

    def entered(self, variables: Tree, task: int, seed: int) -> Tree:
        """The variables when period ``task`` begins, with rows for all classes that some device has met by then.

        The rows of new classes are drawn.
        """
        after = dict(variables)
        for new in range(task + 1):
            rows = (self.since == new) & (variables[SEEN] == 0)
            if rows.any():
                drawn = self._drawn(variables, new, seed)
                after |= {name: _with_rows(after[name], rows, leaf) for name, leaf in drawn.items()}
                after[SEEN] = torch.where(rows, 1.0, after[SEEN])
        return after

    def moved(self, variables: Tree, delta: Tree) -> Tree:
        """The variables after a ``delta`` of devices, who have no say in which classes have been seen."""
        return {**add(variables, delta), SEEN: variables[SEEN]}

    def _drawn(self, variables: Tree, task: int, seed: int) -> Tree:
        """A new classifier as torch would draw it. A task takes its rows from it."""
        generator = torch.Generator().manual_seed(seeds.integer(seed, purpose=f"head/{task}"))
        names = [self.head.weight] + ([] if self.head.bias is None else [self.head.bias])
        width = variables[self.head.weight].shape[1]
        return {name: uniform(variables[name].shape, width, generator) for name in names}


def growing(model: Model, tasks: ClassTasks, input_shape: tuple[int, ...], tokens: bool = False) -> Growing:
    """The model with a classifier that grows. ``input_shape`` is the shape of one sample.

    With ``tokens`` samples are whole numbers that name something.
    Raises ConfigurationError if the model's logits are not linear in its features.
    """
    return Growing(model, tasks, head_of(model, len(tasks.order), input_shape, tokens))


def head_of(model: Model, classes: int, input_shape: tuple[int, ...], tokens: bool = False) -> Head:
    """The classifier of any model. It is found by comparing the model's logits with those that each candidate gives.

    With ``tokens`` samples are whole numbers. Those that are tried here are 0 and 1, which every vocabulary has.

    Raises ConfigurationError if the model cannot be applied to such samples, if it does not give one logit for each
    class, if none of its variables turn its features into its logits, or if these are of half precision.
    """
    generator = torch.Generator().manual_seed(0)

    def stirred(leaf: Tensor) -> Tensor:
        """The leaf with a little noise, so that a bias that starts at 0 is found too."""
        if not leaf.is_floating_point():
            return leaf
        return leaf + (0.01 * torch.randn(leaf.shape, generator=generator)).to(leaf.dtype)

    fixed = model.buffers
    variables = {name: leaf if name in fixed else stirred(leaf) for name, leaf in model.init(0).items()}
    noise = torch.randn(3, *input_shape, generator=generator)
    logits, features = _outputs(model, variables, (noise > 0).long() if tokens else noise)
    if logits.shape != (3, classes):
        raise ConfigurationError(
            f"the model gives logits {list(logits.shape)} for 3 samples, but the data have {classes} classes; "
            f"they must be [3, {classes}]"
        )
    weights = [
        name for name, leaf in variables.items() if features.dim() == 2 and leaf.shape == (classes, features.shape[1])
    ]
    exact = [name for name in weights if variables[name].dtype == features.dtype == logits.dtype in _HEADS]
    if weights and not exact:
        kinds = (str(leaf.dtype).removeprefix("torch.") for leaf in (features, variables[weights[-1]], logits))
        raise ConfigurationError(
            "class-incremental streams need features, classifier and logits in float32, and those of this model are "
            f"{', '.join(kinds)}; let the last layer be float32, and cast what goes into it"
        )
    biases = [name for name, leaf in variables.items() if leaf.shape == (classes,)]
    for weight in exact:
        for bias in (None, *biases):
            head = Head(weight, bias)
            if torch.allclose(head(variables, features), logits, rtol=1e-4, atol=1e-5 * math.sqrt(features.shape[1])):
                return head
    raise ConfigurationError(
        "class-incremental streams need a model whose logits are a linear layer of its features, and this one "
        "has no such layer that is trained; let it return (logits, features), or choose another model"
    )


def _outputs(model: Model, variables: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and features in evaluation mode. Raises ConfigurationError if the model fails."""
    try:
        with torch.no_grad():
            outputs, _ = model.apply(variables, x, False)
    except Exception as error:
        raise ConfigurationError(
            f"the model can't be applied to samples of the shape {tuple(x.shape[1:])}: {account(error)}"
        ) from error
    return outputs.logits, outputs.features


def among_seen(variables: Tree, logits: Tensor) -> Tensor:
    """The logits, with those of unseen classes ``APART`` below the highest seen one. Unseen logits pass no gradient."""
    seen = variables[SEEN] > 0
    highest = torch.where(seen, logits, -torch.inf).amax(-1, keepdim=True).detach()
    return torch.where(seen, logits, highest - APART)


def _with_rows(leaf: Tensor, rows: Tensor, other: Tensor) -> Tensor:
    return torch.where(rows.view(-1, *[1] * (leaf.dim() - 1)), other, leaf)
