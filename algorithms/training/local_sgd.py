"""Local training by stochastic gradient descent: the program of FedAvg and of methods that only have another loss.

Methods that train in another way extend it. A correction of the gradients is a ``direction``; another payload or an own
state is a subclass with its own ``begin``, ``step`` or ``finish``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.interface import Augment, Batch, Facts, Forest, Model, Outcome, Plan, Stage, Tree
from fedemu.algorithms.training.mixing import rows_matter
from fedemu.algorithms.training.objective import Loss, LossFunction
from fedemu.algorithms.trees import add, only, subtract, without, zeros_like

Direction = Callable[[Tree, Forest, Tree, Facts], Tree]
"""(gradients, shared, own, facts) -> what the optimiser uses in place of the gradients."""


class Training(NamedTuple):
    """The carry of local training: all variables, and the momentum of the trained ones (empty without momentum)."""

    variables: Tree
    momentum: Tree


@dataclass(frozen=True)
class SGD:
    """``g += weight_decay·w; m = momentum·m + g; w -= lr·m``, as in torch. The momentum m starts at 0.

    The gradient g of a variable that a batch does not use is 0, where torch may have None and leave the variable out.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0

    def begin(self, trained: Tree) -> Tree:
        """The momentum before the first step: zeros, or empty without momentum."""
        return zeros_like(trained) if self.momentum else {}

    def step(self, trained: Tree, gradients: Tree, momentum: Tree, lr: Tensor) -> tuple[Tree, Tree]:
        """The next variables and momentum. Nothing is changed in place."""
        after: dict[str, Tensor] = {}
        velocity: dict[str, Tensor] = {}
        for name, leaf in trained.items():
            move = gradients[name]
            if self.weight_decay:
                move = torch.add(move, leaf, alpha=self.weight_decay)
            if self.momentum:
                move = velocity[name] = torch.add(move, momentum[name], alpha=self.momentum)
            after[name] = torch.addcmul(leaf, move, lr.to(leaf.dtype), value=-1)
        return after, velocity


@dataclass(frozen=True, eq=False)
class LocalSGD:
    """Local training: begins with ``shared["model"]``, and sends ``{"delta": local - global}`` for all variables.

    Buffers are variables too. Each step takes ``batch_size`` samples, drawn without replacement in each epoch. The last
    batch of an epoch may be smaller. With ``local_steps`` above 0 the training ends after that many steps, in whatever
    epoch that is, and ``epochs`` has no effect.

    The learning rate of round r, counted from 1, is ``lr · lr_decay^(r-1)``. With ``rounds_per_task``, r counts from 1
    in each task.
    """

    model: Model
    loss: LossFunction
    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 1.0
    local_steps: int = 0
    rounds_per_task: int = 0
    augment: Augment | None = None
    direction: Direction | None = None
    noise: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    declares_label_counts: bool = False
    notes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    takes_terms: ClassVar[bool] = True
    """Whether the steps minimise ``loss``. Local terms are refused by a program whose steps do not."""

    @property
    def passes(self) -> float:
        return 0.0 if self.local_steps else float(self.epochs)

    @property
    def processed(self) -> float:
        return float(self.local_steps * self.batch_size)

    @property
    def plan(self) -> Plan:
        """Which samples make which batches: ``epochs`` shuffled passes, or ``local_steps`` steps of such passes."""
        if self.local_steps:
            return shuffled_steps(self.local_steps, self.batch_size)
        return shuffled_epochs(self.epochs, self.batch_size)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """One stage: the steps of ``plan``."""
        return (Stage(self.plan, self.step, self.augment, rows_matter=rows_matter(self.model)),)

    @cached_property
    def optimiser(self) -> SGD:
        """The optimiser with the settings of this program."""
        return SGD(self.momentum, self.weight_decay)

    def learning_rate(self, round: int, task: int) -> float:
        return float(self.lr * self.lr_decay ** (round - 1 - task * self.rounds_per_task))

    def initial_own(self, shared: Forest) -> Tree:
        return {}

    def payload(self, shared: Forest) -> Forest:
        return {"delta": shared["model"]}

    def begin(self, shared: Forest, own: Tree, facts: Facts) -> Training:
        """The carry before the first step: the global model, and the optimiser's momentum."""
        variables = shared["model"]
        return Training(variables, self.optimiser.begin(without(variables, self.model.buffers)))

    def step(
        self, carry: Training, batch: Batch, shared: Forest, own: Tree, facts: Facts, noise: Tree
    ) -> tuple[Training, Tree]:
        """One step of SGD on a batch; the metrics are those of the loss."""
        gradients, loss = self.gradients(carry.variables, batch, shared, own, facts)
        if self.direction is not None:
            gradients = self.direction(gradients, shared, own, facts)
        before = without(carry.variables, self.model.buffers)
        trained, momentum = self.optimiser.step(before, gradients, carry.momentum, facts.lr)
        return Training({**carry.variables, **loss.buffers, **trained}, momentum), loss.metrics

    def gradients(self, variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> tuple[Tree, Loss]:
        """The gradients of the loss by the trained variables, and the loss itself."""
        buffers = only(variables, self.model.buffers)

        def value(trained: Tree) -> tuple[Tensor, Loss]:
            loss = self.loss({**trained, **buffers}, batch, shared, own, facts)
            return loss.value, loss

        gradients, loss = torch.func.grad(value, has_aux=True)(without(variables, self.model.buffers))
        return gradients, loss

    def finish(self, carry: Training, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        """The payload, ``{"delta": local - global}``, and the unchanged own state."""
        return Outcome({"delta": subtract(carry.variables, shared["model"])}, own)

    def local_model(self, shared: Forest, payload: Forest) -> Tree:
        """The device's trained model: the global model plus the delta of the payload."""
        return add(shared["model"], payload["delta"])


def shuffled_epochs(epochs: int, batch_size: int) -> Plan:
    """A plan in which each epoch goes over all samples in its own order, in batches of ``batch_size``.

    The last batch of an epoch is padded. Samples that fit into one batch are not shuffled, because their order does not
    matter.
    """

    def plan(examples: int, generator: np.random.Generator) -> NDArray[np.int64]:
        batches = -(-examples // batch_size)
        positions = np.full((epochs, batches * batch_size), -1, np.int64)
        positions[:, :examples] = np.arange(examples)
        if batches > 1:
            generator.permuted(positions[:, :examples], axis=1, out=positions[:, :examples])
        return positions.reshape(epochs * batches, batch_size)

    return plan


def shuffled_steps(steps: int, batch_size: int) -> Plan:
    """A plan of ``steps`` batches: those of shuffled epochs, as many as are needed. A device without samples has none.

    More steps begin with the batches of fewer steps.
    """

    def plan(examples: int, generator: np.random.Generator) -> NDArray[np.int64]:
        batches = -(-examples // batch_size)
        epochs = -(-steps // batches) if batches else 0
        return shuffled_epochs(epochs, batch_size)(examples, generator)[:steps]

    return plan


def first_batches(most: int, batch_size: int) -> Plan:
    """The plan of one shuffled epoch that ends after at most ``most`` batches."""
    epoch = shuffled_epochs(1, batch_size)

    def plan(examples: int, generator: np.random.Generator) -> NDArray[np.int64]:
        return epoch(examples, generator)[:most]

    return plan
