"""The tensors that methods send and get. Only processes that compute with torch import this."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from numpy.typing import NDArray

from fedemu.algorithms.interface import Ask, Forest, LocalProgram, Query, Tree
from fedemu.coordinator.asks.payload import Payload
from fedemu.coordinator.sums.leaf import Leaf
from fedemu.protocol.code.own_code import own_frames
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.tensors import DTYPES
from fedemu.protocol.wording import an_object


def require_tensors(ask: Ask) -> None:
    """Raise ConfigurationError if something in ``shared`` or ``each`` is no tensor that can travel by its name."""
    trees = {f"shared[{key!r}]": tree for key, tree in ask.shared.items()}
    trees |= {f"each[{device}]": tree for device, tree in (ask.each or {}).items()}
    for place, tree in trees.items():
        for name, leaf in tree.items():
            wrong = _unfit(leaf) if isinstance(name, str) else f"named by {an_object(name)}; a name must be text"
            if wrong is not None:
                raise ConfigurationError(
                    f"the algorithm asks for the program {ask.program!r}, and {place}[{name!r}] of this Ask is {wrong}"
                )


def told_payload(name: str, program: LocalProgram | Query, shared: Forest) -> Forest:
    """The payload that the program ``name`` tells of. Raises ConfigurationError if no reply could be like it."""
    try:
        told: object = program.payload(shared)
    except KeyError as error:
        if not error.args or error.args[0] in shared or own_frames(error):
            raise
        raise lacks_tree(name, error.args[0], shared) from error
    what = f"payload of the program {name!r}"
    if not isinstance(told, Mapping) or not all(isinstance(tree, Mapping) for tree in told.values()):
        raise ConfigurationError(
            f'{what} returned {an_object(told)}; it must return trees by key, as {{"delta": tree}}'
        )
    for key, tree in told.items():
        for leaf_name, leaf in tree.items():
            if (wrong := _unfit(leaf, of_values=False)) is not None:
                raise ConfigurationError(f"{what} returned {f'{key}/{leaf_name}'!r}, which is {wrong}")
    if not isinstance(program.passes, Real):
        raise ConfigurationError(
            f"passes of the program {name!r} is {an_object(program.passes)}; it must be a number, which may be 0"
        )
    return told


def lacks_tree(name: str, key: object, shared: Forest) -> ConfigurationError:
    """The error of an ask for the program ``name``, which reads a tree that the ask does not share."""
    return ConfigurationError(
        f"the algorithm asks for the program {name!r}, which reads shared[{key!r}], but 'shared' of this Ask has only "
        f"{', '.join(map(repr, shared)) or 'no tree'}"
    )


def _unfit(leaf: object, of_values: bool = True) -> str | None:
    """What is wrong with a leaf, and what to do. None if it can travel. Without ``of_values`` it may have no values."""
    if not isinstance(leaf, torch.Tensor):
        return f"{an_object(leaf)}; it must be a tensor, as torch.as_tensor makes it"
    if leaf.layout is not torch.strided or (of_values and leaf.is_meta):
        return "a tensor that is sparse or has no values; it must be a dense one"
    if (dtype := str(leaf.dtype).removeprefix("torch.")) not in DTYPES:
        return f"a tensor of {dtype}, which cannot travel; use one of {', '.join(DTYPES)}"
    return None


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
