"""Products of a stack: equal numbers have equal products in all slots, whatever the library does."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from fedemu.algorithms.layouts import Layout
from fedemu.device.compute.tapes.products import _aligned, _one_by_one, _rows, alike_in_slots

BMM, MM = "aten::bmm", "aten::mm"


def drawn(draws: torch.Generator, *shape: int, by_columns: bool = False) -> Tensor:
    if by_columns:
        return torch.randn((*shape[:-2], shape[-1], shape[-2]), generator=draws).transpose(-1, -2)
    return torch.randn(shape, generator=draws)


@pytest.mark.parametrize("seed", range(60))
def test_the_way_that_is_chosen_gives_all_slots_the_same_bits(seed: int) -> None:
    random, draws = Random(seed), torch.Generator().manual_seed(seed)
    slots, rows, inner, columns = (random.randint(*ends) for ends in ((2, 16), (1, 30), (1, 120), (1, 30)))
    one, other = drawn(draws, rows, inner), drawn(draws, inner, columns)
    for name, function in ((BMM, torch.bmm), (MM, torch.mm)):
        left = one.expand(slots, rows, inner).contiguous()
        right = other.expand(slots, inner, columns).contiguous() if name == BMM else other
        left = left if name == BMM else left.view(slots * rows, inner)
        way = alike_in_slots(name, function, Layout.of(left), Layout.of(right), slots) or function
        made = way(left, right).view(slots, rows, columns)
        assert all(torch.equal(made[0], each) for each in made), (name, slots, rows, inner, columns)
        assert torch.allclose(made[0].double(), one.double() @ other.double(), atol=1e-4)


WAYS = [_aligned, _one_by_one]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("left_by_columns", "right_by_columns"), [(False, False), (True, False), (False, True)])
def test_a_way_computes_the_products(
    way: Callable[[Tensor, Tensor], Tensor], left_by_columns: bool, right_by_columns: bool
) -> None:
    draws = torch.Generator().manual_seed(1)
    left = drawn(draws, 3, 5, 7, by_columns=left_by_columns)
    right = drawn(draws, 3, 7, 2, by_columns=right_by_columns)
    made = way(left, right)
    assert made.is_contiguous()
    assert torch.allclose(made, left @ right, atol=1e-6)
    assert torch.allclose(way(left, right[:1].expand_as(right)), left @ right[:1], atol=1e-6)
    assert torch.allclose(way(left[:1], right[:1]), left[:1] @ right[:1], atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_a_stack_are_multiplied_slot_by_slot(way: Callable[[Tensor, Tensor], Tensor]) -> None:
    draws = torch.Generator().manual_seed(1)
    left, right = drawn(draws, 15, 7), drawn(draws, 7, 2)
    assert torch.allclose(_rows(3, way, left, right), left @ right, atol=1e-6)
    columns = drawn(draws, 15, 7, by_columns=True)
    assert torch.allclose(_rows(3, way, columns, right), columns @ right, atol=1e-6)


def layouts(*shapes: tuple[int, ...]) -> list[Layout]:
    return [Layout.of(torch.zeros(shape)) for shape in shapes]


def test_a_product_that_depends_on_the_slot_is_replaced_and_another_is_not() -> None:
    def by_slot(left: Tensor, right: Tensor) -> Tensor:
        return torch.bmm(left, right) + torch.arange(len(left))[:, None, None] * 1e-6

    def by_row(left: Tensor, right: Tensor) -> Tensor:
        return left @ right + torch.arange(len(left))[:, None] * 1e-6

    def even(left: Tensor, right: Tensor) -> Tensor:
        return torch.zeros(*left.shape[:-1], right.shape[-1])

    batched, folded = layouts((4, 5, 16), (4, 16, 5)), layouts((64, 16), (16, 16))
    for name, function, given in ((BMM, by_slot, batched), (MM, by_row, folded)):
        way = alike_in_slots(name, function, *given, 4)
        assert way is not None
        left, right = (torch.ones(layout.shape) for layout in given)
        assert set(way(left, right).flatten().tolist()) == {16.0}
        assert alike_in_slots(name, even, *given, 4) is None


def test_a_product_that_depends_on_where_an_argument_begins_is_replaced() -> None:
    def by_place(left: Tensor, right: Tensor) -> Tensor:
        return torch.zeros(len(left), left.shape[1], right.shape[2]) + right.storage_offset()

    assert alike_in_slots(BMM, by_place, *layouts((2, 5, 16), (2, 16, 5)), 2) is not None


def test_rows_of_no_slot_and_matrices_that_all_begin_alike_need_not_be_tried() -> None:
    def fails(left: Tensor, right: Tensor) -> Tensor:
        raise AssertionError("it need not be tried")

    assert alike_in_slots(MM, fails, *layouts((7, 3), (3, 2)), 4) is None
    assert alike_in_slots(BMM, fails, *layouts((3, 4, 8), (3, 8, 16)), 3) is None
    with pytest.raises(AssertionError):
        alike_in_slots(BMM, fails, *layouts((3, 4, 7), (3, 7, 16)), 3)
