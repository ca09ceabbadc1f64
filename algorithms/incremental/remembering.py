"""Federated averaging over tasks that bring classes, for methods that keep something of each finished task.

During the first task devices run the program ``train``. From the second task on they run ``rehearse``, which also gets
what the method keeps of earlier tasks: the global model at the end of the last task (``previous``), and what the
coordinator makes from it. Kept trees do not change during a task, so each machine gets them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

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
from fedemu.algorithms.models.around import extended, stripped
from fedemu.algorithms.models.growing import Growing
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.protocol.errors import ConfigurationError

PREVIOUS: Final = "previous"
"""The key, among the kept trees and those that devices get, of the global model at the end of the last task.

Some methods keep only the classes that it has seen.
"""

JUDGED: Final = "judged"
"""The key of the judgement of a generator, or of a synthesis. It is kept, but not sent to devices."""


@dataclass(frozen=True)
class RememberingState:
    """All variables that devices train, the trees that are kept of earlier tasks, and the task of the last round."""

    variables: Tree
    kept: Forest = field(default_factory=dict)
    task: int = 0


@dataclass(frozen=True, eq=False)
class TaskSGD(LocalSGD):
    """Local training of a model that may be ``Extended``. What it has beside is no part of the trained model."""

    def local_model(self, shared: Forest, payload: Forest) -> Tree:
        return stripped(self.model, super().local_model(shared, payload))


class RememberingFedAvg:
    """Federated averaging with one ask a round. Between two tasks ``remember`` makes the trees that are kept.

    ``first`` is the program of the first task, ``later`` that of all others. They train the same model, which may be
    ``Extended``. ``average`` reduces the devices' deltas.
    """

    def __init__(self, first: LocalSGD, later: LocalSGD, classifier: Growing, average: Reducer = weighted_mean) -> None:
        self.programs: Mapping[str, LocalProgram | Query] = {"train": first, "rehearse": later}
        self.classifier = classifier
        self._model = first.model
        self._average = average

    def init(self, variables: Tree, context: Context) -> RememberingState:
        return RememberingState(extended(self._model, variables, context.seed))

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
        """The reducer of each key of the payload."""
        return {"delta": self._average}

    def merged(self, state: RememberingState, reply: Reply, context: Context) -> Script[Tree]:
        """A part of the round: the next variables, from the devices' reply."""
        yield from ()
        return self.classifier.moved(state.variables, reply.values["delta"])

    def remember(self, state: RememberingState, context: Context) -> Script[Forest]:
        """A part of the round before ``context.task`` begins: the trees to keep of the tasks up to ``state.task``."""
        yield from ()
        return {PREVIOUS: stripped(self._model, state.variables)}

    def shared(self, kept: Forest) -> Forest:
        """The kept trees that are sent to devices, beside the model."""
        return kept

    def remarks(self, state: RememberingState) -> Mapping[str, Any]:
        """The judgement of what the round rehearsed from, if any was made."""
        judged = state.kept.get(JUDGED)
        return {"generator": {name: float(value) for name, value in judged.items()}} if judged else {}

    def variables(self, state: RememberingState) -> Tree:
        return stripped(self._model, state.variables)


def classifier_of(ingredients: Ingredients, method: str) -> Growing:
    """The experiment's growing classifier.

    Raises ConfigurationError if the stream does not bring classes task by task, or if the data have no classes.
    """
    ingredients.require_classes(method)
    if not isinstance(ingredients.model, Growing):
        raise ConfigurationError(
            f"the method {method!r} remembers classes of earlier tasks, but the stream brings none; "
            "set stream.kind = 'classes', or choose another method"
        )
    return ingredients.model
