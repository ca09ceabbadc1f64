"""What a model is: a network as pure functions of its variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from fedemu.algorithms.interface.values import Kind, Tree

if TYPE_CHECKING:
    from torch import Tensor


class Outputs(NamedTuple):
    """``logits [batch, classes]``, ``features [batch, width]`` (the last layer's input), and ``statistics`` of layers.

    A language model returns logits and features for every token, ``[batch, length, ...]``.
    """

    logits: Tensor
    features: Tensor
    statistics: Tree


class Model(Protocol):
    """A network as pure functions; parameters and buffers are leaves of one Tree."""

    @property
    def kind(self) -> Kind:
        """The kind of the network. The choice of an executor depends on it, unless the program is ``OfItsOwnKind``."""
        ...

    @property
    def buffers(self) -> frozenset[str]:
        """Names of the variables that are not trained (running statistics)."""
        ...

    def init(self, seed: int) -> Tree:
        """All variables of a new model, parameters and buffers: a function of the seed."""
        ...

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        """The outputs for ``x [batch, ...]``, and the next buffers.

        If nothing changed, the buffers may be those of ``variables``. Nothing is changed in place.
        """
        ...


@runtime_checkable
class PartlyFrozen(Protocol):
    """A model with tensors that are never trained and never sent. ``init`` and ``apply`` do not have them as variables.

    Every process builds the model by itself, so they have to be the same in all processes.
    """

    @property
    def frozen(self) -> Tree:
        """The frozen tensors by name. They are saved beside the variables of the final model."""
        ...


@runtime_checkable
class Mixing(Protocol):
    """A model that tells whether it mixes the samples of a batch."""

    def mixes(self, train: bool) -> bool:
        """Whether what it says of a sample depends on the others of the batch, in training or in evaluation."""
        ...


def mixes(model: Model, train: bool) -> bool:
    """Whether a model says that it mixes the samples of a batch."""
    return isinstance(model, Mixing) and model.mixes(train)


@runtime_checkable
class Pure(Protocol):
    """A model that tells whether several threads may call its ``apply`` at the same time.

    They may if it changes nothing, not even for the time of the call. A ``torch.nn.Module`` does: it gets its variables
    put in for each call.
    """

    @property
    def pure(self) -> bool: ...


def pure(model: Model) -> bool:
    """Whether a model says that several threads may apply it at the same time."""
    return isinstance(model, Pure) and model.pure
