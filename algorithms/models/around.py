"""A model around another one: what it hands on of the model inside, and which variables it has beside those."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from fedemu.algorithms.interface import Kind, Model, Tree, mixes, pure
from fedemu.algorithms.models.frozen import frozen_of


class ModelAround:
    """The base of a model around ``model``, whose variables and properties it has unless it says something else."""

    model: Model

    @property
    def kind(self) -> Kind:
        return self.model.kind

    @property
    def buffers(self) -> frozenset[str]:
        return self.model.buffers

    @property
    def frozen(self) -> Tree:
        return frozen_of(self.model)

    @property
    def pure(self) -> bool:
        return pure(self.model)

    def mixes(self, train: bool) -> bool:
        return mixes(self.model, train)

    def init(self, seed: int) -> Tree:
        return self.model.init(seed)


@runtime_checkable
class Extended(Protocol):
    """A model with more variables than the experiment's model around which it is. Devices train and report them all."""

    def begun(self, variables: Tree, seed: int) -> Tree:
        """The variables of the experiment's model, with the others at their beginning, as far as drawn by ``seed``."""
        ...

    def stripped(self, variables: Tree) -> Tree:
        """The variables of the experiment's model alone."""
        ...


def extended(model: Model, variables: Tree, seed: int) -> Tree:
    """The variables of the experiment's model, with those that ``model`` has beside them at their beginning."""
    return model.begun(variables, seed) if isinstance(model, Extended) else variables


def stripped(model: Model, variables: Tree) -> Tree:
    """The variables of ``model`` without those that the experiment's model does not have."""
    return model.stripped(variables) if isinstance(model, Extended) else variables
