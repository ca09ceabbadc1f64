"""A recorded sequence of operations: what of it each call has to do again, and the Python function that does it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedemu.device.compute.executors.private_torch import (
    LOG_SOFTMAX,
    changes_memory,
    operator_name,
    tree_flatten,
    tree_leaves,
    tree_map_only,
)

Flat = Callable[..., Sequence[Tensor]]
"""A function of tensors alone that returns tensors alone."""


@dataclass(frozen=True)
class Operation:
    """A call of an operator on plain tensors. All tensors of a tape stay alive, so their memory tells them apart."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @cached_property
    def inputs(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @cached_property
    def outputs(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(self.result) if isinstance(leaf, Tensor)]


def memory(tensor: Tensor) -> int:
    """What tensors that may overlap have in common."""
    return tensor.untyped_storage().data_ptr() or -id(tensor)


def parts(result: Any) -> Sequence[Any]:
    return result if isinstance(result, list | tuple) else [result]


CONSTANT_BYTES = 64 * 1024
"""A constant result up to this size is kept instead of made anew at each call."""


def simplify(
    tape: Sequence[Operation], inputs: Sequence[Tensor], outputs: list[Tensor]
) -> tuple[list[Operation], list[Tensor]]:
    """Leave out what need not be done again: views that exist, operations done before, constants, unused results.

    Nothing of a tape that writes to memory may be left out.
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
            views.setdefault(_geometry(tensor), tensor)
        if all(_geometry(tensor) in views for tensor in operation.outputs):
            same.update((id(tensor), views[_geometry(tensor)]) for tensor in operation.outputs)
            continue
        earlier = done.setdefault(_identity(operation), operation)
        if earlier is not operation:
            same.update((id(mine), theirs) for mine, theirs in zip(operation.outputs, earlier.outputs, strict=True))
            continue
        for tensor in operation.outputs:
            views.setdefault(_geometry(tensor), tensor)
        if _is_constant(operation, varying):
            continue
        varying.update(id(tensor) for tensor in operation.outputs)
        kept.append(operation)
    outputs = [original(tensor) for tensor in outputs]
    return _used(kept, outputs), outputs


def _is_constant(operation: Operation, varying: Set[int]) -> bool:
    """Whether the results are the same whatever the inputs, and small enough to be kept."""
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


def _used(tape: Sequence[Operation], outputs: Sequence[Tensor]) -> list[Operation]:
    wanted = {id(tensor) for tensor in outputs}
    used: list[Operation] = []
    for operation in reversed(tape):
        if any(id(tensor) in wanted for tensor in operation.outputs):
            used.append(operation)
            wanted.update(id(tensor) for tensor in operation.inputs)
    return used[::-1]


def _geometry(tensor: Tensor) -> tuple[Hashable, ...]:
    """Two tensors of one geometry are the same values, as long as all of them are alive and nobody writes."""
    place = (memory(tensor), tensor.storage_offset()) if tensor.numel() else (id(tensor),)
    return (*place, tensor.shape, tensor.stride(), tensor.dtype)


def _identity(operation: Operation) -> Hashable:
    leaves, structure = tree_flatten((operation.args, operation.kwargs))
    parts = [(Tensor, id(leaf)) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf)) for leaf in leaves]
    return (operation.function, repr(structure), *parts)


_WRITERS: Mapping[str, Callable[..., Any]] = {
    "aten::add": Tensor.add_,
    "aten::sub": Tensor.sub_,
    "aten::mul": Tensor.mul_,
    "aten::div": Tensor.div_,
    "aten::neg": Tensor.neg_,
    "aten::relu": Tensor.relu_,
    "aten::clamp": Tensor.clamp_,
    "aten::addcmul": Tensor.addcmul_,
    "aten::addcdiv": Tensor.addcdiv_,
}
"""The same operations, writing over their first argument."""


def in_place(
    tape: Sequence[Operation], outputs: Sequence[Tensor], free: Sequence[Tensor]
) -> dict[int, Callable[..., Any]]:
    """Which operations may write over their first argument, by position: those after which nobody reads its memory."""
    if any(changes_memory(operation.function) for operation in tape):
        return {}
    writable = {memory(tensor) for tensor in free}
    last_read: dict[int, int] = {memory(tensor): len(tape) for tensor in outputs}
    for i, operation in reversed(list(enumerate(tape))):
        for tensor in operation.inputs:
            last_read.setdefault(memory(tensor), i)
    chosen = {}
    for i, operation in enumerate(tape):
        writer = _WRITERS.get(operator_name(operation.function))
        first = operation.args[0] if operation.args else None
        if (
            writer is not None
            and isinstance(first, Tensor)
            and memory(first) in writable
            and last_read[memory(first)] == i
            and sum(memory(tensor) == memory(first) for tensor in operation.inputs) == 1
            and _geometry(first)[-3:] == _geometry(operation.result)[-3:]
        ):
            chosen[i] = writer
        # A view's memory is that of its input, which may not be ours to write to.
        made = {memory(tensor) for tensor in operation.outputs}
        writable |= made - {memory(tensor) for tensor in operation.inputs}
    return chosen


def emit(
    tape: Sequence[Operation],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    writers: Mapping[int, Callable[..., Any]],
) -> Flat:
    """Write the tape as one Python function; a result is let go of after its last use."""
    names: dict[int, str] = {id(tensor): f"a{i}" for i, tensor in enumerate(inputs)}
    scope: dict[str, Any] = {}

    def constant(value: Any) -> str:
        name = f"c{len(scope)}"
        scope[name] = value
        return name

    def written(value: Any) -> str:
        if isinstance(value, Tensor):
            if id(value) not in names:
                names[id(value)] = constant(value)
            return names[id(value)]
        if value is None or isinstance(value, bool | int):
            return repr(value)
        if isinstance(value, list | tuple) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            return f"[{', '.join(written(element) for element in value)}]"
        return constant(value)

    last_use = {id(tensor): i for i, operation in enumerate(tape) for tensor in operation.inputs}
    ends = {id(tensor) for tensor in outputs}
    lines = []
    for i, operation in enumerate(tape):
        arguments = [written(argument) for argument in operation.args]
        arguments += [f"{name}={written(argument)}" for name, argument in operation.kwargs.items()]
        call = f"{constant(writers.get(i) or _callable(operation.function))}({', '.join(arguments)})"
        targets = []
        for j, leaf in enumerate(parts(operation.result)):
            target = f"t{i}_{j}"
            if isinstance(leaf, Tensor):
                # An in-place operation returns what it was given, whose name stays.
                names.setdefault(id(leaf), target)
            targets.append(target)
        lines.append(f"{', '.join(targets)}{',' if isinstance(operation.result, list | tuple) else ''} = {call}")
        gone = [t for t in operation.inputs if last_use[id(t)] == i and id(t) not in ends and names[id(t)][0] != "c"]
        gone += [t for t in operation.outputs if id(t) not in last_use and id(t) not in ends]
        if gone:
            lines.append(" = ".join(sorted({names[id(tensor)] for tensor in gone})) + " = None")
    lines.append(f"return ({''.join(written(tensor) + ', ' for tensor in outputs)})")
    body = "\n    ".join(lines)
    source = f"def run({', '.join(f'a{i}' for i in range(len(inputs)))}):\n    {body}"
    exec(compile(source, "<traced program>", "exec"), scope)
    run: Flat = scope["run"]
    return run


_BINDINGS: Mapping[str, Callable[..., Any]] = {
    "aten::view": Tensor.view,
    "aten::expand": Tensor.expand,
    "aten::bmm": torch.bmm,
    "aten::mm": torch.mm,
    "aten::add": torch.add,
    "aten::sub": torch.sub,
    "aten::mul": torch.mul,
    "aten::div": torch.div,
    "aten::neg": torch.neg,
    "aten::exp": torch.exp,
    "aten::log": torch.log,
    "aten::eq": torch.eq,
    "aten::where": torch.where,
    "aten::gather": torch.gather,
    "aten::sum": torch.sum,
    "aten::mean": torch.mean,
    "aten::transpose": torch.transpose,
    "aten::permute": torch.permute,
    "aten::unsqueeze": torch.unsqueeze,
    "aten::select": torch.select,
    "aten::relu": torch.relu,
    "aten::clamp": torch.clamp,
    "aten::addcmul": torch.addcmul,
    **LOG_SOFTMAX,
}
"""Operations whose Python binding takes the arguments of their schema; it is called in half the time."""


def _callable(function: Any) -> Callable[..., Any]:
    binding = _BINDINGS.get(operator_name(function))
    return function if binding is None else binding
