"""Any method on a class-incremental stream: when a task begins, the classifier gets rows for the task's classes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from fedemu.algorithms.incremental.remembering import RememberingFedAvg, RememberingState
from fedemu.algorithms.interface import Algorithm, Around, Batch, Context, Facts, Model, Script, Tree
from fedemu.algorithms.models.growing import SEEN, Growing
from fedemu.algorithms.training.class_losses import cross_entropy_among, task_temperature_cross_entropy
from fedemu.protocol.errors import ConfigurationError

S = TypeVar("S")


@dataclass(frozen=True)
class NewClassCrossEntropy:
    """The cross-entropy of the current task's samples among the task's classes only, as a criterion.

    Samples of other classes, such as replayed ones, are left out. MFCL (Babakniya et al., 2023), equation 6.
    """

    model: Growing

    def __call__(self, logits: Tensor, batch: Batch, facts: Facts) -> Tensor:
        return cross_entropy_among(logits, batch.y, self.model.brought(facts), batch.weight)


@dataclass(frozen=True)
class TaskTemperature:
    """Cross-entropy with a lower temperature and a higher weight for classes of earlier tasks, as a criterion.

    FedCBDR (Qi et al., 2025), equation 9; in the first task equation 8, which is plain cross-entropy.
    """

    model: Growing

    def __call__(self, logits: Tensor, batch: Batch, facts: Facts) -> Tensor:
        old, new = self.model.brought_before(facts), self.model.brought(facts)
        return task_temperature_cross_entropy(logits, batch.y, old, new, batch.weight)


@dataclass(frozen=True)
class TaskState(Generic[S]):
    """The state of the inner method, and the task of the last round."""

    inner: S
    task: int


class TaskByTask(Around[S]):
    """The method ``inner`` with a model that grows: its rounds stay as they are.

    The state of ``inner`` must be a dataclass with the global model in the field ``variables``, or hold the state of a
    method that lets its model grow already, as a method that plays the rounds of a built-in one does. ``init`` raises
    ConfigurationError if it is neither.
    """

    def __init__(self, inner: Algorithm[S], model: Growing) -> None:
        super().__init__(inner)
        self._model = model

    def init(self, variables: Tree, context: Context) -> TaskState[S]:
        inner = self._inner.init(variables, context)
        if not _grows_inside(inner) and not (dataclasses.is_dataclass(type(inner)) and hasattr(inner, "variables")):
            raise ConfigurationError(
                f"a class-incremental stream adds classes to the field 'variables' of a method's state, but the state "
                f"{type(inner).__name__} has no such field; make it a dataclass with the global model under that name"
            )
        return TaskState(inner, 0)

    def round(self, state: TaskState[S], context: Context) -> Script[TaskState[S]]:
        inner: Any = state.inner
        if _grows_inside(inner):
            return TaskState((yield from self._inner.round(inner, context)), context.task)
        if context.task != state.task:
            variables = self._model.entered(inner.variables, context.task, context.seed)
            inner = dataclasses.replace(inner, variables=variables)
        after: Any = yield from self._inner.round(inner, context)
        # Devices have no say in which classes have been seen, whatever their replies hold.
        seen = {SEEN: inner.variables[SEEN]}
        return TaskState(dataclasses.replace(after, variables={**after.variables, **seen}), context.task)


def _grows_inside(state: Any) -> bool:
    """Whether a state is, or has in a field, that of a method that lets its model grow by itself."""
    held = [state, *vars(state).values()] if dataclasses.is_dataclass(type(state)) else [state]
    return any(isinstance(one, TaskState | RememberingState) for one in held)


def with_tasks(algorithm: Algorithm[Any], model: Model) -> Algorithm[Any]:
    """The method, with a model that grows task by task if ``model`` does.

    A method that lets its model grow by itself is returned as it is, and so is any method if ``model`` does not grow.
    """
    if not isinstance(model, Growing) or isinstance(algorithm, RememberingFedAvg):
        return algorithm
    return TaskByTask(algorithm, model)
