"""What models use of torch's private parts: functions that contexts see into, and what is around a call.

A function of torch that is written in Python first checks whether a context, such as ``Keyed``, is open. If one is, the
function hands itself to the context as a whole, and the context is not active inside of the function. So ``Keyed``
could not see the dropout in ``multi_head_attention_forward``. A function without this check does not hide its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional
from torch.utils import checkpoint


def opened(function: Any) -> Callable[..., Any] | None:
    """The function without the check for contexts. None if it is not written in Python in ``torch.nn.functional``."""
    if isinstance(function, FunctionType) and function.__globals__ is torch.nn.functional.__dict__:
        return _opened(function)
    return None


@cache
def _opened(function: FunctionType) -> FunctionType:
    # The checks are names in the function's module, and have no public switch.
    checks = [name for name in function.__globals__ if name.startswith("has_torch_function")]
    scope = {**function.__globals__, **dict.fromkeys(checks, _never)}
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _never(*tensors: object) -> bool:
    return False


def inside_vmap() -> bool:
    """Whether ``torch.func.vmap`` is around this call."""
    around = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in around)


def inside_transform() -> bool:
    """Whether ``vmap``, ``grad`` or another transformation of ``torch.func`` is around this call."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def keeping_activations() -> Iterator[None]:
    """Let ``torch.utils.checkpoint`` keep activations, which it would compute again in the backward pass.

    By then a module that was called with variables from outside has its own ones again, which have no gradients.
    """
    kept: dict[str, Any] = {
        "_checkpoint_hook": lambda frame: nullcontext(),
        "CheckpointFunction": SimpleNamespace(apply=lambda function, preserve, *arguments: function(*arguments)),
    }
    original = {name: getattr(checkpoint, name) for name in kept}
    try:
        for name, value in kept.items():
            setattr(checkpoint, name, value)
        yield
    finally:
        for name, value in original.items():
            setattr(checkpoint, name, value)
