"""FedReg (Xu et al., "Acceleration of Federated Learning with Alleviated Forgetting in Local Training", ICLR 2022).

Before a device trains, it makes data that show what the global model ``w_g`` knows. It changes its own samples x by
``iterations`` steps of the fast gradient sign method against that model in evaluation mode,
``x += step · sign(∇_x CE(w_g; x, y))``, and keeps them within the range of values of the batch. *Pseudo* data come from
large steps, and their targets are the probabilities that the global model gives them, also in evaluation mode.
*Perturbed* data come from small steps, and their targets are the true labels. Then each local step

1. follows the gradient at ``gamma·w + (1-gamma)·w_g``;
2. takes the gradient ``g`` of the pseudo data's cross-entropy at ``beta·w + (1-beta)·w_g``, and removes from the whole
   move so far, ``d = w - w_g``, the part that raises this loss: ``d -= max(0, ⟨d, g⟩ / ‖g‖²) · g``;
3. does the same with the perturbed data, whose gradient is taken at the same point.

Defaults: gamma = beta = 0.5, 10 iterations, steps of 0.1 (``pseudo_step``) and 0.001 (``perturbed_step``) in units of
the normalised input; models are averaged evenly (``weights = "examples"`` averages as federated averaging does). Only
the model is sent.

The order of the steps, the targets and the projection follow the authors' public code. Three points differ. That code
intends to keep made data within the range of values of the batch, but its call has no effect, and on a CPU it changes
the samples themselves together with the data made from them; here neither happens. It makes data from all batches of a
device; here at most ``rehearsals`` batches (10) are used, which are kept in memory of fixed size and taken in turn, one
per step. The authors train without momentum, and so do Flashback's presets. Where ``local.momentum`` is above 0, it
belongs to the gradient in 1 and is not corrected.

A step takes three gradients in place of one. Making data takes two gradients by inputs per iteration, in float64. With
the defaults and 5 epochs of a convolutional model this is about ten times the computation of federated averaging.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from fedemu.algorithms.interface import Batch, Facts, Forest, Outcome, Stage, Tree, mixes
from fedemu.algorithms.methods.fedavg import FedAvg
from fedemu.algorithms.methods.fednova import AVERAGES, Weights
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD, Training, first_batches
from fedemu.algorithms.trees import add, map_leaves, only, subtract, widened, without

SMALLEST = 1e-30
"""A gradient with a smaller squared norm counts as if it had this one."""
Share = Annotated[float, Field(ge=0, le=1)]


class Rehearsal(NamedTuple):
    """Made data in slots: ``x [slots, batch, ...]``, ``targets [slots, batch, classes]``, ``weight [slots, batch]``."""

    x: Tensor
    targets: Tensor
    weight: Tensor


class Rehearsing(NamedTuple):
    """The carry: local training, both kinds of made data, the number of filled slots, and of steps that used slots."""

    training: Training
    pseudo: Rehearsal
    perturbed: Rehearsal
    filled: Tensor
    used: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class RegularisedSGD(LocalSGD):
    """Local training that first makes data from at most ``rehearsals`` batches, and then corrects each step by them.

    Without rehearsals there is no correction. Buffers, if the model has any, stay as they are. ``sample_shape`` is the
    shape of an input, ``classes`` the number of logits.
    """

    gamma: float
    beta: float
    pseudo_step: float
    perturbed_step: float
    iterations: int
    rehearsals: int
    sample_shape: tuple[int, ...]
    classes: int

    @property
    def passes(self) -> float:
        """One pass for every gradient by inputs or weights, as if data were made from all examples."""
        return 3.0 * super().passes + 2.0 * self.iterations if self.rehearsals else super().passes

    @property
    def processed(self) -> float:
        return (3.0 if self.rehearsals else 1.0) * super().processed

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        training = Stage(self.plan, self.train, self.augment, rows_matter=mixes(self.model, train=True))
        if not self.rehearsals:
            return (training,)
        # Slots have room for whole batches, so padding stays.
        some = first_batches(self.rehearsals, self.batch_size)
        return Stage(some, self.rehearse, self.augment, rows_matter=True), training

    def begin(self, shared: Forest, own: Tree, facts: Facts) -> Any:
        rows = (self.rehearsals, self.batch_size)

        def empty() -> Rehearsal:
            return Rehearsal(
                facts.lr.new_zeros(*rows, *self.sample_shape),
                facts.lr.new_zeros(*rows, self.classes),
                facts.lr.new_zeros(rows),
            )

        none = torch.zeros_like(facts.round)
        return Rehearsing(super().begin(shared, own, facts), empty(), empty(), none, none)

    def rehearse(
        self, carry: Rehearsing, batch: Batch, shared: Forest, own: Tree, facts: Facts, noise: Tree
    ) -> tuple[Rehearsing, Tree]:
        """A step of the first stage: it puts pseudo and perturbed data from one batch into the next slot."""
        true = (torch.arange(self.classes, device=batch.y.device) == batch.y[:, None]).to(batch.weight.dtype)
        model = shared["model"]
        pseudo = self._climbed(model, batch.x, true, self.pseudo_step)
        said = self._logits(model, pseudo, train=False).softmax(-1)
        perturbed = self._climbed(model, batch.x, true, self.perturbed_step)
        return carry._replace(
            pseudo=_stored(carry.pseudo, carry.filled, Rehearsal(pseudo, said, batch.weight)),
            perturbed=_stored(carry.perturbed, carry.filled, Rehearsal(perturbed, true, batch.weight)),
            filled=carry.filled + 1,
        ), {}

    def train(
        self, carry: Rehearsing, batch: Batch, shared: Forest, own: Tree, facts: Facts, noise: Tree
    ) -> tuple[Rehearsing, Tree]:
        """A step of local training, corrected by the made data of one slot."""
        fixed, start = only(shared["model"], self.model.buffers), without(shared["model"], self.model.buffers)
        before = without(carry.training.variables, self.model.buffers)
        point = {**fixed, **between(start, before, self.gamma)}
        gradients, loss = self.gradients(point, batch, shared, own, facts)
        trained, momentum = self.optimiser.step(before, gradients, carry.training.momentum, facts.lr)
        if self.rehearsals:
            slot = carry.used % carry.filled.clamp(min=1)
            at = between(start, trained, self.beta)
            way: Tree = subtract(trained, start)
            for rehearsal in (carry.pseudo, carry.perturbed):
                way = without_rise(way, self._slope(at, fixed, _slot(rehearsal, slot)))
            trained = add(start, way)
        training = Training({**carry.training.variables, **trained}, momentum)
        return carry._replace(training=training, used=carry.used + 1), loss.metrics

    def finish(self, carry: Any, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        return super().finish(carry.training, shared, own, facts)

    def _climbed(self, variables: Tree, x: Tensor, targets: Tensor, step: float) -> Tensor:
        """The samples, changed by the fast gradient sign method so that the loss of each is higher."""
        # float64, because rounding could decide on a sign, and then the executors would make different data.
        exact = map_leaves(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, variables)
        climbing = x.double()
        lowest, highest = climbing.amin(), climbing.amax()

        def loss(x: Tensor) -> Tensor:
            return soft_cross_entropy(self._logits(exact, x, train=False), targets).sum()

        for _ in range(self.iterations):
            climbing = torch.add(climbing, torch.func.grad(loss)(climbing).sign(), alpha=step).clamp(lowest, highest)
        return climbing.to(x.dtype)

    def _slope(self, trained: Tree, fixed: Tree, data: Rehearsal) -> Tree:
        """The gradient of the mean cross-entropy of made data, by the trained variables."""
        share = data.weight / data.weight.sum().clamp(min=1)

        def loss(trained: Tree) -> Tensor:
            logits = self._logits({**fixed, **trained}, data.x, train=True)
            return (soft_cross_entropy(logits, data.targets) * share).sum()

        slope: Tree = torch.func.grad(loss)(dict(trained))
        return slope

    def _logits(self, variables: Tree, x: Tensor, train: bool) -> Tensor:
        outputs, _ = self.model.apply(variables, x, train)
        return outputs.logits


def between(start: Tree, end: Tree, share: float) -> Tree:
    """``share·end + (1 - share)·start``."""
    return map_leaves(lambda first, last: torch.lerp(first, last, share), start, end)


def without_rise(way: Tree, slope: Tree) -> Tree:
    """``way`` without its component along ``slope`` if that is positive; so ``⟨way, slope⟩ <= 0`` up to rounding.

    Leaves of half precision are multiplied as float32, because the squares of small gradients would be 0 in float16.
    """
    moved, up = widened(way), widened(slope)
    rise = (_inner(moved, up) / _inner(up, up).clamp(min=SMALLEST)).clamp(min=0)
    return {name: (leaf - rise * up[name]).to(way[name].dtype) for name, leaf in moved.items()}


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats row by row, against ``targets [batch, classes]`` that are probabilities."""
    return -(targets * logits.log_softmax(-1)).sum(-1)


def _inner(left: Tree, right: Tree) -> Tensor:
    return torch.stack([(leaf * right[name]).sum() for name, leaf in left.items()]).sum()


def _stored(rehearsal: Rehearsal, slot: Tensor, data: Rehearsal) -> Rehearsal:
    """The made data with ``data`` in this slot."""
    here = torch.arange(len(rehearsal.x), device=slot.device) == slot
    return Rehearsal(
        *(torch.where(here.view(-1, *[1] * new.dim()), new, held) for held, new in zip(rehearsal, data, strict=True))
    )


def _slot(rehearsal: Rehearsal, slot: Tensor) -> Rehearsal:
    """The data of one slot. The slot is a tensor; plain indexing would read its value, index_select does not."""
    return Rehearsal(*(held.index_select(0, slot.view(1)).squeeze(0) for held in rehearsal))


def fedreg(
    ingredients: Ingredients,
    gamma: Share = 0.5,
    beta: Share = 0.5,
    pseudo_step: NonNegativeFloat = 0.1,
    perturbed_step: NonNegativeFloat = 0.001,
    iterations: PositiveInt = 10,
    rehearsals: NonNegativeInt = 10,
    weights: Weights = "even",
) -> FedAvg:
    """FedReg. The docstring of the module explains the options.

    With ``gamma = 1``, ``rehearsals = 0`` and ``weights = "examples"`` it is federated averaging. Raises
    ConfigurationError if the model has batch normalisation or can't be computed in float64, or if the data are texts.
    """
    ingredients.require_classes("fedreg")
    ingredients.require_no_batch_statistics("fedreg", "made data would count among the statistics of the samples")
    if rehearsals:
        ingredients.require_float64("fedreg")
    local = ingredients.training(
        RegularisedSGD,
        gamma=gamma,
        beta=beta,
        pseudo_step=pseudo_step,
        perturbed_step=perturbed_step,
        iterations=iterations,
        rehearsals=rehearsals,
        sample_shape=ingredients.input_shape,
        classes=ingredients.classes,
    )
    return FedAvg(local, AVERAGES[weights])
