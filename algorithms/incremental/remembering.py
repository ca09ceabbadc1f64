"""Federated averaging over tasks that bring classes, by methods that remember: what a finished task leaves is kept.

While the first task lasts, devices run the program ``train``. From the second on they run ``rehearse``, with what the
method keeps of the tasks before: the global model at the end of the last one (``previous``), and what is made of it at
the coordinator. Kept trees stay as they are while a task lasts, so a machine gets them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedemu.algorithms.interface import (
    Ask,
    Context,
    Forest,
    LocalProgram,
    Query,
    Reducer,
    Reply,
    Script,
    Tree,
    weighted_mean,
)
from fedemu.algorithms.models.growing import Growing
from fedemu.algorithms.models.layer_statistics import unwatched
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.trees import add
from fedemu.protocol.errors import ConfigurationError


@dataclass(frozen=True)
class RememberingState:
    """All variables that devices train, what is kept of earlier tasks by key, and the task of the last round."""

    variables: Tree
    kept: Forest = field(default_factory=dict)
    task: int = 0


@dataclass(frozen=True, eq=False)
class TaskSGD(LocalSGD):
    """Local training of a model that may be ``Watched``: running statistics are reported, but are no part of it."""

    def local_model(self, shared: Forest, payload: Forest) -> Tree:
        return unwatched(super().local_model(shared, payload))


class RememberingFedAvg:
    """One ask a round, and between two tasks what ``remember`` does; ``average`` is the reducer of the deltas."""

    def __init__(self, first: LocalSGD, later: LocalSGD, classifier: Growing, average: Reducer = weighted_mean) -> None:
        self.programs: Mapping[str, LocalProgram | Query] = {"train": first, "rehearse": later}
        self.classifier = classifier
        self._average = average

    def init(self, variables: Tree, context: Context) -> RememberingState:
        return RememberingState(variables)

    def round(self, state: RememberingState, context: Context) -> Script[RememberingState]:
        if context.task != state.task:
            kept = yield from self.remember(state, context)
            variables = self.classifier.entered(state.variables, context.task, context.seed)
            state = RememberingState(variables, kept, context.task)
        shared = {"model": state.variables, **(self.shared(state.kept) if state.task else {})}
        reply: Reply = yield Ask("rehearse" if state.task else "train", shared, self.reduce)
        variables = yield from self.merged(state, reply, context)
        return replace(state, variables=variables)

    @property
    def reduce(self) -> Mapping[str, Reducer]:
        return {"delta": self._average}

    def merged(self, state: RememberingState, reply: Reply, context: Context) -> Script[Tree]:
        """Part of a round: the next variables, from what the devices replied."""
        yield from ()
        return add(state.variables, reply.values["delta"])

    def remember(self, state: RememberingState, context: Context) -> Script[Forest]:
        """Part of a round: what is kept of the tasks up to ``state.task``, before ``context.task`` begins."""
        yield from ()
        return {"previous": unwatched(state.variables)}

    def shared(self, kept: Forest) -> Forest:
        """What devices are sent of it, beside the model."""
        return kept

    def variables(self, state: RememberingState) -> Tree:
        return unwatched(state.variables)


def classifier_of(ingredients: Ingredients, method: str) -> Growing:
    """ConfigurationError where the experiment's stream brings no classes task by task, or classes have no samples."""
    ingredients.require_classes(method)
    if not isinstance(ingredients.model, Growing):
        raise ConfigurationError(
            f"the method {method!r} remembers classes of earlier tasks, but the stream brings none; "
            "set stream.kind = 'classes', or choose another method"
        )
    return ingredients.model
