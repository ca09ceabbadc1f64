"""Operations on a stack of devices, with the same bits in every slot.

On a processor the last bits of some operations depend on where numbers lie in memory, and so on the slot of a device.
Here are the ways to compute them in which they do not. A GPU computes all slots by the same instructions, except for
gradients of embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from fedemu.algorithms.layouts import Layout
from fedemu.device.compute.tapes.elements import depends_on_place, evenly
from fedemu.device.compute.tapes.embeddings import GRADIENT, in_whole_chunks
from fedemu.device.compute.tapes.private_torch import OperationReplacer, changes_memory, operator_name, unwatched
from fedemu.device.compute.tapes.products import PRODUCTS, Begins, alike_in_slots
from fedemu.device.compute.tapes.side_by_side import SIDE_BY_SIDE, alike_side_by_side
from fedemu.device.compute.tapes.tape import mapped, parts

Way = Callable[..., Any]

MAX_FOUND: Final = 4096
_found: dict[Hashable, Way | None] = {}
"""What ``alike`` has found, by operator, function, slots and layouts."""


def alike(
    operator: Any,
    function: Way,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Any],
    device: torch.device,
    slots: int,
    begins: Begins = (None, None),
) -> Way | None:
    """A function that does what ``function`` does, with the same bits in every one of ``slots``. None if that does.

    ``function`` computes ``operator`` for the arguments ``args`` and ``kwargs``. Layouts stand for tensors in them and
    in ``results``. The first two tensors begin where ``begins`` says. What is found is kept, because to find it takes
    some calls of the operator.
    """
    if device.type == "cuda" and operator_name(operator) == GRADIENT:
        return in_whole_chunks(function, args, slots)
    if device.type != "cpu" or not _on_a_processor(operator) or not all(map(_is_real, results)):
        return None
    key = operator, function, slots, repr((args, kwargs, results, begins))
    if key not in _found:
        if len(_found) >= MAX_FOUND:
            _found.clear()
        with unwatched():
            _found[key] = _alike(operator, function, args, kwargs, results, slots, begins)
    return _found[key]


def _alike(
    operator: Any,
    function: Way,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[Any],
    slots: int,
    begins: Begins,
) -> Way | None:
    if depends_on_place(operator):
        return evenly(operator, results[0].shape, results[0].strides)
    if (name := operator_name(operator)) in PRODUCTS:
        return alike_in_slots(name, function, args[0], args[1], slots, begins)
    return alike_side_by_side(operator, function, args, kwargs, results, slots)


def is_concerned(operator: Any) -> bool:
    """Whether there are layouts for which the operator does not give all slots the same bits."""
    return _on_a_processor(operator) or operator_name(operator) == GRADIENT


def _on_a_processor(operator: Any) -> bool:
    return depends_on_place(operator) or operator_name(operator) in (*PRODUCTS, *SIDE_BY_SIDE)


def _is_real(layout: Layout | None) -> bool:
    return layout is None or layout.dtype.is_floating_point


def all_alike(slots: int) -> AbstractContextManager[object]:
    """A context in which all operations give the same bits in every slot. With 0 slots it changes nothing."""
    return OperationReplacer(partial(_computed, slots)) if slots else nullcontext()


def _computed(slots: int, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_concerned(operator):
        return operator(*args, **kwargs)
    in_place = changes_memory(operator)
    made = args[0] if in_place else operator(*args, **kwargs)
    given, named, results = mapped(Tensor, Layout.of, (args, kwargs, parts(made)))
    [device, *_] = {leaf.device for leaf in parts(made) if leaf is not None}
    instead = alike(operator, operator, given, named, results, device, slots)
    if instead is not None:
        return instead(*args, **kwargs)
    return operator(*args, **kwargs) if in_place else made
