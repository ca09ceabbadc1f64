"""What a model is: a network as pure functions of its variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from fedemu.algorithms.interface.values import Kind, Tree

if TYPE_CHECKING:
    from torch import Tensor


class Outputs(NamedTuple):
    """``logits [batch, classes]``, ``features [batch, width]`` (the last layer's input), ``statistics`` of layers.

    A language model gives them for every token, ``[batch, length, ...]``.
    """

    logits: Tensor
    features: Tensor
    statistics: Tree


class Model(Protocol):
    """A network as pure functions; parameters and buffers are leaves of one Tree."""

    @property
    def kind(self) -> Kind:
        """What the executor's rule goes by, unless a program is of its own kind."""
        ...

    @property
    def buffers(self) -> frozenset[str]:
        """Names of the variables that are not trained (running statistics)."""
        ...

    def init(self, seed: int) -> Tree: ...

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        """Returns the outputs and the next buffers (the same Tree as given where nothing changed)."""
        ...
