"""Turns a pure function of tensors into the plain sequence of operations that it comes down to.

``torch.func`` interprets a function anew at each call, which for a small model takes ten times as long as its arithmetic.
Here that happens once per set of input layouts; afterwards only the recorded operations run. They are the same ones,
so the results are the same to the bit.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from fedemu.protocol.errors import TrainingError

Flat = Callable[..., Sequence[Tensor]]
"""A function of tensors alone that returns tensors alone."""


class Untraceable(Exception):
    """The function can't be recorded, because it reads values or changes what it was given."""


def trace(function: Flat, inputs: Sequence[Tensor], spent: int = 0) -> Flat:
    """The operations of ``function`` for inputs of exactly these shapes, dtypes and layouts.

    The last ``spent`` inputs belong to the function: their memory may be used for the first ``spent`` outputs. So they must
    not overlap with other tensors. Raises Untraceable if it reads values or writes to an input, and TrainingError if it draws random numbers.
    """
    with torch.inference_mode(False), torch.no_grad():
        inputs = differentiable(inputs)
        with without_compiler(), _Recorder() as recorder:
            outputs = list(function(*inputs))
    _check(recorder.tape, inputs)
    tape, outputs = _simplify(recorder.tape, inputs, outputs)
    given, free = inputs[: len(inputs) - spent], inputs[len(inputs) - spent :]
    made = [_memory(tensor) for tensor in outputs[:spent]]
    if len({*made}) < spent or {*made} & {_memory(tensor) for tensor in (*given, *outputs[spent:])}:
        free = []  # what comes out as the next carry would overlap with something else
    return _emit(tape, inputs, outputs, _in_place(tape, outputs, free))


def differentiable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with copies of the same layout for those made in inference mode, which can't take part in a gradient."""
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) if t.is_inference() else t
        for t in tensors
    ]


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let ``torch.func.grad`` run without importing torch's compiler.

    It would do so only to switch the compiler off, at the price of two seconds and 80 MB. Any other use of
    ``torch._dynamo`` inside gets the real one.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    stand_in = _CompilerStandIn()
    torch.__dict__["_dynamo"] = stand_in
    try:
        yield
    finally:
        if torch.__dict__.get("_dynamo") is stand_in:
            del torch.__dict__["_dynamo"]


class _CompilerStandIn:
    compiled_autograd = SimpleNamespace(_disable=nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo"), name)


@dataclass(frozen=True)
class _Operation:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def inputs(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @property
    def outputs(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(self.result) if isinstance(leaf, Tensor)]


class _Recorder(TorchDispatchMode):
    """Sees every operation below the transformations, on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[_Operation] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that it stands for would import the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tape.append(_Operation(func, tuple(args), dict(kwargs or {}), result))
        return result


def _check(tape: Sequence[_Operation], inputs: Sequence[Tensor]) -> None:
    """The tape may be run again: it reads no values, writes only to what it made, and knows where every tensor is from."""
    own = {_memory(tensor) for operation in tape for tensor in operation.outputs} - {_memory(t) for t in inputs}
    known = {id(tensor) for tensor in inputs}
    for operation in tape:
        tags = operation.function.tags
        if torch.Tag.nondeterministic_seeded in tags:
            raise TrainingError(
                f"the program draws random numbers by {operation.function}; let it declare them as noise instead"
            )
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            raise Untraceable(f"{operation.function} reads values")
        for argument, schema in zip(operation.args, operation.function._schema.arguments, strict=False):
            writes = schema.alias_info is not None and schema.alias_info.is_write
            if writes and not (isinstance(argument, Tensor) and _memory(argument) in own):
                raise Untraceable(f"{operation.function} writes to what the program did not make")
        for tensor in operation.inputs:
            if id(tensor) not in known and _memory(tensor) in own:
                raise Untraceable(f"{operation.function} takes a tensor whose making was not seen")
        if any(isinstance(leaf, list | tuple) for leaf in _parts(operation.result)):
            raise Untraceable(f"{operation.function} returns nested results")
        known.update(id(tensor) for tensor in operation.outputs)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _parts(result: Any) -> Sequence[Any]:
    return result if isinstance(result, list | tuple) else [result]


CONSTANT_BYTES = 64 * 1024
"""A constant result up to this size is kept instead of made anew at each call."""


def _simplify(
    tape: Sequence[_Operation], inputs: Sequence[Tensor], outputs: list[Tensor]
) -> tuple[list[_Operation], list[Tensor]]:
    """Leave out what need not be done again: views that exist already, operations done before, constants, unused results.

    Nothing of a tape that writes to memory may be left out.
    """
    if any(operation.function._schema.is_mutable for operation in tape):
        return list(tape), outputs
    same: dict[int, Tensor] = {}
    views: dict[Hashable, Tensor] = {}
    done: dict[Hashable, _Operation] = {}
    varying = {id(tensor) for tensor in inputs}
    kept: list[_Operation] = []

    def original(tensor: Tensor) -> Tensor:
        return same.get(id(tensor), tensor)

    for recorded in tape:
        args, kwargs = tree_map_only(Tensor, original, (recorded.args, recorded.kwargs))
        operation = _Operation(recorded.function, args, kwargs, recorded.result)
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


def _is_constant(operation: _Operation, varying: Set[int]) -> bool:
    """Whether the results are the same whatever the inputs, and small enough to be kept."""
    if sum(tensor.untyped_storage().nbytes() for tensor in operation.outputs) > CONSTANT_BYTES:
        return False
    if operation.function._schema.name in _SHAPE_ONLY:
        return True
    return not any(id(tensor) in varying for tensor in operation.inputs)


_SHAPE_ONLY = {"aten::ones_like", "aten::zeros_like", "aten::full_like", "aten::new_zeros", "aten::new_ones", "aten::new_full"}


def _used(tape: Sequence[_Operation], outputs: Sequence[Tensor]) -> list[_Operation]:
    wanted = {id(tensor) for tensor in outputs}
    used: list[_Operation] = []
    for operation in reversed(tape):
        if any(id(tensor) in wanted for tensor in operation.outputs):
            used.append(operation)
            wanted.update(id(tensor) for tensor in operation.inputs)
    return used[::-1]


def _geometry(tensor: Tensor) -> tuple[Hashable, ...]:
    """Two tensors of one geometry are the same values, as long as all of them are alive and nobody writes."""
    place = (_memory(tensor), tensor.storage_offset()) if tensor.numel() else (id(tensor),)
    return (*place, tensor.shape, tensor.stride(), tensor.dtype)


def _identity(operation: _Operation) -> Hashable:
    leaves, structure = tree_flatten((operation.args, operation.kwargs))
    parts = [(Tensor, id(leaf)) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf)) for leaf in leaves]
    return (operation.function, repr(structure), *parts)


_IN_PLACE = {
    f"aten::{name}": getattr(Tensor, f"{name}_")
    for name in "add sub mul div neg exp sqrt rsqrt relu tanh sigmoid clamp addcmul addcdiv".split()
}


def _in_place(tape: Sequence[_Operation], outputs: Sequence[Tensor], free: Sequence[Tensor]) -> dict[int, Callable[..., Any]]:
    """Which operations may write over their first argument, by position: those after which nobody reads its memory."""
    if any(operation.function._schema.is_mutable for operation in tape):
        return {}
    writable = {_memory(tensor) for tensor in free}
    last_read: dict[int, int] = {_memory(tensor): len(tape) for tensor in outputs}
    for i, operation in reversed(list(enumerate(tape))):
        for tensor in operation.inputs:
            last_read.setdefault(_memory(tensor), i)
    chosen = {}
    for i, operation in enumerate(tape):
        writer = _IN_PLACE.get(operation.function._schema.name)
        first = operation.args[0] if operation.args else None
        if (
            writer is not None
            and isinstance(first, Tensor)
            and _memory(first) in writable
            and last_read[_memory(first)] == i
            and sum(_memory(tensor) == _memory(first) for tensor in operation.inputs) == 1
            and _geometry(first)[-3:] == _geometry(operation.result)[-3:]
        ):
            chosen[i] = writer
        # A view's memory is that of its input, which may not be ours to write to.
        made = {_memory(tensor) for tensor in operation.outputs}
        writable |= made - {_memory(tensor) for tensor in operation.inputs}
    return chosen


def _emit(
    tape: Sequence[_Operation],
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
        for j, leaf in enumerate(_parts(operation.result)):
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


_BINDINGS: dict[str, Callable[..., Any]] = {
    **{
        f"aten::{name}": getattr(torch, name)
        for name in (
            "bmm mm addmm baddbmm add sub mul div neg exp log log1p sqrt rsqrt square abs maximum minimum relu tanh sigmoid "
            "eq ne lt le gt ge where gather sum mean transpose permute t unsqueeze squeeze select addcmul addcdiv clamp "
            "_log_softmax _softmax _log_softmax_backward_data _softmax_backward_data"
        ).split()
    },
    "aten::view": Tensor.view,
    "aten::expand": Tensor.expand,
}
"""Operations whose Python binding takes the arguments of their schema; it is called in half the time."""


def _callable(function: Any) -> Callable[..., Any]:
    binding = _BINDINGS.get(function._schema.name)
    return function if binding is None else binding
