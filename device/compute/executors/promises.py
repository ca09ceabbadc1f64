"""What a program tells beforehand of the tensors that it will return, beside what it returned."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


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
