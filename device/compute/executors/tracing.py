"""Turns a pure function of tensors into the plain sequence of operations that it comes down to.

``torch.func`` interprets a function anew at each call, which for a small model takes ten times as long as its
arithmetic. Here that happens once per set of input layouts; afterwards only the recorded operations run. They are the
same ones, so the results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedemu.device.compute.executors.private_torch import OperationWatcher, without_compiler, written_arguments
from fedemu.device.compute.executors.tape import Flat, Operation, emit, in_place, memory, parts, simplify
from fedemu.protocol.errors import TrainingError


class Untraceable(Exception):
    """The function can't be recorded, because it reads values or changes what it was given."""


def trace(function: Flat, inputs: Sequence[Tensor], spent: int = 0) -> Flat:
    """The operations of ``function`` for inputs of exactly these shapes, dtypes and layouts.

    The last ``spent`` inputs belong to the function: their memory may become that of the first ``spent`` outputs. So
    they must not overlap with other tensors. Raises Untraceable if the function reads values or writes to an input, and
    TrainingError if it draws random numbers.
    """
    with torch.inference_mode(False), torch.no_grad():
        inputs = _distinct(differentiable(inputs))
        recorded: list[Operation] = []
        with without_compiler(), OperationWatcher(lambda *call: recorded.append(Operation(*call))):
            outputs = list(function(*inputs))
    _check(recorded, inputs)
    tape, outputs = simplify(recorded, inputs, outputs)
    given, free = inputs[: len(inputs) - spent], inputs[len(inputs) - spent :]
    made = [memory(tensor) for tensor in outputs[:spent]]
    if len({*made}) < spent or {*made} & {memory(tensor) for tensor in (*given, *outputs[spent:])}:
        free = []  # what comes out as the next carry would overlap with something else
    return emit(tape, inputs, outputs, in_place(tape, outputs, free))


def differentiable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with copies of those made in inference mode, which can't take part in a gradient."""
    return [_copied(tensor) if tensor.is_inference() else tensor for tensor in tensors]


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with copies of those that share memory: the next call may bring different ones in their places."""
    seen: set[int] = set()
    distinct = []
    for tensor in tensors:
        distinct.append(_copied(tensor) if memory(tensor) in seen else tensor)
        seen.add(memory(distinct[-1]))
    return distinct


def _copied(tensor: Tensor) -> Tensor:
    """In the same layout."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _check(tape: Sequence[Operation], inputs: Sequence[Tensor]) -> None:
    """Raise unless the tape can be run again: it reads no values, writes to what it made, and takes what it knows."""
    own = {memory(tensor) for operation in tape for tensor in operation.outputs} - {memory(t) for t in inputs}
    known = {id(tensor) for tensor in inputs}
    for operation in tape:
        tags = operation.function.tags
        if torch.Tag.nondeterministic_seeded in tags:
            raise TrainingError(
                f"the program draws random numbers by {operation.function}; let it declare them as noise instead"
            )
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            raise Untraceable(f"{operation.function} reads values")
        for argument in written_arguments(operation.function, operation.args):
            if not (isinstance(argument, Tensor) and memory(argument) in own):
                raise Untraceable(f"{operation.function} writes to what the program did not make")
        for tensor in operation.inputs:
            if id(tensor) not in known and memory(tensor) in own:
                raise Untraceable(f"{operation.function} takes a tensor whose making was not seen")
        if any(isinstance(leaf, list | tuple) for leaf in parts(operation.result)):
            raise Untraceable(f"{operation.function} returns nested results")
        known.update(id(tensor) for tensor in operation.outputs)
