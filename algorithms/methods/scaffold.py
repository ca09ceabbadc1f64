"""SCAFFOLD (Karimireddy et al., "Stochastic Controlled Averaging for Federated Learning", 2020).

The coordinator keeps a control variate ``c``, and device i keeps its own ``c_i``. All are zero at first. ``c``
estimates the mean gradient of the fleet, ``c_i`` that of the device, and local steps follow ``g - c_i + c``. After K
steps with learning rate lr the device sets ``c_i+ = c_i - c + (w - w_i)/(K·lr)`` (the paper's option II) and sends the
change. The coordinator sets ``c += sum_i (c_i+ - c_i)/N``, where N is the size of the whole fleet, so that ``c`` stays
the mean of all ``c_i``. Two things are not offered: the paper's option I, the gradient at the global model, which costs
a further pass over the data; and a step size at the coordinator other than 1.

The paper has no momentum. With momentum there are two published rules, each with a fitting divisor. Without momentum
they are the same:

- ``rule = "gradient"`` (default; FedNTD's code): the corrected gradient goes through the optimiser, as in the paper's
  local step, and K becomes ``fednova.effective_steps(K, momentum)``. Then ``c_i`` is a mean of gradients.
- ``rule = "weights"`` (the code of NIID-Bench and WSM): the optimiser sees the plain gradient, ``w -= lr·(c - c_i)``
  follows each of its steps, and K stays. Then ``c_i`` is the mean move of a step over lr, larger than a gradient.

Local moves are averaged by examples, as in FedNTD and NIID-Bench; the paper and WSM's code take the plain mean
(``weights = "even"``). Control variates belong to trained variables only; running statistics of batch normalisation
are averaged like weights. A device without samples takes no step and keeps its ``c_i``. So does one whose learning rate
has decayed so far that it is 0 as a float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedemu.algorithms.interface import (
    Ask,
    Batch,
    Context,
    Facts,
    Forest,
    LocalProgram,
    Outcome,
    Query,
    Reducer,
    Reply,
    Script,
    Tree,
    total,
    weighted_mean,
)
from fedemu.algorithms.methods.fednova import AVERAGES, Weights, effective_steps
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD, Training
from fedemu.algorithms.trees import add, map_leaves, subtract, widened, without, zeros_like
from fedemu.protocol.errors import ConfigurationError

Rule = Literal["gradient", "weights"]


@dataclass(frozen=True, eq=False)
class ControlledSGD(LocalSGD):
    """Local training that is corrected by control variates, which exist for the trained variables.

    ``shared["control"]`` is the control variate of the fleet, ``own`` that of the device. The payload has ``delta``,
    and as ``control`` the change of the device's control variate.
    """

    rule: Rule = "gradient"

    def initial_own(self, shared: Forest) -> Tree:
        return zeros_like(shared["control"])

    def payload(self, shared: Forest) -> Forest:
        return {"delta": shared["model"], "control": shared["control"]}

    def step(
        self, carry: Training, batch: Batch, shared: Forest, own: Tree, facts: Facts, noise: Tree
    ) -> tuple[Training, Tree]:
        after, metrics = super().step(carry, batch, shared, own, facts, noise)
        if self.rule == "gradient":
            return after, metrics
        moved = {}
        for name, correction in subtract(shared["control"], own).items():
            leaf = after.variables[name]
            moved[name] = torch.addcmul(leaf, correction.to(leaf.dtype), facts.lr.to(leaf.dtype), value=-1)
        return Training({**after.variables, **moved}, after.momentum), metrics

    def finish(self, carry: Training, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        delta = subtract(carry.variables, shared["model"])
        steps = effective_steps(facts.steps, self.momentum if self.rule == "gradient" else 0.0)
        # No steps and a learning rate that has decayed to 0 tell no gradient.
        distance = steps * facts.lr
        moved = distance > 0

        def change(control: Tensor, move: Tensor) -> Tensor:
            return torch.where(moved, -move / distance - control, torch.zeros_like(control))

        changes = map_leaves(change, shared["control"], widened(delta))
        return Outcome({"delta": delta, "control": changes}, add(own, changes))


def controlled(gradients: Tree, shared: Forest, own: Tree, facts: Facts) -> Tree:
    """The direction of the rule ``gradient``: ``g - c_i + c``."""
    return map_leaves(lambda g, mine, fleets: (g - mine + fleets).to(g.dtype), gradients, own, shared["control"])


@dataclass(frozen=True)
class ScaffoldState:
    """All variables of the global model, and ``c`` for the trained ones, which is float32 at least."""

    variables: Tree
    control: Tree


class Scaffold:
    """One ask a round. ``devices`` is the size of the fleet, ``average`` the reducer of local moves."""

    def __init__(self, local: ControlledSGD, devices: int, average: Reducer = weighted_mean) -> None:
        self.programs: dict[str, LocalProgram | Query] = {"train": local}
        self._buffers = local.model.buffers
        self._devices = devices
        self._average = average

    def init(self, variables: Tree, context: Context) -> ScaffoldState:
        return ScaffoldState(variables, zeros_like(widened(without(variables, self._buffers))))

    def round(self, state: ScaffoldState, context: Context) -> Script[ScaffoldState]:
        reply: Reply = yield Ask(
            "train",
            shared={"model": state.variables, "control": state.control},
            reduce={"delta": self._average, "control": total},
        )
        change = map_leaves(lambda leaf: leaf / self._devices, reply.values["control"])
        return ScaffoldState(add(state.variables, reply.values["delta"]), add(state.control, change))

    def variables(self, state: ScaffoldState) -> Tree:
        return state.variables


def scaffold(ingredients: Ingredients, rule: Rule = "gradient", weights: Weights = "examples") -> Scaffold:
    """SCAFFOLD with one of two rules and one of two averages. Raises ConfigurationError without ``devices``."""
    if ingredients.devices < 1:
        raise ConfigurationError(
            f"the method 'scaffold' averages over the whole fleet, but its ingredients say devices = "
            f"{ingredients.devices}; give them the number of devices, as fleet.devices does"
        )
    direction = controlled if rule == "gradient" else None
    local = ingredients.training(ControlledSGD, direction=direction, rule=rule)
    return Scaffold(local, ingredients.devices, AVERAGES[weights])
