"""The trace of a pure function of tensors: the plain sequence of operations that it does.

``torch.func`` interprets a function anew at each call. For a small model that takes ten times as long as the
arithmetic. Here the interpretation happens once per set of input layouts; afterwards only the recorded operations run.
They are the same operations, so the results are the same to the bit. Only large products of matrices on a CPU are
computed by a faster library (``flat_function.py``), which rounds in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedemu.algorithms.layouts import address, laid_out
from fedemu.algorithms.training.compiler import without_compiler
from fedemu.device.compute.tapes.alike import all_alike
from fedemu.device.compute.tapes.flat_function import Flat, emit, in_place
from fedemu.device.compute.tapes.private_torch import (
    OperationWatcher,
    operator_name,
    written_arguments,
)
from fedemu.device.compute.tapes.recording import Recording
from fedemu.device.compute.tapes.tape import Operation, Value, parts, simplify, values
from fedemu.protocol.errors import TrainingError


class Untraceable(Exception):
    """The function cannot be recorded, because it reads values or changes its inputs."""


def trace(function: Flat, inputs: Sequence[Tensor], spent: int = 0, apart: int | None = None, slots: int = 0) -> Flat:
    """A function that does the operations of ``function``, for inputs of exactly these shapes, dtypes and layouts.

    The last ``spent`` inputs belong to the function: it may write over them. So they must not overlap with other
    tensors. The first ``apart`` outputs (``spent`` if it is None) do not either, so that they can be the inputs of the
    next call. In a stack of so many ``slots`` each slot has the same bits for the same numbers (``alike.py``). Raises
    Untraceable if the function reads values or writes to an input, and TrainingError if it draws random numbers.
    """
    with torch.inference_mode(False), torch.no_grad():
        inputs = _distinct(differentiable(inputs))
        recording = Recording(inputs)
        with without_compiler(), all_alike(slots), OperationWatcher(recording.note):
            results = list(function(*inputs))
    outputs = [recording.value(tensor) for tensor in results]
    _check(recording.operations, recording.inputs, outputs)
    tape, outputs = simplify(recording.operations, outputs)
    free = recording.inputs[len(inputs) - spent :]
    tape, outputs = _apart(recording, tape, outputs, free, spent if apart is None else apart)
    return emit(tape, recording.inputs, outputs, in_place(tape, outputs, free), slots)


def _apart(
    recording: Recording, tape: Sequence[Operation], outputs: Sequence[Value], free: Sequence[Value], count: int
) -> tuple[list[Operation], list[Value]]:
    """The tape and its outputs, of which the first ``count`` have memory of their own.

    What lies in that of an input that is not free, of a constant, of a tensor from outside or of another output is
    copied at the end of the tape.
    """
    tape, outputs = [*tape], [*outputs]
    made = _made(tape) | {value.memory for value in free}
    taken = {value.memory for value in outputs[count:]}
    for i, output in enumerate(outputs[:count]):
        if output.memory not in made - taken:
            outputs[i] = recording.made(output.layout.blank().clone())
            tape.append(Operation.of(torch.ops.aten.clone.default, (output,), {}, outputs[i]))
        taken.add(outputs[i].memory)
    return tape, outputs


def _made(tape: Sequence[Operation]) -> set[int]:
    """The memories that operations made. A view lies in that of its argument, which may be one from outside."""
    made: set[int] = set()
    for operation in tape:
        made |= {value.memory for value in operation.outputs} - {value.memory for value in operation.inputs}
    return made


def differentiable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, of which inference tensors are copied, because these cannot take part in a gradient."""
    return [laid_out(tensor, tensor.stride()) if tensor.is_inference() else tensor for tensor in tensors]


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, of which those that share memory are copied: the tensors of the next call may share none."""
    seen: set[int] = set()
    distinct = []
    for tensor in tensors:
        distinct.append(laid_out(tensor, tensor.stride()) if address(tensor) in seen else tensor)
        seen.add(address(distinct[-1]))
    return distinct


def _check(tape: Sequence[Operation], inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
    """Raise Untraceable unless the tape can be run again, and TrainingError if it draws random numbers.

    A tape that can be run again reads no values, writes only to tensors that it made, and uses and returns only the
    inputs, tensors that it made, and tensors from outside.
    """
    # First of all: a function that cannot be recorded runs as it is, and nothing would seed what it draws.
    for operation in tape:
        if _draws(operation.function):
            raise TrainingError(
                f"it draws random numbers by {operator_name(operation.function)}, which can't be repeated; "
                "draw by torch.rand, torch.randn, torch.bernoulli or dropout instead"
            )
    own = _made(tape)
    seen = {id(value) for value in inputs}

    def unseen(values: Sequence[Value]) -> bool:
        return any(id(value) not in seen and value.memory in own for value in values)

    for operation in tape:
        if _reads_values(operation):
            raise Untraceable(f"{operation.function} reads values")
        for argument in written_arguments(operation.function, operation.args):
            if not (isinstance(argument, Value) and argument.memory in own):
                raise Untraceable(f"{operation.function} writes to what the program did not make")
        if unseen(operation.inputs):
            raise Untraceable(f"{operation.function} takes a tensor whose making was not seen")
        if any(isinstance(leaf, list | tuple) for leaf in parts(operation.result)):
            raise Untraceable(f"{operation.function} returns nested results")
        seen.update(id(value) for value in operation.outputs)
    if unseen(outputs):
        raise Untraceable("it returns a tensor whose making was not seen")


def _reads_values(operation: Operation) -> bool:
    """Whether the operation, or the shape of its result, depends on the values of tensors."""
    if operator_name(operation.function) == "aten::index":
        # Numbers choose as many elements as there are numbers. Truth values choose as many as are true.
        _, index, *_ = operation.args
        return any(value.layout.dtype in (torch.bool, torch.uint8) for value in values(index))
    return _depends_on_values(operation.function)


@cache
def _draws(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


@cache
def _depends_on_values(operator: Any) -> bool:
    return torch.Tag.data_dependent_output in operator.tags or torch.Tag.dynamic_output_shape in operator.tags
