"""Functions of elements: which ones depend on the place of an element, and how they do not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedemu.device.compute.tapes.elements import DEPEND_ON_PLACE, MULTIPLE, depends_on_place, evenly
from fedemu.device.compute.tapes.private_torch import operator_name

ATEN = torch.ops.aten
COUNTS = (*range(1, 64, 3), 100, 131)
FOR_ARGUMENTS = {"number": 1.5, "float": 1.5, "int": 1, "bool": False, "str": "none"}


def numbers(count: int = 3 * MULTIPLE) -> list[Tensor]:
    """Some of all, some between 0 and 1, some above 1."""
    draws = torch.Generator().manual_seed(0)
    whole = torch.randn(count, generator=draws)
    return [2 * whole, torch.rand(count, generator=draws) * 0.98 + 0.01, whole.abs() * 2 + 1.1]


def differs(function: Callable[..., Any], given: list[Any]) -> bool:
    """Whether elements have other bits in a shorter tensor."""
    whole = function(*given)
    for count in COUNTS:
        for start in (0, MULTIPLE):
            part = function(*(one[start : start + count].clone() if isinstance(one, Tensor) else one for one in given))
            if isinstance(part, Tensor) and part.dtype == torch.float32 and part.dim():
                bits = (leaf.view(torch.int32) for leaf in (part, whole[start : start + count]))
                if not torch.equal(*bits):
                    return True
    return False


def pointwise() -> Iterator[Any]:
    for name in sorted(dir(ATEN)):
        packet = getattr(ATEN, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            operator = getattr(packet, overload)
            if torch.Tag.pointwise in operator.tags and not operator._schema.is_mutable and "out" not in overload:
                yield operator


def arguments(operator: Any, turn: int) -> list[Any] | None:
    """Some arguments, None if it is not known what it takes."""
    found: list[Any] = []
    pool = numbers()
    for argument in operator._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only:
            continue
        if kind == "Tensor":
            found.append(pool[(turn + len(found)) % 3].roll(7 * len(found)))
        elif argument.has_default_value():
            found.append(argument.default_value)
        elif kind in FOR_ARGUMENTS:
            found.append(FOR_ARGUMENTS[kind])
        else:
            return None
    return found


def test_all_operators_that_depend_on_the_place_are_known() -> None:
    """Those that torch calls pointwise are tried. Some of a processor may not depend on it on another."""
    found = set()
    tried = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in pointwise():
            for turn in range(3):
                given = arguments(operator, turn)
                if given is None or not any(isinstance(one, Tensor) for one in given):
                    break
                try:
                    operator(*given)
                except (RuntimeError, NotImplementedError):
                    continue
                tried += 1
                if differs(operator, given):
                    found.add(operator_name(operator))
    assert tried > 300
    assert found <= DEPEND_ON_PLACE, (
        f"torch {torch.__version__} computes other bits at the end of a tensor; add these to DEPEND_ON_PLACE"
    )


ACTIVATIONS = {
    function.__name__: function
    for function in (
        *(functional.sigmoid, functional.softplus, functional.gelu, functional.silu, functional.elu, functional.selu),
        *(functional.celu, functional.mish, functional.logsigmoid, functional.hardswish, functional.softsign),
        *(functional.tanhshrink, functional.softshrink, functional.leaky_relu, torch.tanh, torch.sinh, torch.cosh),
        *(torch.exp2, torch.exp, torch.log1p, torch.atanh),
    )
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_depend_on_the_place_only_by_known_operators(name: str) -> None:
    def gradient(x: Tensor, slope: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(ACTIVATIONS[name](x), x, slope)[0]

    slopes, inner, _ = numbers()
    with torch.autograd.profiler.profile() as profile:
        gradient(inner, slopes)
    if differs(gradient, [inner, slopes]):
        seen = {event.name for event in profile.function_events}
        assert seen & DEPEND_ON_PLACE, seen


@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 5), (1,), (130,)])
@pytest.mark.parametrize("by_columns", [False, True])
def test_every_element_has_the_bits_of_a_full_tensor(shape: tuple[int, ...], by_columns: bool) -> None:
    count = torch.Size(shape).numel()
    line = numbers()[0][:count]
    given = line.view(shape[::-1]).permute(*range(len(shape) - 1, -1, -1)) if by_columns else line.view(shape)
    expected = torch.sigmoid(numbers()[0])[:count]
    operator = ATEN.sigmoid.default
    assert depends_on_place(operator)
    full = evenly(operator, given.shape, given.stride())
    assert full is not None
    made = full(given)
    assert (made.shape, made.stride()) == (given.shape, given.stride())
    assert torch.equal(made.as_strided((count,), (1,)), expected)


def test_an_operator_in_place_writes_to_its_argument_and_to_nothing_beside_it() -> None:
    held = numbers()[0][:40].clone().view(5, 8)
    before, part = held.clone(), held[:, 1:4]
    operator = ATEN.sigmoid_.default
    assert depends_on_place(operator)
    full = evenly(operator, part.shape, part.stride())
    assert full is not None
    assert full(part) is part
    assert torch.allclose(part, torch.sigmoid(before[:, 1:4]))
    assert torch.equal(held[:, 0], before[:, 0])
    assert torch.equal(held[:, 4:], before[:, 4:])


def test_arguments_are_expanded_and_numbers_stay() -> None:
    operator = ATEN.pow.Tensor_Tensor
    left, right = numbers()[2][:15].view(5, 3), numbers()[0][:3]
    full = evenly(operator, left.shape, left.stride())
    assert full is not None
    assert torch.allclose(full(left, right), left**right)
    with_number = evenly(ATEN.elu.default, left.shape, left.stride())
    assert with_number is not None
    assert torch.allclose(with_number(-left, 0.5), functional.elu(-left, 0.5))


def test_a_full_tensor_is_left_to_the_operator() -> None:
    assert evenly(ATEN.sigmoid.default, torch.Size((4, MULTIPLE)), (MULTIPLE, 1)) is None
