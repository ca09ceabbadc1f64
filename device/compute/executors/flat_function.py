"""A tape as one Python function of flat lists of tensors, which runs the recorded operations and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from fedemu.device.compute.executors.private_torch import (
    LOG_SOFTMAX,
    changes_memory,
    has_product,
    operator_name,
    product,
    tree_leaves,
)
from fedemu.device.compute.executors.tape import Operation, geometry, memory, parts
from fedemu.protocol.host.hardware import processor

Flat = Callable[..., Sequence[Tensor]]
"""A function of tensors alone that returns tensors alone."""

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
"""The methods that do the same as these operators, but write the result over the first argument."""


def in_place(
    tape: Sequence[Operation], outputs: Sequence[Tensor], free: Sequence[Tensor]
) -> dict[int, Callable[..., Any]]:
    """The operations that may write over their first argument: by position in the tape, with the method that does it.

    No later operation and no output reads the memory of such an argument. The memory belongs to a ``free`` input, or to
    a tensor that the tape made.
    """
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
            and geometry(first)[-3:] == geometry(operation.result)[-3:]
        ):
            chosen[i] = writer
        # A view has the memory of its input, and that input may belong to the caller.
        made = {memory(tensor) for tensor in operation.outputs}
        writable |= made - {memory(tensor) for tensor in operation.inputs}
    return chosen


def emit(
    tape: Sequence[Operation],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    writers: Mapping[int, Callable[..., Any]],
) -> Flat:
    """The tape as one Python function of the inputs. It drops each result after the last use.

    ``writers`` replaces operations by methods that write over their first argument; see ``in_place``.
    """
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
        call = f"{constant(writers.get(i) or _callable(operation))}({', '.join(arguments)})"
        targets = []
        for j, leaf in enumerate(parts(operation.result)):
            target = f"t{i}_{j}"
            if isinstance(leaf, Tensor):
                # An in-place operation returns its first argument, which keeps its name.
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
"""Operators with a Python binding that takes the same arguments. A call of the binding takes half the time."""


LARGE_PRODUCT: Final = 4_000_000
"""From so many floating-point operations on, a product of matrices is computed by oneDNN, except on CPUs of Intel.

Measured with one thread on an AMD EPYC (family 26): at 2 million both libraries take as long, at 8 million MKL takes
1.4 to 1.8 times as long, and at 50 million twice as long. On an Intel Xeon with AVX-512 oneDNN takes 0.9 to 2.1 times
as long as MKL from 8 million on, and the most where the left matrix is transposed.
"""


def _callable(operation: Operation) -> Callable[..., Any]:
    if _is_large_product(operation):
        return product
    binding = _BINDINGS.get(operator_name(operation.function))
    return operation.function if binding is None else binding


def _is_large_product(operation: Operation) -> bool:
    """Whether oneDNN computes this operation faster.

    The sizes and the maker of the processor decide, so that a run can be repeated. A fleet has processors of one maker
    (``Compute.processor``).
    """
    result = operation.result
    if operator_name(operation.function) != "aten::mm" or result.device.type != "cpu" or not has_product():
        return False
    if maker() == "GenuineIntel":
        return False
    work = 2 * operation.args[0].shape[1] * result.numel()
    return bool(result.dtype == torch.float32 and result.is_contiguous() and work >= LARGE_PRODUCT)


@cache
def maker() -> str:
    """The maker of this machine's processor, such as ``GenuineIntel``. Empty where the kernel does not tell it."""
    return processor().get("vendor_id", "")
