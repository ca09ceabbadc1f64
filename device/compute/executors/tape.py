"""A tape: a recorded sequence of operations, and the choice of those that each call has to do again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from fedemu.device.compute.executors.private_torch import (
    changes_memory,
    operator_name,
    tree_flatten,
    tree_leaves,
    tree_map_only,
)


@dataclass(frozen=True)
class Operation:
    """A call of the operator ``function`` on plain tensors, with its result.

    All tensors of a tape stay alive while it is worked on, so their memory tells them apart.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @cached_property
    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @cached_property
    def outputs(self) -> list[Tensor]:
        """The tensors of the result."""
        return [leaf for leaf in tree_leaves(self.result) if isinstance(leaf, Tensor)]


def memory(tensor: Tensor) -> int:
    """A number that names the memory of a tensor. Tensors that may overlap have the same number."""
    return tensor.untyped_storage().data_ptr() or -id(tensor)


def parts(result: Any) -> Sequence[Any]:
    """The results of an operation as a sequence, even if there is only one."""
    return result if isinstance(result, list | tuple) else [result]


CONSTANT_BYTES = 64 * 1024
"""The size up to which a constant result is kept. A larger one is made anew at each call."""


def simplify(
    tape: Sequence[Operation], inputs: Sequence[Tensor], outputs: list[Tensor]
) -> tuple[list[Operation], list[Tensor]]:
    """The operations that each call has to do, and the outputs in terms of what these operations make.

    It leaves out views that exist already, operations that were done before, constants, and unused results. It does not
    change a tape with an operation that writes to memory.
    """
    if any(changes_memory(operation.function) for operation in tape):
        return list(tape), outputs
    same: dict[int, Tensor] = {}
    views: dict[Hashable, Tensor] = {}
    done: dict[Hashable, Operation] = {}
    varying = {id(tensor) for tensor in inputs}
    kept: list[Operation] = []

    def original(tensor: Tensor) -> Tensor:
        return same.get(id(tensor), tensor)

    for recorded in tape:
        args, kwargs = tree_map_only(Tensor, original, (recorded.args, recorded.kwargs))
        operation = Operation(recorded.function, args, kwargs, recorded.result)
        for tensor in operation.inputs:
            views.setdefault(geometry(tensor), tensor)
        if all(geometry(tensor) in views for tensor in operation.outputs):
            same.update((id(tensor), views[geometry(tensor)]) for tensor in operation.outputs)
            continue
        earlier = done.setdefault(_identity(operation), operation)
        if earlier is not operation:
            same.update((id(mine), theirs) for mine, theirs in zip(operation.outputs, earlier.outputs, strict=True))
            continue
        for tensor in operation.outputs:
            views.setdefault(geometry(tensor), tensor)
        if _is_constant(operation, varying):
            continue
        varying.update(id(tensor) for tensor in operation.outputs)
        kept.append(operation)
    outputs = [original(tensor) for tensor in outputs]
    return _used(kept, outputs), outputs


def _is_constant(operation: Operation, varying: Set[int]) -> bool:
    """Whether the results are the same for all values of the inputs, and small enough to be kept."""
    if sum(tensor.untyped_storage().nbytes() for tensor in operation.outputs) > CONSTANT_BYTES:
        return False
    if operator_name(operation.function) in _SHAPE_ONLY:
        return True
    return not any(id(tensor) in varying for tensor in operation.inputs)


_SHAPE_ONLY = {
    "aten::ones_like",
    "aten::zeros_like",
    "aten::full_like",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
}
"""Operators whose result depends on the shape of their argument, and not on its values."""


def _used(tape: Sequence[Operation], outputs: Sequence[Tensor]) -> list[Operation]:
    """The operations that the outputs depend on."""
    wanted = {id(tensor) for tensor in outputs}
    used: list[Operation] = []
    for operation in reversed(tape):
        if any(id(tensor) in wanted for tensor in operation.outputs):
            used.append(operation)
            wanted.update(id(tensor) for tensor in operation.inputs)
    return used[::-1]


def geometry(tensor: Tensor) -> tuple[Hashable, ...]:
    """The place, the bits, shape, strides and dtype of a tensor.

    The bits say whether values are to be read as conjugates, or as negatives: some views differ in nothing else. Two
    tensors with the same geometry have the same values, as long as both are alive and nothing writes to them.
    """
    place = (memory(tensor), tensor.storage_offset()) if tensor.numel() else (id(tensor),)
    return (*place, tensor.is_conj(), tensor.is_neg(), tensor.shape, tensor.stride(), tensor.dtype)


def _identity(operation: Operation) -> Hashable:
    """The operator and its arguments. Two operations with the same identity have the same results."""
    leaves, structure = tree_flatten((operation.args, operation.kwargs))
    parts = [(Tensor, id(leaf)) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf)) for leaf in leaves]
    return (operation.function, repr(structure), *parts)
