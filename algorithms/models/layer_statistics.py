"""Mean and variance of the values in a model's layers: of one batch, and running ones over a device's batches.

An ``observed`` model reports those of a batch in ``Outputs.statistics``. Batch normalisation keeps running statistics
by itself. A ``Watched`` model keeps them for its other layers in additional buffers, so that devices report them like
those of batch normalisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedemu.algorithms.interface import Model, Outputs, Tree
from fedemu.algorithms.models.around import ModelAround
from fedemu.algorithms.models.layers import BATCH_NORM_MOMENTUM
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.wording import an_object

WATCHED: Final = "watched."
"""The beginning of the names of a watched layer's buffers, ``watched.LAYER.mean`` and ``watched.LAYER.var``."""


@runtime_checkable
class Observable(Protocol):
    """A model that can report statistics of its layers."""

    def observed(self) -> Model:
        """The same model with ``Outputs.statistics``: ``LAYER.mean`` and the biased ``LAYER.var`` ``[channels]``."""
        ...


def observed(model: Model) -> Model:
    """The model with ``Outputs.statistics``. Raises ConfigurationError if it is not ``Observable``."""
    if not isinstance(model, Observable):
        raise ConfigurationError(
            f"a generator is trained by statistics of the model's layers, and {an_object(model)} reports none; "
            "choose mlp, cnn, lenet, resnet18 or a torch.nn.Module, or set algorithm.options.batch_statistics = 0"
        )
    return model.observed()


@dataclass(frozen=True, eq=False)
class Watched(ModelAround):
    """An observed model that keeps running statistics of ``layers``, which are (name, number of channels).

    As in batch normalisation, means begin with 0 and variances with 1, and the newest batch has the share
    BATCH_NORM_MOMENTUM. They are float32, also if a layer is of half precision. A batch of one sample, also if padding
    repeats it, changes nothing: it has no variance.
    """

    model: Model
    layers: tuple[tuple[str, int], ...]

    @cached_property
    def buffers(self) -> frozenset[str]:
        return self.model.buffers | self.added

    @cached_property
    def added(self) -> frozenset[str]:
        """The buffers that the model itself does not have."""
        return frozenset(f"{WATCHED}{name}.{figure}" for name, _ in self.layers for figure in ("mean", "var"))

    def init(self, seed: int) -> Tree:
        return self.begun(self.model.init(seed), seed)

    def begun(self, variables: Tree, seed: int) -> Tree:
        """The model's variables with the additional buffers at their beginning."""
        means = {f"{WATCHED}{name}.mean": torch.zeros(channels) for name, channels in self.layers}
        variances = {f"{WATCHED}{name}.var": torch.ones(channels) for name, channels in self.layers}
        return {**variables, **means, **variances}

    def stripped(self, variables: Tree) -> Tree:
        return unwatched(variables)

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        inner = {name: leaf for name, leaf in variables.items() if name not in self.added}
        outputs, buffers = self.model.apply(inner, x, train)
        kept = {name: variables[name] for name in self.added}
        if train:
            single = (x == x[:1]).all()
            for name, leaf in kept.items():
                newest = outputs.statistics[name.removeprefix(WATCHED)].detach().to(leaf.dtype)
                kept[name] = torch.where(single, leaf, torch.lerp(leaf, newest, BATCH_NORM_MOMENTUM))
        return outputs, {**buffers, **kept}


def watched(model: Model, input_shape: tuple[int, ...]) -> Watched:
    """The observed model, with running statistics of all layers that do not keep any by themselves.

    ``input_shape`` is the shape of one sample. Raises ConfigurationError if the model reports no layers at all.
    """
    seen = observed(model)
    variables = seen.init(0)
    with torch.no_grad():
        outputs, _ = seen.apply(variables, torch.zeros(2, *input_shape), False)
    channels = {
        name.removesuffix(".mean"): len(leaf) for name, leaf in outputs.statistics.items() if name.endswith(".mean")
    }
    if not channels:
        raise ConfigurationError(
            "a generator is trained by statistics of the model's layers, and this model has no layers that report any; "
            "give it hidden layers, or batch normalisation if it is a module of your own, or set "
            "algorithm.options.batch_statistics = 0"
        )
    return Watched(seen, tuple(layer for layer in channels.items() if f"{layer[0]}.running_mean" not in variables))


def running_statistics(variables: Tree) -> Tree:
    """The running ``LAYER.mean`` and ``LAYER.var`` of all layers: of batch normalisation, and of watched layers."""
    found: dict[str, Tensor] = {}
    for name, leaf in variables.items():
        if name.startswith(WATCHED):
            found[name.removeprefix(WATCHED)] = leaf
        for figure in ("mean", "var"):
            if name.endswith(ending := f".running_{figure}"):
                found[f"{name.removesuffix(ending)}.{figure}"] = leaf
    return found


def unwatched(variables: Tree) -> Tree:
    """The variables without the additional buffers of a ``Watched`` model."""
    return {name: leaf for name, leaf in variables.items() if not name.startswith(WATCHED)}
