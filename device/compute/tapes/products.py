"""Products of matrices in a stack of devices on a processor, with the same bits in every slot.

The libraries of processors choose other instructions for a matrix that does not begin at a multiple of 64 bytes, and
for the last rows of one. Then sums are made in another order, and the last bits differ. So a product is tried once for
its layouts, with the same numbers in all slots, and from several places in memory. If the results differ, all matrices
are copied to places that are alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from fedemu.algorithms.layouts import Layout

ALIGNED_BYTES: Final = 64
_SHIFTS: Final = (1, 2, 4, 8)
"""An argument that may begin anywhere is also tried so many elements behind a multiple of 64 bytes."""

Product = Callable[[Tensor, Tensor], Tensor]

Begins = Sequence[int | None]
"""How many elements behind a multiple of 64 bytes each argument begins. None if it may begin anywhere."""

PRODUCTS: Final = ("aten::bmm", "aten::mm")


def alike_in_slots(
    name: str, function: Product, left: Layout, right: Layout, slots: int, begins: Begins = (None, None)
) -> Product | None:
    """A product of a stack that gives all slots the same bits. None if ``function`` does.

    ``function`` is ``aten::bmm`` of ``[n, i, k]`` and ``[n, k, j]``, or ``aten::mm`` of ``[slots · i, k]`` and
    ``[k, j]``, where the rows of a slot lie together. It is for arguments with these layouts, which begin where
    ``begins`` says.
    """
    ways: Sequence[Product]
    if name == "aten::mm":
        if left.shape[0] % slots:
            return None  # it belongs to no slot
        ways, parts = (partial(_rows, slots, _aligned), partial(_rows, slots, _one_by_one)), slots
    else:
        step = left.shape[1] * right.shape[2]
        if all(
            stride * left.dtype.itemsize % ALIGNED_BYTES == 0 for stride in (left.strides[0], right.strides[0], step)
        ):
            return None  # all matrices begin at such a place, because a stack of them takes a multiple of 64 bytes, too
        ways, parts = (_aligned, _one_by_one), left.shape[0]
    if _is_alike(function, left, right, parts, begins):
        return None
    # The other ways copy the matrices, so it does not matter where the arguments begin.
    return next((way for way in ways[:-1] if _is_alike(way, left, right, parts, (0, 0))), ways[-1])


def _is_alike(way: Product, left: Layout, right: Layout, parts: int, begins: Begins) -> bool:
    """Whether equal matrices in all parts have equal products, wherever the arguments may begin."""
    draws = torch.Generator().manual_seed(0)
    rooms = _rooms(left, begins[0]), _rooms(right, begins[1])
    for _ in range(trials(left.shape.numel())):
        numbers = _repeated(left, parts, draws), _repeated(right, parts if len(right.shape) == 3 else 1, draws)
        reference: Tensor | None = None
        for arguments in _in_all_places(rooms, numbers):
            each = way(*arguments).reshape(parts, -1)
            reference = each[:1] if reference is None else reference
            if not torch.equal(reference.expand_as(each), each):
                return False
    return True


def trials(elements: int) -> int:
    """How often something is tried. In a small one few bits can differ, so it is tried more often."""
    return max(2, min(32, 100_000 // max(1, elements)))


def _rooms(layout: Layout, begin: int | None) -> Sequence[Tensor]:
    """Room for an argument in its usual place, and in the others where it may begin."""
    return [_room_of(layout, shift) for shift in ((0, *_SHIFTS) if begin is None else (begin,))]


def _in_all_places(
    rooms: tuple[Sequence[Tensor], Sequence[Tensor]], numbers: tuple[Tensor, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Both arguments in their usual places, and then each of them in the others where it may begin."""
    (first, *lefts), (second, *rights) = rooms
    left, right = _filled(first, numbers[0]), _filled(second, numbers[1])
    yield left, right
    yield from ((_filled(room, numbers[0]), right) for room in lefts)
    yield from ((left, _filled(room, numbers[1])) for room in rights)


def _repeated(layout: Layout, parts: int, draws: torch.Generator) -> Tensor:
    """Random numbers of the layout's shape: the same matrix in each of the parts that lie behind each other."""
    rows = layout.shape[0] // parts
    one = torch.randn((1, rows, *layout.shape[1:]), generator=draws).to(layout.dtype)
    return one.expand(parts, *one.shape[1:]).reshape(layout.shape)


def placed(layout: Layout, shift: int, numbers: Tensor) -> Tensor:
    """The numbers in the memory order of the layout, so many elements behind a multiple of 64 bytes."""
    return _filled(_room_of(layout, shift), numbers)


def _room_of(layout: Layout, shift: int) -> Tensor:
    """Memory for a tensor of the layout, so many elements behind a multiple of 64 bytes."""
    length = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True)) + 1
    return torch.zeros(length + shift, dtype=layout.dtype).as_strided(layout.shape, layout.strides, shift)


def _filled(room: Tensor, numbers: Tensor) -> Tensor:
    """The room, with these numbers."""
    if 0 in room.stride():
        first = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in room.stride())
        room[first] = numbers[first]
    else:
        room.copy_(numbers)
    return room


def _rows(slots: int, way: Product, left: Tensor, right: Tensor) -> Tensor:
    """A product of all rows of a stack with one matrix, slot by slot."""
    (rows, inner), (down, along) = left.shape, left.stride()
    each = rows // slots
    matrices = left.as_strided((slots, each, inner), (each * down, down, along))
    return way(matrices, right.expand(slots, *right.shape)).flatten(0, 1)


def _aligned(left: Tensor, right: Tensor) -> Tensor:
    """The products ``[n, i, j]``, of matrices that each begin at a multiple of 64 bytes."""
    count, rows, columns = len(left), left.shape[1], right.shape[2]
    made = torch.empty(count * _room(rows * columns, left), dtype=left.dtype)
    made = made.as_strided((count, rows, columns), (_room(rows * columns, left), columns, 1))
    return torch.bmm(_apart(left), _apart(right), out=made).contiguous()


def _apart(matrices: Tensor) -> Tensor:
    """The matrices ``[n, i, j]`` in their order of rows or columns, each at a multiple of 64 bytes."""
    if matrices.stride(0) == 0 and len(matrices) > 1:
        return _apart(matrices[:1]).expand_as(matrices)
    count, rows, columns = matrices.shape
    by_columns = matrices.stride(1) == 1 and matrices.stride(2) != 1
    room = _room(rows * columns, matrices)
    line = torch.empty(count * room, dtype=matrices.dtype)
    return line.as_strided(matrices.shape, (room, 1, rows) if by_columns else (room, columns, 1)).copy_(matrices)


def _room(count: int, like: Tensor) -> int:
    """The number of elements from one matrix of ``count`` elements to the next."""
    return math.ceil(count * like.itemsize / ALIGNED_BYTES) * ALIGNED_BYTES // like.itemsize


def _one_by_one(left: Tensor, right: Tensor) -> Tensor:
    """The products ``[n, i, j]``, each by itself."""
    return torch.stack([torch.mm(one.clone(), other.clone()) for one, other in zip(left, right, strict=True)])
