"""What a program has to return, beside what it returned: the tensors that it tells beforehand, a carry of one form."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, get_args

import torch
from torch import Tensor

from fedemu.algorithms.interface import Outcome
from fedemu.device.compute.tapes.private_torch import TreeSpec, tree_flatten, tree_unflatten
from fedemu.protocol.messages import Name
from fedemu.protocol.wording import an_object

_LONGEST: int = get_args(Name)[1].max_length
"""The most signs of a measure's name, which travels in a message."""


def broken(function: str, told: Mapping[str, object], returned: Mapping[str, object], by: str = "finish") -> str | None:
    """How the tensors that ``by`` returned differ from those that ``function`` tells, to follow the program's name.

    Both are by name. None if names, shapes and types are the same.
    """
    for leaf in dict.fromkeys([*returned, *told]):
        if (real := _form(returned.get(leaf))) != (expected := _form(told.get(leaf))):
            return (
                f"returns {leaf!r} from {by} as {real}, but its {function} tells {expected} of it; let {function} "
                "return tensors of the same names, shapes and types"
            )
    return None


def _form(leaf: object) -> str:
    if leaf is None:
        return "nothing"
    return f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"no tensor ({type(leaf).__name__})"


def as_leaf(value: object, function: str) -> Tensor:
    """A tensor, a number or an array of what ``function`` returned, as a tensor. Raises TypeError for all else."""
    try:
        return torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{function} returned {an_object(value)} where a tensor or a number must be") from error


def finished(result: object) -> Outcome:
    """What finish has returned. Raises TypeError if it is something else."""
    if not isinstance(result, Outcome) or not all(
        isinstance(part, Mapping) for part in (*result, *result.payload.values())
    ):
        raise TypeError(
            f"finish returned {an_object(result)}; it must return an Outcome of the payload, which has trees by name, "
            "and of the next own state, which has tensors by name"
        )
    return result


def stepped(result: object, carry: TreeSpec) -> tuple[Any, dict[str, Any]]:
    """The next carry and the measures that a step has returned, which was given a carry of this form.

    Raises TypeError if it returned something else.
    """
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise TypeError(
            f"step returned {an_object(result)}; it must return two things, the next carry and measures by name"
        )
    after, measures = result
    if (spec := tree_flatten(after)[1]) != carry:
        given = _empty(carry)
        differing = _unlike(given, _empty(spec))
        after = after if differing else _ordered(given, after)
        if differing or tree_flatten(after)[1] != carry:
            raise TypeError(
                f"step returned a carry of another form than it was given: {differing or 'its mappings differ in kind'}"
            )
    for name, value in measures.items():
        if not isinstance(name, str) or len(name) > _LONGEST:
            raise TypeError(
                f"step returned a measure with the name {name!r}; it must be text of at most {_LONGEST} signs"
            )
        if not isinstance(value, Tensor | Real) or (isinstance(value, Tensor) and value.ndim):
            is_ = f"the shape {list(value.shape)}" if isinstance(value, Tensor) else f"the type {type(value).__name__}"
            raise TypeError(f"step returned the measure {name!r} of {is_}; a measure is one number, such as a mean")
    return after, dict(measures)


def _empty(spec: TreeSpec) -> Any:
    """A tree of this form in which all tensors are the same."""
    return tree_unflatten([_LEAF] * spec.num_leaves, spec)


_LEAF = torch.empty(0)


def _ordered(given: Any, after: Any) -> Any:
    """``after`` with the names of its mappings in the order of ``given``, which has the same names."""
    if isinstance(given, dict):
        return type(given)((name, _ordered(given[name], after[name])) for name in given)
    if isinstance(given, tuple | list):
        parts = map(_ordered, given, after)
        return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)
    return after


def _unlike(given: Any, after: Any, place: str = "carry") -> str:
    """Where two trees differ first, and how. Empty if they do not."""
    if type(given) is not type(after):
        return f"{place} is {an_object(after)}, and was {an_object(given)}"
    if isinstance(given, Mapping):
        parts = {key: f"{place}[{key!r}]" for key in (*given, *after)}
        before, now = given, after
    elif isinstance(given, tuple | list):
        names = getattr(given, "_fields", range(max(len(given), len(after))))
        parts = {i: f"{place}.{name}" if isinstance(name, str) else f"{place}[{name}]" for i, name in enumerate(names)}
        before, now = dict(enumerate(given)), dict(enumerate(after))
    else:
        return ""
    for key, part in parts.items():
        if key not in now or key not in before:
            return f"{part} is {'missing' if key in before else 'new'}"
        if differing := _unlike(before[key], now[key], part):
            return differing
    return ""
