"""A model around another one: what it hands on of the model inside."""

from __future__ import annotations

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
