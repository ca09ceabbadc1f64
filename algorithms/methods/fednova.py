"""FedNova (Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", 2020).

A device that takes more local steps moves further, and federated averaging counts its move in full. FedNova averages
directions per effective step, ``d_i = (w_i - w)/a_i``, and then takes the mean number of effective steps:
``w += (sum_i p_i a_i) · sum_i p_i d_i``. ``p_i`` are the devices' shares of the examples, and ``a_i`` comes from
``effective_steps``. If all devices take the same number of steps, this is federated averaging.

``a_i`` takes momentum into account. The paper's ``a_i`` also depends on the coefficient of a proximal term; there is no
such term here, and weight decay belongs to the local objective. Running statistics of batch normalisation are not a sum
of steps, so their changes are averaged as they are (FedNTD's code divides them by ``a_i`` like weights).

Public code differs in two points. WSM's code weighs the devices evenly (``weights = "even"``). FedNTD's configuration
sets ``nova_ccvr``, which should correct each gradient by the fleet's mean direction minus the device's own. In that
code the mean is never updated, so it only subtracts ``d_i`` of the device's last visit; the FedNova in its tables may
have run like this (``subtract_previous = true``).
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
from fedemu.algorithms.trees import add, map_leaves, subtract, widened, without, zeros_like

Weights = Literal["examples", "even"]
AVERAGES: Mapping[Weights, Reducer] = {"examples": weighted_mean, "even": mean}
"""The reducer for each way to weigh devices in a mean: by their numbers of examples, or evenly.

Evenly, a device without samples counts like any other, so its delta of zero shortens the step of the global model. By
examples it does not count.
"""


@overload
def effective_steps(steps: Tensor, momentum: float) -> Tensor: ...
@overload
def effective_steps(steps: float, momentum: float) -> float: ...
def effective_steps(steps: Tensor | float, momentum: float) -> Tensor | float:
    """The number of plain SGD steps that correspond to ``steps`` of momentum SGD: the ``a_i`` of FedNova.

    ``a = (t - m(1 - m^t)/(1 - m)) / (1 - m)`` for ``t`` steps with momentum ``m``, which is the sum of the weights of
    all gradients in the device's move (Wang et al., 2020). It is ``t`` without momentum, and 0 for no steps.

    A number gives a float. A tensor of any shape gives a tensor of the same shape, in its own floating dtype, or in
    float32 for integers. Raises ValueError unless ``0 <= momentum < 1``.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum = {momentum} has no number of effective steps; it must be at least 0 and below 1")
    # float64, because a few steps with much momentum are a small difference of large numbers.
    exact = steps.double() if isinstance(steps, Tensor) else float(steps)
    effective: Tensor | float = (exact - momentum * (1 - momentum**exact) / (1 - momentum)) / (1 - momentum)
    if isinstance(steps, Tensor) and isinstance(effective, Tensor):
        return effective.to(steps.dtype if steps.is_floating_point() else torch.float32)
    return effective


@dataclass(frozen=True, eq=False)
class NormalisedSGD(LocalSGD):
    """Local training that sends ``direction`` and ``steps``.

    ``direction`` is the change of weights per effective step, and the plain change of buffers. ``steps`` is the number
    of effective steps. With ``subtract_previous`` the device keeps as ``own`` the gradient that corresponds to the
    direction of its last visit, and subtracts it from each gradient. Directions and gradients are float32 at least: a
    small change divided by thousands of steps would be 0 in float16.
    """

    subtract_previous: bool = False

    def initial_own(self, shared: Forest) -> Tree:
        return zeros_like(widened(without(shared["model"], self.model.buffers))) if self.subtract_previous else {}

    def payload(self, shared: Forest) -> Forest:
        return {"direction": widened(shared["model"]), "steps": {"effective": torch.zeros(())}}

    def finish(self, carry: Training, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        steps = effective_steps(facts.steps, self.momentum)
        # A first step is one effective step with any momentum; so clamp only changes a device without steps.
        divisor = steps.clamp(min=1)
        delta = widened(subtract(carry.variables, shared["model"]))
        direction = {name: leaf if name in self.model.buffers else leaf / divisor for name, leaf in delta.items()}
        # A learning rate that has decayed to 0 tells no gradient.
        moved = steps * facts.lr > 0
        gradient = {name: torch.where(moved, -direction[name] / facts.lr, leaf) for name, leaf in own.items()}
        return Outcome({"direction": direction, "steps": {"effective": steps}}, gradient)

    def local_model(self, shared: Forest, payload: Forest) -> Tree:
        return self.moved(shared["model"], payload["direction"], payload["steps"])

    def moved(self, variables: Tree, direction: Tree, steps: Tree) -> Tree:
        """All variables after this number of effective steps in this direction."""
        factor = steps["effective"]
        move = {name: leaf if name in self.model.buffers else leaf * factor for name, leaf in direction.items()}
        return {name: leaf.to(variables[name].dtype) for name, leaf in add(variables, move).items()}


def minus_own(gradients: Tree, shared: Forest, own: Tree, facts: Facts) -> Tree:
    """The direction of ``subtract_previous``: ``g - own``."""
    return map_leaves(lambda gradient, mine: (gradient - mine).to(gradient.dtype), gradients, own)


class FedNova(FedAvg):
    """One ask a round. ``average`` is the reducer of directions and of steps."""

    def __init__(self, local: NormalisedSGD, average: Reducer = weighted_mean) -> None:
        super().__init__(local, average)
        self._local = local

    def round(self, state: FedAvgState, context: Context) -> Script[FedAvgState]:
        reduce = {"direction": self._average, "steps": self._average}
        reply: Reply = yield Ask("train", shared={"model": state.variables}, reduce=reduce)
        return FedAvgState(self._local.moved(state.variables, reply.values["direction"], reply.values["steps"]))


def fednova(ingredients: Ingredients, weights: Weights = "examples", subtract_previous: bool = False) -> FedNova:
    """FedNova. The docstring of the module explains both options, which come from public code."""
    direction = minus_own if subtract_previous else None
    local = ingredients.training(NormalisedSGD, direction=direction, subtract_previous=subtract_previous)
    return FedNova(local, AVERAGES[weights])
