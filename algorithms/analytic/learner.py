"""The rounds of a method whose classifier follows from sums of features.

The features are those of the experiment's model. They must not change once sums are taken. So all layers but the
classifier are trained first, if at all (``warm_up`` rounds of FedAvg in the first task), and are frozen then. From
there on each round asks devices for sums over the samples that have not been counted yet, adds them to those of all
earlier rounds and tasks, and puts the classifier that follows from them in the place of the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from fedemu.algorithms.analytic.sums import SUMS, LedgerSGD, Summed, Sums
from fedemu.algorithms.interface import Ask, Context, LocalProgram, Query, Reply, Script, Tree, total, weighted_mean
from fedemu.algorithms.models.growing import Growing, Head, head_of
from fedemu.algorithms.models.low_precision import LowPrecision
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.trees import SUM_UNIT, add, scale, zeros_like
from fedemu.protocol.errors import ConfigurationError

Devices = Literal["selected", "online"]
"""Which devices are asked for sums: the round's cohort, or all devices that are on-line."""
Solve = Callable[[Tree], tuple[Tensor, Tensor]]
"""(sums) -> weight ``[classes, width]`` and bias ``[classes]`` of the classifier."""


@dataclass(frozen=True)
class AnalyticState:
    """The global model, and the sums of all rounds so far; no sums before the first."""

    variables: Tree
    sums: Tree = field(default_factory=dict)


class Analytic:
    """A method that trains features for ``warm_up`` rounds, and then asks for sums and solves.

    The warm-up ends with the first task at the latest: sums are asked for in its last round, after the training.
    """

    def __init__(
        self,
        warming: LedgerSGD,
        sums: Sums,
        head: Head,
        solve: Solve,
        warm_up: int,
        devices: Devices,
    ) -> None:
        trained: dict[str, LocalProgram | Query] = {"train": warming} if warm_up else {}
        self.programs: Mapping[str, LocalProgram | Query] = trained | {"sums": sums}
        self._zero = sums.zero
        self._head = head
        self._solve = solve
        self._warm_up = warm_up
        self._devices: Devices = devices

    def init(self, variables: Tree, context: Context) -> AnalyticState:
        return AnalyticState(variables)

    def round(self, state: AnalyticState, context: Context) -> Script[AnalyticState]:
        if context.task == 0 and context.round <= self._warm_up:
            reply: Reply = yield Ask("train", {"model": state.variables}, {"delta": weighted_mean})
            state = replace(state, variables=add(state.variables, reply.values["delta"]))
            if context.round < self._warm_up and not context.task_ends:
                return state
        # Features do not depend on the classifier. Without it this tree stays the same for a whole task, so that each
        # machine gets it once.
        shared = {"model": with_head(state.variables, self._head, None)}
        everybody = self._devices == "online"
        reply = yield Ask("sums", shared, {SUMS: total}, self._devices, optional=everybody)
        sums = state.sums or self._zero
        if reply.devices:
            sums = add(sums, scale(reply.values[SUMS], SUM_UNIT))
        return AnalyticState(with_head(state.variables, self._head, self._solve(sums)), sums)

    def variables(self, state: AnalyticState) -> Tree:
        return state.variables

    def remarks(self, state: AnalyticState) -> Mapping[str, Any]:
        """The number of samples that have been counted; nothing while features are trained."""
        return {"counted": counted(state.sums)} if state.sums else {}


def with_head(variables: Tree, head: Head, classifier: tuple[Tensor, Tensor] | None) -> Tree:
    """The variables with this weight and bias as the classifier, in its own dtype; zeros if there are none."""
    names = [name for name in (head.weight, head.bias) if name is not None]
    if classifier is None:
        return {**variables, **zeros_like({name: variables[name] for name in names})}
    leaves = dict(zip(names, classifier, strict=False))
    return {**variables, **{name: leaf.to(variables[name].dtype) for name, leaf in leaves.items()}}


def classifier_head(ingredients: Ingredients, method: str) -> tuple[Head, int]:
    """The names of the model's classifier, and the width of the model's features.

    Raises ConfigurationError if the data have no classes, if devices replay samples, or if the model's logits are not
    a linear layer of its features.
    """
    ingredients.require_classes(method)
    ingredients.require_features(method)
    if ingredients.kept:
        raise ConfigurationError(
            f"the method {method!r} counts each sample once and forgets nothing, but replayed samples would be "
            "counted again; set replay.strategy = 'none'"
        )
    model = ingredients.model
    if isinstance(model, Growing):
        head = model.head
    else:
        # A classifier is recognised by its logits, and rounded products have others.
        exact = model.model if isinstance(model, LowPrecision) else model
        try:
            head = head_of(exact, ingredients.classes, ingredients.input_shape, ingredients.tokens)
        except ConfigurationError as error:
            raise ConfigurationError(f"the method {method!r} replaces the model's classifier: {error}") from error
    return head, model.init(0)[head.weight].shape[1]


def analytic(
    ingredients: Ingredients,
    head: Head,
    width: int,
    summed: Summed,
    solve: Solve,
    warm_up: int,
    devices: Devices,
) -> Analytic:
    """The method that sends the sums ``summed`` and whose classifier is ``solve`` of their totals."""
    program = Sums(ingredients.model, summed, ingredients.classes, width, cumulative=ingredients.cumulative)
    return Analytic(ingredients.training(LedgerSGD), program, head, solve, warm_up, devices)


def counted(sums: Tree) -> int:
    """The number of samples in sums, which hold it by class, as ``counts [classes]``."""
    return round(float(sums["counts"].sum()))
