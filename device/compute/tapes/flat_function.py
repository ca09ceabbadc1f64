"""A tape as one Python function of flat lists of tensors, which runs the recorded operations and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, lru_cache
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor

from fedemu.algorithms.layouts import Layout
from fedemu.device.compute.tapes.alike import alike
from fedemu.device.compute.tapes.private_torch import (
    LOG_SOFTMAX,
    changes_memory,
    has_product,
    operator_name,
    product,
)
from fedemu.device.compute.tapes.products import ALIGNED_BYTES
from fedemu.device.compute.tapes.tape import Operation, Value, mapped, parts, values
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
    tape: Sequence[Operation], outputs: Sequence[Value], free: Sequence[Value]
) -> dict[int, Callable[..., Any]]:
    """The operations that may write over their first argument: by position in the tape, with the method that does it.

    No later operation and no output reads the memory of such an argument. The memory belongs to a ``free`` input, or to
    a value that the tape made.
    """
    if any(changes_memory(operation.function) for operation in tape):
        return {}
    writable = {value.memory for value in free}
    last_read: dict[int, int] = {value.memory: len(tape) for value in outputs}
    for i, operation in reversed(list(enumerate(tape))):
        for value in operation.inputs:
            last_read.setdefault(value.memory, i)
    chosen = {}
    for i, operation in enumerate(tape):
        writer = _WRITERS.get(operator_name(operation.function))
        first = operation.args[0] if operation.args else None
        if (
            writer is not None
            and isinstance(first, Value)
            and first.memory in writable
            and last_read[first.memory] == i
            and sum(value.memory == first.memory for value in operation.inputs) == 1
            and _written_alike(first, operation.result)
        ):
            chosen[i] = writer
        # A view has the memory of its input, and that input may belong to the caller.
        made = {value.memory for value in operation.outputs}
        writable |= made - {value.memory for value in operation.inputs}
    return chosen


def _written_alike(first: Value, result: Value) -> bool:
    """Whether the result has the places in memory that the argument has."""
    one, other = first.layout, result.layout
    return (one.shape, one.strides, one.dtype) == (other.shape, other.strides, other.dtype)


def emit(
    tape: Sequence[Operation],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    writers: Mapping[int, Callable[..., Any]],
    slots: int = 0,
) -> Flat:
    """The tape as one Python function of the inputs. It drops each result after the last use.

    ``writers`` replaces operations by methods that write over their first argument; see ``in_place``. In a
    stack of so many ``slots`` each slot has the same bits for the same numbers; see ``alike.py``.
    """
    names: dict[int, str] = {id(value): f"a{i}" for i, value in enumerate(inputs)}
    scope: dict[str, Any] = {}

    def constant(value: Any) -> str:
        name = f"c{len(scope)}"
        scope[name] = value
        return name

    def written(value: Any) -> str:
        if isinstance(value, Value):
            if id(value) not in names:
                assert value.held is not None
                names[id(value)] = constant(value.held)
            return names[id(value)]
        if value is None or isinstance(value, bool):
            return repr(value)
        if isinstance(value, list | tuple) and values(value):
            return f"[{', '.join(written(element) for element in value)}]"
        return constant(value)

    loose = {value.memory for value in inputs if not _fills_lines(value.layout)}
    last_use = {id(value): i for i, operation in enumerate(tape) for value in operation.inputs}
    ends = {id(value) for value in outputs}
    lines = []
    for i, operation in enumerate(tape):
        arguments = [written(argument) for argument in operation.args]
        arguments += [f"{name}={written(argument)}" for name, argument in operation.kwargs.items()]
        call = f"{constant(writers.get(i) or _callable(operation, slots, loose))}({', '.join(arguments)})"
        targets = []
        for j, leaf in enumerate(parts(operation.result)):
            target = f"t{i}_{j}"
            if isinstance(leaf, Value):
                # An in-place operation returns its first argument, which keeps its name.
                names.setdefault(id(leaf), target)
            targets.append(target)
        lines.append(f"{', '.join(targets)}{',' if isinstance(operation.result, list | tuple) else ''} = {call}")
        gone = [v for v in operation.inputs if last_use[id(v)] == i and id(v) not in ends and names[id(v)][0] != "c"]
        gone += [v for v in operation.outputs if id(v) not in last_use and id(v) not in ends]
        if gone:
            lines.append(" = ".join(sorted({names[id(value)] for value in gone})) + " = None")
    lines.append(f"return ({''.join(written(value) + ', ' for value in outputs)})")
    body = "\n    ".join(lines)
    source = f"def run({', '.join(f'a{i}' for i in range(len(inputs)))}):\n    {body}"
    exec(_compiled(source), scope)
    run: Flat = scope["run"]
    return run


@lru_cache(maxsize=64)
def _compiled(source: str) -> CodeType:
    """Compiling is a fifth of a recording. The same steps of other sizes have the same source."""
    return compile(source, "<traced program>", "exec")


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


def _callable(operation: Operation, slots: int, loose: Collection[int]) -> Callable[..., Any]:
    """What computes an operation. Values in the memories ``loose`` may begin anywhere."""
    ordinary = _ordinary(operation)
    if not slots or not operation.outputs:
        return ordinary
    plain = operation.args, operation.kwargs, parts(operation.result)
    args, kwargs, results = mapped(Value, lambda value: value.layout, plain)
    begins = [_begin(value, loose) for value in operation.inputs[:2]]
    device = operation.outputs[0].device
    return alike(operation.function, ordinary, args, kwargs, results, device, slots, begins) or ordinary


def _begin(value: Value, loose: Collection[int]) -> int | None:
    """How many elements behind a multiple of 64 bytes a tensor begins; None if it may begin anywhere.

    What torch has made begins at such a multiple.
    """
    if value.memory in loose or value.held is not None:
        return None
    return value.offset % (ALIGNED_BYTES // value.layout.dtype.itemsize)


def _fills_lines(layout: Layout) -> bool:
    """Whether a tensor takes a multiple of 64 bytes. An input may be one of many that lie behind each other."""
    return layout.shape.numel() * layout.dtype.itemsize % ALIGNED_BYTES == 0


def _ordinary(operation: Operation) -> Callable[..., Any]:
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
    rows, columns = result.layout.shape
    work = 2 * operation.args[0].layout.shape[1] * rows * columns
    usual = result.layout.strides == (columns, 1)
    return bool(result.layout.dtype == torch.float32 and usual and work >= LARGE_PRODUCT)


@cache
def maker() -> str:
    """The maker of this machine's processor, such as ``GenuineIntel``. Empty where the kernel does not tell it."""
    return processor().get("vendor_id", "")
