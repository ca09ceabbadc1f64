"""Sums, normalisations and convolutions of a stack: the other ways to compute them, and when they are taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fedemu.algorithms.layouts import Layout
from fedemu.device.compute.tapes.private_torch import operator_name
from fedemu.device.compute.tapes.side_by_side import (
    _filled_up,
    _in_usual_order,
    _one_by_one,
    _sides,
    alike_side_by_side,
)

ATEN = torch.ops.aten
SLOTS = 3
DRAWS = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.rand(shape, generator=DRAWS) + 0.5


def _convolution(channels_of_slots: bool) -> list[Any]:
    if channels_of_slots:
        return [drawn(4, 2 * SLOTS, 6, 6), drawn(5 * SLOTS, 2, 3, 3), drawn(5 * SLOTS)]
    return [drawn(4 * SLOTS, 2, 6, 6), drawn(5, 2, 3, 3), drawn(5)]


def calls() -> dict[str, tuple[Any, list[Any]]]:
    """Calls of operators in a stack of ``SLOTS``: the operator and its arguments."""
    c = 5 * SLOTS
    rest: list[Any] = [[1, 1], [1, 1], [1, 1], False, [0, 0]]
    many, one = _convolution(True), _convolution(False)
    return {
        "sum": (ATEN.sum.dim_IntList, [drawn(4, SLOTS, 5).transpose(0, 1), [1], True]),
        "mean": (ATEN.mean.dim, [drawn(SLOTS, 4, 5), [-1]]),
        "variance": (ATEN.var.correction, [drawn(SLOTS, 4, 5), [2]]),
        "softmax": (ATEN._log_softmax.default, [drawn(SLOTS, 4, 5), 1, False]),
        "training": (ATEN.native_batch_norm.default, [drawn(4, c), *(drawn(c) for _ in range(4)), True, 0.1, 1e-5]),
        "images": (ATEN.native_batch_norm.default, [drawn(4, c, 2, 2), *(drawn(c) for _ in range(4)), True, 0.1, 1e-5]),
        "evaluation": (ATEN.native_batch_norm.default, [drawn(4, c), *(drawn(c) for _ in range(4)), False, 0.1, 1e-5]),
        "without statistics": (
            ATEN.native_batch_norm.default,
            [drawn(4, c), drawn(c), drawn(c), None, None, True, 0.1, 1e-5],
        ),
        "its gradient": (
            ATEN.native_batch_norm_backward.default,
            [drawn(4, c), drawn(4, c), *(drawn(c) for _ in range(5)), True, 1e-5, [True, True, True]],
        ),
        "convolution": (ATEN.convolution.default, [*many, *rest, SLOTS]),
        "one kernel": (ATEN.convolution.default, [*one, *rest, 1]),
        "its gradients": (
            ATEN.convolution_backward.default,
            [drawn(4, 5 * SLOTS, 6, 6), many[0], many[1], [5 * SLOTS], *rest, SLOTS, [True, True, True]],
        ),
        "gradient of inputs": (
            ATEN.convolution_backward.default,
            [drawn(4 * SLOTS, 5, 6, 6), one[0], one[1], None, *rest, 1, [True, False, False]],
        ),
    }


CALLS = calls()


def listed(made: Any) -> list[Any]:
    return list(made) if isinstance(made, list | tuple) else [made]


def copies(args: Sequence[Any]) -> list[Any]:
    return [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]


def layouts(tensors: Any) -> list[Any]:
    return [Layout.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in tensors]


def ways(name: str, operator: Any, sides: Any) -> list[Callable[..., Any]]:
    short = operator_name(operator).removeprefix("aten::")
    found = [partial(_one_by_one, short, sides, SLOTS, operator)]
    if "norm" in short:
        found.append(partial(_filled_up, sides, operator))
    elif "convolution" not in short:
        found.append(partial(_in_usual_order, operator))
    return found


@pytest.mark.parametrize("name", CALLS)
def test_each_way_gives_what_the_operator_gives_and_writes_what_it_writes(name: str) -> None:
    operator, args = CALLS[name]
    expected_args = copies(args)
    expected = listed(operator(*expected_args))
    sides = _sides(operator_name(operator).removeprefix("aten::"), layouts(args), layouts(expected), SLOTS)
    assert sides is not None
    for way in ways(name, operator, sides):
        given = copies(args)
        found = listed(way(*given))
        assert len(found) == len(expected)
        for one, other in zip([*found, *given], [*expected, *expected_args], strict=True):
            if isinstance(other, Tensor):
                assert one.shape == other.shape
                assert torch.allclose(one, other, atol=1e-5), name
            else:
                assert one == other


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_that_depends_on_the_slot_is_replaced_and_another_is_not(name: str) -> None:
    operator, args = CALLS[name]
    results = layouts(listed(operator(*copies(args))))
    sides = _sides(operator_name(operator).removeprefix("aten::"), layouts(args), results, SLOTS)
    assert sides is not None

    def by_slot(*given: Any) -> Any:
        """The first result, with the number of its slot in its bits if the slots are computed together."""
        made = listed(operator(*given))
        if made[0].shape == results[0].shape:
            side = sides.results[0]
            ramp = torch.arange(made[0].shape[side], dtype=torch.float32)
            made[0] = made[0] + ramp.view([-1 if i == side else 1 for i in range(made[0].dim())])
        return made if len(made) > 1 else made[0]

    way = alike_side_by_side(operator, by_slot, layouts(args), {}, results, SLOTS)
    assert way is not None
    made = listed(way(*copies(args)))
    for found, expected, layout in zip(made, listed(operator(*copies(args))), results, strict=True):
        if expected is not None and expected.numel():
            assert torch.allclose(found, expected, atol=1e-5)
            assert found.stride() == layout.strides
    assert alike_side_by_side(operator, partial(_zeros, results), layouts(args), {}, results, SLOTS) is None


def _zeros(results: Sequence[Any], *_: Any) -> Any:
    made = [None if layout is None else torch.zeros(layout.shape) for layout in results]
    return made if len(made) > 1 else made[0]


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (ATEN.sum.dim_IntList, [drawn(SLOTS, 4), [0]]),
        (ATEN.sum.dim_IntList, [drawn(SLOTS, 4), [-2, 1]]),
        (ATEN.sum.dim_IntList, [drawn(SLOTS, 4), []]),
        (ATEN.sum.dim_IntList, [drawn(), [0]]),
        (ATEN.sum.dim_IntList, [drawn(SLOTS, SLOTS), [0]]),
        (ATEN.sum.default, [drawn(SLOTS, 4)]),
        (ATEN.var.default, [drawn(SLOTS, 4), True]),
        (ATEN._softmax.default, [drawn(SLOTS, 4), 0, False]),
        (ATEN.mean.dim, [drawn(4, 5), [1]]),
        (ATEN.native_batch_norm.default, [drawn(6, 4), None, None, None, None, True, 0.1, 1e-5]),
        (ATEN.convolution.default, [drawn(4, 2, 6, 6), drawn(5, 2, 3, 3), None, [1], [0], [1], False, [0], 1]),
    ],
)
def test_an_operator_of_no_slot_is_left_alone(operator: Any, args: list[Any]) -> None:
    def fails(*given: Any) -> Any:
        raise AssertionError("it need not be tried")

    results = layouts(listed(operator(*copies(args))))
    assert alike_side_by_side(operator, fails, layouts(args), {}, results, SLOTS) is None
