"""Functions of elements on a processor, with the same bits for an element wherever it lies in a tensor.

A processor computes some elements at once by vector instructions, and those that are left at the end of a tensor one by
one. For some functions, such as the sigmoid, torch then takes another approximation, which may differ in the last bit.
In a stack the elements of all devices lie in one tensor, so a device's result would depend on its slot. Here such a
tensor is filled up, so that no element is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fedemu.device.compute.tapes.private_torch import changes_memory, operator_name

MULTIPLE: Final = 64
"""Every processor computes a multiple of so many elements, of any type, by vector instructions alone."""

DEPEND_ON_PLACE: Final = frozenset(
    f"aten::{name}"
    for name in (
        *("atan2", "atanh", "celu", "cosh", "elu", "elu_backward", "exp2", "gelu", "gelu_backward", "igamma"),
        *("igammac", "ldexp", "logaddexp", "logaddexp2", "mish", "mish_backward", "pow", "selu", "sigmoid", "silu"),
        *("silu_backward", "sinh", "softplus", "softplus_backward", "softshrink"),
    )
)
"""Operators that take another approximation for the elements that are left. Those in place have an underscore more."""


def depends_on_place(operator: Any) -> bool:
    """Whether the operator is one of ``DEPEND_ON_PLACE``, perhaps in place."""
    return operator_name(operator).removesuffix("_") in DEPEND_ON_PLACE


def evenly(operator: Any, shape: torch.Size, strides: tuple[int, ...]) -> Callable[..., Tensor] | None:
    """The operator without elements that are left, for results of this ``shape`` that lie as ``strides`` say.

    It takes the operator's arguments. One in place writes to its first argument. None if nothing is left anyway.
    """
    count = shape.numel()
    filled = -(-count // MULTIPLE) * MULTIPLE
    if filled == count:
        return None
    if sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 != count:
        strides = torch.empty(shape, device="meta").stride()  # a part of a tensor has gaps

    def flat(argument: Any) -> Any:
        if not isinstance(argument, Tensor) or not argument.dim():
            return argument
        line = torch.ones(filled, dtype=argument.dtype)
        line.as_strided(shape, strides).copy_(argument)
        return line

    def run(*args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = operator(*map(flat, args), **{name: flat(value) for name, value in kwargs.items()})
        found = found.as_strided(shape, strides)
        return args[0].copy_(found) if changes_memory(operator) else found

    return run
