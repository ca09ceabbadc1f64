"""Recording: a function runs once, and what it does is noted as operations on values.

A tensor lives as long as the function itself needs it, and not until the recording ends. So a recording takes no more
memory than the function. All that a step has made, with all the gradients of a stack, would be several times as much.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, Final

from torch import Tensor

from fedemu.device.compute.tapes.private_torch import (
    MemoryReference,
    WeakTensorKeyDictionary,
    operator_name,
    reference_to_memory,
)
from fedemu.device.compute.tapes.tape import Operation, Value, mapped

CONSTANT_BYTES: Final = 64 * 1024
"""The size up to which a constant result is kept. A larger one is made anew at each call."""


class Recording:
    """What a function of the tensors ``inputs`` does. ``note`` is to be called after each of its operations."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.operations: list[Operation] = []
        self._values: MutableMapping[Tensor, Value] = WeakTensorKeyDictionary()
        self._memories: dict[int, MemoryReference] = {}
        """What has been seen, with references by which the numbers stay theirs when the memories are gone."""
        self._varying: set[int] = set()
        """The ids of the values that depend on the inputs."""
        self.inputs = [self.made(tensor) for tensor in inputs]

    def note(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note an operation that was done."""
        inputs: list[Value] = []
        outputs: list[Value] = []
        results: list[Tensor] = []

        def taken(tensor: Tensor) -> Value:
            inputs.append(self.value(tensor))
            return inputs[-1]

        def given(tensor: Tensor) -> Value:
            outputs.append(self.made(tensor, varies))
            return outputs[-1]

        args, kwargs = mapped(Tensor, taken, (args, kwargs))
        mapped(Tensor, results.append, result)
        varies = self._varies(operator, inputs, results)
        result = mapped(Tensor, given, result)
        self.operations.append(Operation(operator, args, kwargs, result, inputs, outputs))

    def value(self, tensor: Tensor) -> Value:
        """The value of a tensor. One that was not seen before comes from outside."""
        found = self._values.get(tensor)
        return self._new(tensor, held=True) if found is None else found

    def made(self, tensor: Tensor, varies: bool = True) -> Value:
        """The value of an input or a result, which may be a tensor that was seen before."""
        found = self._values.get(tensor)
        if found is None:
            found = self._new(tensor, held=not varies)
        if varies:
            self._varying.add(id(found))
        return found

    def _new(self, tensor: Tensor, held: bool) -> Value:
        memory = reference_to_memory(tensor)
        self._memories.setdefault(memory.cdata, memory)
        value = self._values[tensor] = Value.of(tensor, memory.cdata, held)
        return value

    def _varies(self, operator: Any, inputs: Sequence[Value], results: Sequence[Tensor]) -> bool:
        """Whether the results depend on the values of the inputs, or are too large to be kept."""
        if operator_name(operator) not in _SHAPE_ONLY and any(id(value) in self._varying for value in inputs):
            return True
        return sum(tensor.untyped_storage().nbytes() for tensor in results) > CONSTANT_BYTES


_SHAPE_ONLY = {
    "aten::ones_like",
    "aten::zeros_like",
    "aten::full_like",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
}
"""Operators whose result depends on the shape of their argument, and not on its values."""
