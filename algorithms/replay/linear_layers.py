"""Finds the linear layers of any model, with their inputs and outputs, by watching a forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedemu.algorithms.interface import Tree

_TRANSPOSES = (Tensor.t, torch.t, Tensor.T.__get__)  # type: ignore[attr-defined]
_PRODUCTS = (Tensor.matmul, torch.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)


class LinearLayer(NamedTuple):
    """The weight of a linear layer, with what the layer sees of one sample.

    It sees ``positions`` rows of ``inputs`` values. ``output`` is the shape of its output for a batch of one.
    """

    name: str
    positions: int
    inputs: int
    output: tuple[int, ...]

    @property
    def width(self) -> int:
        """The number of values in the two factors of one sample's gradient: inputs and output gradients."""
        return self.positions * (self.inputs + self.output[-1])

    @property
    def pays(self) -> bool:
        """Whether products of the factors take less work than products of gradients. Then they take less memory too."""
        return self.positions * self.width <= self.inputs * self.output[-1]


class Watch(TorchFunctionMode):
    """A context that sees what a forward pass does with ``leaves``.

    ``uses`` has one entry for each function that took a leaf: the linear layer, or None if the function is none. The
    output of a layer that has a probe in ``probes`` gets the probe added, and its input is kept in ``inputs``.
    """

    def __init__(self, leaves: Tree, probes: Tree | None = None) -> None:
        super().__init__()
        self.uses: dict[str, list[LinearLayer | None]] = {}
        self.inputs: dict[str, Tensor] = {}
        self._probes = probes or {}
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        self._transposed: dict[int, tuple[str, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _TRANSPOSES and args and id(args[0]) in self._names:
            self._transposed[id(out)] = self._names[id(args[0])], out  # kept alive, so that no other tensor has its id
            return out
        taken = [name for tensor in _tensors([*args, *(kwargs or {}).values()]) if (name := self._name(tensor))]
        layer = self._layer(func, args, out)
        for name in taken:
            alone = layer is not None and name == layer.name and taken.count(name) == 1
            self.uses.setdefault(name, []).append(layer if alone else None)
        if layer is None or layer.name not in self._probes:
            return out
        self.inputs[layer.name] = args[0]
        return out + self._probes[layer.name]

    def _name(self, tensor: Tensor) -> str | None:
        if id(tensor) in self._transposed:
            return self._transposed[id(tensor)][0]
        return self._names.get(id(tensor))

    def _layer(self, func: Any, args: Sequence[Any], out: Tensor) -> LinearLayer | None:
        """The linear layer, if the call is ``x Wᵀ`` for a leaf W, with or without a bias; else None."""
        if len(args) < 2:
            return None
        if func is functional.linear and id(args[1]) in self._names:
            name = self._names[id(args[1])]
        elif func in _PRODUCTS and id(args[1]) in self._transposed:
            name = self._transposed[id(args[1])][0]
        else:
            return None
        width = args[0].shape[-1]
        return LinearLayer(name, args[0].numel() // width, width, tuple(out.shape))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """All tensors among the values, also those in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
