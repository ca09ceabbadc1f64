"""Payloads as tensors, for methods. Only processes that compute with torch import this."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from fedemu.algorithms.interface import Tree
from fedemu.coordinator.asks.payload import Payload
from fedemu.coordinator.sums.leaf import Leaf


def as_tensor(array: NDArray[Any], leaf: Leaf) -> torch.Tensor:
    """A tensor of the leaf's dtype with the array's bits, in memory of its own."""
    tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))
    return tensor.view(torch.bfloat16) if leaf.dtype == "bfloat16" else tensor


class Subtree:
    """One device's tensors under one payload key (``interface.Handle``), valid also after the payload's ``discard``."""

    def __init__(self, payload: Payload, key: str) -> None:
        self.device = payload.device
        prefix = f"{key}/"
        self._parts = {
            name.removeprefix(prefix): (array, payload.leaves[name])
            for name, array in payload.load().items()
            if name.startswith(prefix)
        }

    def load(self) -> Tree:
        """The tensors by leaf name, each in memory of its own."""
        return {name: as_tensor(array, leaf) for name, (array, leaf) in self._parts.items()}
