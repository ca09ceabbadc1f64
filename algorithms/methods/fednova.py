"""FedNova (Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", 2020).

A device that takes more local steps moves further, and federated averaging counts its move in full. FedNova averages
directions per effective step, ``d_i = (w_i - w)/a_i``, and then goes the mean number of effective steps:
``w += (sum_i p_i a_i) · sum_i p_i d_i``, with ``p_i`` the devices' shares of the examples and ``a_i`` from
``effective_steps``. With equal steps everywhere it is federated averaging.

``a_i`` counts momentum. The paper's ``a_i`` for a proximal term would shrink further with its coefficient; there is no
such term here, and weight decay belongs to the local objective. Running statistics of batch normalisation are no sum
of steps: their changes are averaged plainly (FedNTD's code divides them by ``a_i`` like weights).

Where public code differs: WSM's weighs the devices evenly (``weights = "even"``). FedNTD's configuration sets
``nova_ccvr``, which should correct each gradient by the fleet's mean direction minus the device's own, but the mean is
never updated, so that only ``d_i`` of the device's last visit is subtracted; the FedNova of its tables may have run so
(``subtract_previous = true``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from fedemu.algorithms.interface import (
    Ask,
    Context,
    Facts,
    Forest,
    Outcome,
    Reducer,
    Reply,
    Script,
    Tree,
    mean,
    weighted_mean,
)
from fedemu.algorithms.methods.fedavg import FedAvg, FedAvgState
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD, Training
from fedemu.algorithms.trees import add, map_leaves, subtract, without, zeros_like

Weights = Literal["examples", "even"]
AVERAGES: Mapping[Weights, Reducer] = {"examples": weighted_mean, "even": mean}
"""How devices weigh in a mean: by their numbers of examples, or all alike."""


@overload
def effective_steps(steps: Tensor, momentum: float) -> Tensor: ...
@overload
def effective_steps(steps: float, momentum: float) -> float: ...
def effective_steps(steps: Tensor | float, momentum: float) -> Tensor | float:
    """How many plain steps a device's local steps of momentum SGD are worth: the ``a_i`` of FedNova.

    ``a = (t - m(1 - m^t)/(1 - m)) / (1 - m)`` for ``t`` steps with momentum ``m``, which is the sum of the weights of
    all gradients in the device's move (Wang et al., 2020). ``t`` without momentum, 0 for no steps.

    A number gives a float. A tensor of any shape gives one of the same shape and its own floating dtype, float32 for
    integers. ValueError unless ``0 <= momentum < 1``.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum = {momentum} has no number of effective steps; it must be at least 0 and below 1")
    # In float64, because few steps with much momentum are a small difference of large numbers.
    exact = steps.double() if isinstance(steps, Tensor) else float(steps)
    effective: Tensor | float = (exact - momentum * (1 - momentum**exact) / (1 - momentum)) / (1 - momentum)
    if isinstance(steps, Tensor) and isinstance(effective, Tensor):
        return effective.to(steps.dtype if steps.is_floating_point() else torch.float32)
    return effective


@dataclass(frozen=True, eq=False)
class NormalisedSGD(LocalSGD):
    """Sends ``direction``, the change of weights per effective step and of buffers as it is, and ``steps``.

    With ``subtract_previous`` the device keeps ``own``, the gradient that its last visit's direction stands for, and
    subtracts it from each gradient.
    """

    subtract_previous: bool = False

    def initial_own(self, shared: Forest) -> Tree:
        return zeros_like(without(shared["model"], self.model.buffers)) if self.subtract_previous else {}

    def payload(self, shared: Forest) -> Forest:
        return {"direction": shared["model"], "steps": {"effective": torch.zeros(())}}

    def finish(self, carry: Training, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        steps = effective_steps(facts.steps, self.momentum)
        # One step is worth 1 with any momentum, so only a device without steps is raised, whose move is zero.
        divisor = steps.clamp(min=1)
        delta = subtract(carry.variables, shared["model"])
        direction = {name: leaf if name in self.model.buffers else leaf / divisor for name, leaf in delta.items()}
        gradient = {name: torch.where(steps > 0, -direction[name] / facts.lr, leaf) for name, leaf in own.items()}
        return Outcome({"direction": direction, "steps": {"effective": steps}}, gradient)

    def local_model(self, shared: Forest, payload: Forest) -> Tree:
        return add(shared["model"], self.move(payload["direction"], payload["steps"]))

    def move(self, direction: Tree, steps: Tree) -> Tree:
        """The change of all variables that so many effective steps in this direction make."""
        factor = steps["effective"]
        return {name: leaf if name in self.model.buffers else leaf * factor for name, leaf in direction.items()}


def minus_own(gradients: Tree, shared: Forest, own: Tree, facts: Facts) -> Tree:
    return map_leaves(torch.sub, gradients, own)


class FedNova(FedAvg):
    """One ask a round; ``average`` is the reducer of directions and of steps."""

    def __init__(self, local: NormalisedSGD, average: Reducer = weighted_mean) -> None:
        super().__init__(local)
        self._local = local
        self._average = average

    def round(self, state: FedAvgState, context: Context) -> Script[FedAvgState]:
        reduce = {"direction": self._average, "steps": self._average}
        reply: Reply = yield Ask("train", shared={"model": state.variables}, reduce=reduce)
        move = self._local.move(reply.values["direction"], reply.values["steps"])
        return FedAvgState(add(state.variables, move))


def fednova(ingredients: Ingredients, weights: Weights = "examples", subtract_previous: bool = False) -> FedNova:
    """FedNova; the options are those of public code that the module's docstring names."""
    direction = minus_own if subtract_previous else None
    local = ingredients.training(NormalisedSGD, direction=direction, subtract_previous=subtract_previous)
    return FedNova(local, AVERAGES[weights])
