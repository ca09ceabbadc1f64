"""A tape: a recorded sequence of operations, and the choice of those that each call has to do again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Final

import torch
from torch import Tensor

from fedemu.algorithms.layouts import Layout
from fedemu.device.compute.tapes.private_torch import changes_memory


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor of a tape: what has to be known of it when the tensor itself is gone.

    ``memory`` is a number that names its memory: values that may overlap have the same number, and no others.
    ``offset`` says where it begins there, in elements. ``held`` is the tensor, if it comes from outside of the tape or
    is a small constant.
    """

    memory: int
    offset: int
    layout: Layout
    device: torch.device
    held: Tensor | None

    @staticmethod
    def of(tensor: Tensor, memory: int, held: bool) -> Value:
        """The value of a tensor in the memory of that number."""
        offset = int(tensor.storage_offset())
        return Value(memory, offset, Layout.of(tensor), tensor.device, tensor if held else None)

    @property
    def geometry(self) -> Hashable:
        """Two values with the same geometry are the same numbers, as long as nothing writes to them."""
        return (self.memory, self.offset, self.layout) if self.layout.shape.numel() else id(self)


@dataclass(frozen=True, eq=False)
class Operation:
    """A call of the operator ``function``, with its result. Values stand for plain tensors.

    ``inputs`` are the values among the arguments, and ``outputs`` those of the result.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    inputs: Sequence[Value]
    outputs: Sequence[Value]

    @staticmethod
    def of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Operation:
        """The operation with this call and this result."""
        return Operation(function, args, kwargs, result, values((args, kwargs)), values(result))


def values(tree: Any) -> list[Value]:
    """The values among the leaves of ``tree``."""
    found: list[Value] = []
    mapped(Value, found.append, tree)
    return found


_SEQUENCES: Final = (list, tuple)
"""As ``isinstance`` takes them fastest."""
_NUMBERS: Final = frozenset({int, float, bool, str, NoneType})
"""The types of most arguments that are no tensors."""


def mapped(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with ``function(leaf)`` in the place of each leaf of this kind.

    Its nodes are those of operators: lists, tuples and dictionaries. torch's trees have many more, and take five times
    as long, which is a tenth of a recording.
    """
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, _SEQUENCES):
        found = [part if type(part) in _NUMBERS else mapped(kind, function, part) for part in tree]
        return found if isinstance(tree, list) else tuple(found)
    if tree and isinstance(tree, dict):
        return {name: mapped(kind, function, part) for name, part in tree.items()}
    return tree


def parts(result: Any) -> Sequence[Any]:
    """The results of an operation as a sequence, even if there is only one."""
    return result if isinstance(result, list | tuple) else [result]


def simplify(tape: Sequence[Operation], outputs: Sequence[Value]) -> tuple[list[Operation], list[Value]]:
    """The operations that each call has to do, and the outputs in terms of what these operations make.

    It leaves out views that exist already, operations that were done before, constants, and unused results. It does not
    change a tape with an operation that writes to memory.
    """
    if any(changes_memory(operation.function) for operation in tape):
        return list(tape), list(outputs)
    same: dict[int, Value] = {}
    """By id: what stands in the place of a value."""
    memories: dict[int, int] = {}
    """Where what is not done again would have lain, and where it lies."""
    views: dict[Hashable, Value] = {}
    done: dict[Hashable, Operation] = {}
    kept: list[Operation] = []

    def original(value: Value) -> Value:
        return same.get(id(value), value)

    def lying(value: Value) -> Value:
        return replace(value, memory=memories[value.memory]) if value.memory in memories else value

    for recorded in tape:
        operation = recorded
        if any(id(value) in same for value in recorded.inputs) or any(
            value.memory in memories for value in recorded.outputs
        ):
            args, kwargs = mapped(Value, original, (recorded.args, recorded.kwargs))
            operation = Operation.of(recorded.function, args, kwargs, mapped(Value, lying, recorded.result))
        for value in operation.inputs:
            views.setdefault(value.geometry, value)
        if all(value.geometry in views for value in operation.outputs):
            found: Sequence[Value] = [views[value.geometry] for value in operation.outputs]
        else:
            found = done.setdefault(_identity(operation), operation).outputs
        same.update((id(value), its) for value, its in zip(recorded.outputs, found, strict=True) if its is not value)
        if found is not operation.outputs:
            pairs = [(mine.memory, its.memory) for mine, its in zip(operation.outputs, found, strict=True)]
            memories.update((mine, its) for mine, its in pairs if mine != its)
            continue
        for value in operation.outputs:
            views.setdefault(value.geometry, value)
        if any(value.held is None for value in operation.outputs):
            kept.append(operation)
    outputs = [original(value) for value in outputs]
    return _used(kept, outputs), outputs


def _used(tape: Sequence[Operation], outputs: Sequence[Value]) -> list[Operation]:
    """The operations that the outputs depend on."""
    wanted = {id(value) for value in outputs}
    used: list[Operation] = []
    for operation in reversed(tape):
        if any(id(value) in wanted for value in operation.outputs):
            used.append(operation)
            wanted.update(id(value) for value in operation.inputs)
    return used[::-1]


def _identity(operation: Operation) -> Hashable:
    """The operator and its arguments. Two operations with the same identity have the same results."""
    return (operation.function, _named(operation.args), _named(operation.kwargs))


def _named(tree: Any) -> Hashable:
    """A tree that is equal to those with the same values, and with leaves that look alike, in the same places."""
    if isinstance(tree, Value):
        return Value, id(tree)
    if isinstance(tree, tuple | list):
        return (type(tree), *map(_named, tree))
    if isinstance(tree, dict):
        return (dict, *((name, _named(part)) for name, part in tree.items()))
    return type(tree), repr(tree)  # by their signs, as those of 0.0 and -0.0, numbers differ that are equal
