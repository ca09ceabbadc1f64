"""Sums, normalisations and convolutions of a stack on a processor, with the same bits in every slot.

Where the numbers of all devices lie side by side, a library computes what is left at the end by other instructions, as
for products of matrices (``products.py``). So an operator is tried once for its layouts, with the same numbers in all
slots. If the results differ, another memory order is tried, or more channels, and in the end the slots one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from fedemu.algorithms.layouts import Layout, laid_out
from fedemu.device.compute.tapes.elements import MULTIPLE
from fedemu.device.compute.tapes.private_torch import operator_name
from fedemu.device.compute.tapes.products import placed, trials
from fedemu.device.compute.tapes.tape import parts

Way = Callable[..., Any]

_SUMS: Final = {
    **dict.fromkeys(("sum", "mean", "prod", "var", "std", "var_mean", "std_mean", "logsumexp", "nansum"), 1),
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp"), 1),
    **dict.fromkeys(("linalg_vector_norm", "_softmax_backward_data", "_log_softmax_backward_data"), 2),
}
"""By the name of an operator in the namespace aten: the place of the argument with the dimensions that it sums over."""
_NORMS: Final = {
    "native_batch_norm": ((1, 0, 0, 0, 0), (1, 0, 0), (3, 4)),
    "native_batch_norm_backward": ((1, 1, 0, 0, 0, 0, 0), (1, 0, 0), ()),
}
"""By the name of a normalisation: the dimension in which the channels of each of its arguments lie, the same for each
of its results, and the places of the arguments that it writes to."""
_GROUPS: Final = {"convolution": 8, "convolution_backward": 9}
"""By the name of a convolution: the place of the argument that tells the number of groups."""

SIDE_BY_SIDE: Final = frozenset(f"aten::{name}" for name in (*_SUMS, *_NORMS, *_GROUPS))


@dataclass(frozen=True)
class Sides:
    """The dimension in which the slots lie, of each argument and of each result. None if they share an argument."""

    arguments: Sequence[int | None]
    results: Sequence[int]
    written: Sequence[int] = ()


def alike_side_by_side(
    operator: Any,
    function: Way,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Layout | None],
    slots: int,
) -> Way | None:
    """A way to compute ``operator`` that gives all slots the same bits. None if ``function`` does.

    ``args`` are its arguments, in which layouts stand for tensors, and ``results`` the layouts of its results.
    """
    name = operator_name(operator).removeprefix("aten::")
    sides = _sides(name, args, results, slots)
    if sides is None or any(isinstance(value, Layout) for value in kwargs.values()):
        return None
    function = partial(function, **kwargs) if kwargs else function
    ways: list[Way] = [function]
    if name in _SUMS:
        ways.append(partial(_in_usual_order, function))
    if name in _NORMS:
        ways.append(partial(_filled_up, sides, function))
    last = partial(_one_by_one, name, sides, slots, function)
    chosen = next((way for way in ways if _is_alike(way, sides, args, slots)), last)
    return None if chosen is function else partial(_in_its_order, chosen, results)


def _in_its_order(way: Way, results: Sequence[Layout | None], *args: Any, **_: Any) -> Any:
    """The results of a way in the memory order that the operator's own have."""
    made = [
        leaf if leaf is None or layout is None or leaf.stride() == layout.strides else laid_out(leaf, layout.strides)
        for leaf, layout in zip(parts(way(*args)), results, strict=True)
    ]
    return made[0] if len(made) == 1 else tuple(made)


def _sides(name: str, args: Sequence[Any], results: Sequence[Layout | None], slots: int) -> Sides | None:
    """Where the slots lie. None if the operator belongs to no slot."""
    first: Layout = args[0]
    if name in _SUMS:
        if not all(layout is not None and layout.shape[:1] == first.shape[:1] == (slots,) for layout in results):
            return None
        over = args[_SUMS[name]] if len(args) > _SUMS[name] else None
        over = [over] if type(over) is int else over  # a truth value says something else
        if not isinstance(over, list | tuple) or any(dimension % len(first.shape) == 0 for dimension in over):
            return None
        return Sides([0 if isinstance(each, Layout) else None for each in args], [0] * len(results))
    if name in _NORMS:
        return Sides(*_NORMS[name]) if first.shape[1] % slots == 0 else None
    backward = name.endswith("backward")
    if args[_GROUPS[name]] % slots == 0:
        return Sides((1, 1, 0), (1, 0, 0)) if backward else Sides((1, 0, 0), (1,))
    if first.shape[0] % slots or (backward and any(args[10][1:])):
        return None
    return Sides((0, 0, None), (0, 0, 0)) if backward else Sides((0, None, None), (0,))


def _is_alike(way: Way, sides: Sides, args: Sequence[Any], slots: int) -> bool:
    draws = torch.Generator().manual_seed(0)
    for _ in range(trials(args[0].shape.numel())):
        for leaf, side in zip(parts(way(*_drawn(sides, args, slots, draws))), sides.results, strict=True):
            if leaf is not None and leaf.numel():
                first, *others = leaf.chunk(slots, side)
                if not all(torch.equal(first, other) for other in others):
                    return False
    return True


def _drawn(sides: Sides, args: Sequence[Any], slots: int, draws: torch.Generator) -> Iterator[Any]:
    """The arguments with random numbers, the same in all slots. They are positive, as variances have to be."""
    for i, layout in enumerate(args):
        if not isinstance(layout, Layout):
            yield layout
            continue
        side = sides.arguments[i] if i < len(sides.arguments) else None
        shape = list(layout.shape)
        if side is not None:
            shape[side] //= slots
        one = torch.rand(shape, generator=draws) + 0.5
        yield placed(layout, 0, one if side is None else torch.cat([one] * slots, side))


def _in_usual_order(function: Way, *args: Any) -> Any:
    """The function of tensors in which the slots lie one behind the other."""
    return function(*(arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args))


def _filled_up(sides: Sides, function: Way, *args: Any) -> Sequence[Any]:
    """The function for so many channels that none is left."""
    count = args[0].shape[1]
    filled = -(-count // MULTIPLE) * MULTIPLE

    def wide(i: int, argument: Any) -> Any:
        if not isinstance(argument, Tensor) or i >= len(sides.arguments):
            return argument
        side: Any = sides.arguments[i]
        shape = list(argument.shape)
        shape[side] = filled - count
        return torch.cat([argument, argument.new_ones(shape)], side)

    given = [wide(i, argument) for i, argument in enumerate(args)]
    made = function(*given)
    for i in sides.written:
        if args[i] is not None:
            args[i].copy_(given[i].narrow(0, 0, count))
    return [
        leaf if leaf is None or not leaf.numel() else leaf.narrow(side, 0, count)
        for leaf, side in zip(made, sides.results, strict=True)
    ]


def _one_by_one(name: str, sides: Sides, slots: int, function: Way, *args: Any) -> Sequence[Any]:
    """The function for each slot by itself."""
    rest = list(args)
    if name in _GROUPS and sides.results[0] == 1:
        rest[_GROUPS[name]] //= slots
        if name.endswith("backward") and rest[3] is not None:
            rest[3] = [size // slots for size in rest[3]]  # that of the bias
    made = []
    for slot in range(slots):
        given = list(rest)
        for i, side in enumerate(sides.arguments):
            if isinstance(args[i], Tensor) and side is not None:
                given[i] = args[i].chunk(slots, side)[slot].contiguous()
        made.append(parts(function(*given)))
        for i in sides.written:
            if args[i] is not None:
                args[i].chunk(slots, 0)[slot].copy_(given[i])
    return [
        None if leaves[0] is None else torch.cat(leaves, side)
        for leaves, side in zip(zip(*made, strict=True), sides.results, strict=True)
    ]
