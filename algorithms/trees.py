"""Trees and forests of tensors: arithmetic, conversion to and from numpy arrays, wire names, and the model's digest."""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.interface import Forest, Tree
from fedemu.protocol.ids import Digest

Array = NDArray[Any]

ALIGNMENT = 64
"""An array that does not begin at a multiple of this number of bytes is copied: kernels may round differently there."""
SUM_UNIT: Final = 2.0**20
"""Sums over samples travel in this unit, so that a device of many samples stays below the largest norm of a reply
(``limits.max_norm``). As a power of two it rounds nothing."""


def to_arrays(tree: Tree) -> dict[str, Array]:
    """The leaves as C-ordered arrays in host memory. A leaf that is already like this is not copied.

    numpy has no bfloat16; such a leaf becomes the uint16 array of its bits.
    """
    return {name: _to_array(leaf) for name, leaf in tree.items()}


def declared_dtypes(tree: Tree) -> dict[str, str]:
    """The dtypes by name that the arrays of ``to_arrays`` do not show, as the wire wants them declared: bfloat16."""
    return {name: "bfloat16" for name, leaf in tree.items() if leaf.dtype == torch.bfloat16}


def from_arrays(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    """The arrays as tensors over the same memory. An array is copied if its alignment or its byte order does not fit.

    The inverse of ``to_arrays``: a uint16 array becomes the bfloat16 leaf of its bits. The memory may be read-only, so
    code may only write to tensors that it made itself.
    """
    return {name: _from_array(array) for name, array in arrays.items()}


def flatten(forest: Forest) -> dict[str, Tensor]:
    """The leaves of a forest by wire name, ``key/leaf``."""
    return {f"{key}/{name}": leaf for key, tree in forest.items() for name, leaf in tree.items()}


def unflatten(leaves: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The inverse of ``flatten``. A key ends at the first slash."""
    forest: dict[str, dict[str, Tensor]] = {}
    for wire_name, leaf in leaves.items():
        key, _, name = wire_name.partition("/")
        forest.setdefault(key, {})[name] = leaf
    return forest


def model_digest(variables: Tree) -> Digest:
    """SHA-256 over the variables in order of their names: name, dtype and shape as a line of JSON, then the raw bytes.

    The bytes are little-endian and in C order, so the digest does not depend on the machine or on memory layout.
    """
    digest = hashlib.sha256()
    for name in sorted(variables):
        tensor = variables[name].detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(json.dumps([name, dtype, list(tensor.shape)], separators=(",", ":")).encode() + b"\n")
        if dtype == "bfloat16":  # numpy has no bfloat16, but the digest only needs the bits.
            tensor = tensor.view(torch.int16)
        values = tensor.numpy()
        digest.update(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
    return Digest(digest.hexdigest())


def map_leaves(function: Callable[..., Tensor], tree: Tree, *others: Tree) -> dict[str, Tensor]:
    """``function`` of the leaves that have the same name in all trees, for each name of the first tree."""
    return {name: function(leaf, *(other[name] for other in others)) for name, leaf in tree.items()}


def views(tree: Tree) -> dict[str, Tensor]:
    """The leaves as other tensors in the same memory. What gives these other memory leaves the tree as it is."""
    return map_leaves(lambda leaf: leaf.view_as(leaf), tree)


def zeros_like(tree: Tree) -> dict[str, Tensor]:
    """Zeros with the shapes and dtypes of the tree's leaves."""
    return map_leaves(torch.zeros_like, tree)


def add(left: Tree, right: Tree) -> dict[str, Tensor]:
    """``left + right``, leaf by leaf, which undoes ``subtract``. Of bool leaves ``right`` says which values change."""
    return map_leaves(lambda a, b: a ^ b if a.dtype == torch.bool else a + b, left, right)


def subtract(left: Tree, right: Tree) -> dict[str, Tensor]:
    """``left - right``, leaf by leaf. For bool leaves the result is whether they differ."""
    return map_leaves(lambda a, b: a ^ b if a.dtype == torch.bool else a - b, left, right)


def scale(tree: Tree, factor: float | Tensor) -> dict[str, Tensor]:
    """Every leaf multiplied by the factor."""
    return map_leaves(lambda leaf: leaf * factor, tree)


def widened(tree: Tree) -> dict[str, Tensor]:
    """The leaves, those of half precision as float32: a sum of many numbers would lose most of them otherwise."""
    return map_leaves(lambda leaf: leaf.float() if leaf.dtype in (torch.float16, torch.bfloat16) else leaf, tree)


def squared_norm(tree: Tree) -> Tensor:
    """The sum of squares over all leaves, zero-dimensional. Those of half precision are added as float32."""
    squares = [leaf.square().sum() for leaf in widened(tree).values()]
    return functools.reduce(torch.add, squares) if squares else torch.zeros(())


def variables_of(tree: Tree) -> dict[str, Tensor]:
    """The leaves as new variables by which a loss can be differentiated, over the same memory."""
    return map_leaves(lambda leaf: leaf.detach().requires_grad_(), tree)


def gradients_of(loss: Tensor, variables: Tree) -> dict[str, Tensor]:
    """The gradients of a loss by these variables. One that the loss does not depend on has the gradient 0.

    ``torch.func.grad`` would import a compiler at its first call: a second in each process of a server job.
    """
    found = torch.autograd.grad(loss, list(variables.values()), materialize_grads=True)
    return dict(zip(variables, found, strict=True))


def only(tree: Tree, names: frozenset[str]) -> dict[str, Tensor]:
    """The leaves of these names, in the tree's order."""
    return {name: leaf for name, leaf in tree.items() if name in names}


def without(tree: Tree, names: frozenset[str]) -> dict[str, Tensor]:
    """The leaves of all other names, in the tree's order."""
    return {name: leaf for name, leaf in tree.items() if name not in names}


def _to_array(leaf: Tensor) -> Array:
    leaf = leaf.detach().cpu()
    if leaf.dtype == torch.bfloat16:
        leaf = leaf.contiguous().view(torch.uint16)
    return leaf.contiguous().numpy()


def _from_array(array: Array) -> Tensor:
    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
    leaf = torch.from_numpy(native)
    if leaf.dtype == torch.uint16:
        leaf = leaf.view(torch.bfloat16)
    return leaf.clone() if native.ctypes.data % ALIGNMENT else leaf


def _silence_the_warning_about_read_only_arrays() -> None:
    """Let torch give this warning here, where it is ignored. It comes once per process. Blobs are read-only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(np.frombuffer(b"\0", np.uint8))


_silence_the_warning_about_read_only_arrays()
