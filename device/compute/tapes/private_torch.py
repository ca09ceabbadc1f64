"""Everything that the executors use of torch's private parts. No other file of their rooms names one of them.

Private parts may change with any version of torch. ``tests/device/compute/tapes/test_private_torch.py`` tests for
each of them that it exists and does what is relied on here, and says what to do when that is no longer so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef as MemoryReference

# ``TorchDispatchMode`` is documented, but its module is private.
from torch.utils._python_dispatch import TorchDispatchMode

# These turn trees of dicts, tuples and named tuples into flat lists, and back. torch has no public module for this, and
# ``torch.func.vmap`` uses this private one too.
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

# A dictionary whose keys are tensors, which it does not keep alive.
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = [
    "LOG_SOFTMAX",
    "MemoryReference",
    "OperationReplacer",
    "OperationWatcher",
    "TreeSpec",
    "WeakTensorKeyDictionary",
    "changes_memory",
    "has_product",
    "operator_name",
    "product",
    "product_formula",
    "reference_to_memory",
    "tree_flatten",
    "tree_map_only",
    "tree_unflatten",
    "unwatched",
    "written_arguments",
]

LOG_SOFTMAX: Mapping[str, Callable[..., Any]] = {
    "aten::_log_softmax": torch._log_softmax,
    "aten::_log_softmax_backward_data": torch._log_softmax_backward_data,
}
"""The two operators behind ``log_softmax`` and its gradient, which have no public binding with these arguments."""


def has_product() -> bool:
    """Whether ``product`` may be used: this torch has oneDNN, and nobody has switched it off, as portable runs do."""
    there = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return there and bool(torch.backends.mkldnn.enabled) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` of two float32 matrices on a CPU, computed by oneDNN.

    torch has this operator for the linear layers that it compiles. ``torch.mm`` calls MKL, which takes twice as long on
    processors of AMD.
    """
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")
    return result


def product_formula() -> dict[Any, Callable[..., int]]:
    """What torch's ``FlopCounterMode`` has to know to count the floating-point operations of ``product``."""
    if not has_product():
        return {}

    def count(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
        return 2 * left[0] * left[1] * right[0]

    return {torch.ops.mkldnn._linear_pointwise: count}


def reference_to_memory(tensor: Tensor) -> MemoryReference:
    """A reference to the memory of a tensor, which does not keep it alive.

    As long as there is a reference, even to memory that is gone, no other memory has the number that is its ``cdata``.
    """
    return MemoryReference(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class OperationWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that sees every operation below torch's transformations, on plain tensors.

    ``seen`` is called after each operation with the operator, its positional and keyword arguments, and its result.
    """

    def __init__(self, seen: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would wrap the method below in something that imports the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._seen(func, tuple(args), dict(kwargs or {}), result)
        return result


class OperationReplacer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which ``instead`` is called with each operator and its arguments, and gives the result.

    Within ``instead`` operators are those of torch. A watcher that is entered later sees the operator and this result.
    """

    def __init__(self, instead: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._instead = instead

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as above

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._instead(func, tuple(args), dict(kwargs or {}))


unwatched = torch._C._DisableTorchDispatch
"""A context within which no watcher and no replacer that is around it sees an operation."""


# Only an operator's schema, which is private, tells what the operator writes to.


@cache
def operator_name(operator: Any) -> str:
    """The name of an operator without its overload, such as ``aten::add``."""
    return str(operator._schema.name)


@cache
def changes_memory(operator: Any) -> bool:
    """Whether the operator writes to any of its arguments."""
    return bool(operator._schema.is_mutable)


def written_arguments(operator: Any, args: Sequence[Any]) -> list[Any]:
    """Those of the positional arguments ``args`` that the operator writes to."""
    return [args[place] for place in _written_places(operator) if place < len(args)]


@cache
def _written_places(operator: Any) -> tuple[int, ...]:
    aliases = [schema.alias_info for schema in operator._schema.arguments]
    return tuple(place for place, alias in enumerate(aliases) if alias is not None and alias.is_write)
