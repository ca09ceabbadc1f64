"""Whether the classes and functions of a notebook or a script are still what their source says.

A class may have got another attribute since its cell ran, or the variable of a default another value. So the source is
run once more, which gives classes and functions that are as it says. These are compared with those of the notebook.
"""

from __future__ import annotations
import __future__

import dataclasses
import dis
import functools
import inspect
import operator
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from itertools import zip_longest
from types import CellType, CodeType, EllipsisType, FunctionType, MappingProxyType, MethodType
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, range, slice, type(None), EllipsisType)
_MEMORY = (list, dict, set, bytearray, deque)
"""What a class has for a memory, if it is empty in the source."""
_KNOWN = (*_PLAIN, *_MEMORY, tuple, frozenset, type, FunctionType, classmethod, staticmethod, property)
"""Values that somebody gives an attribute. Others may be there because a library keeps something with the class."""
_CACHING = type(functools.cache(len))
_ABSENT = object()
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_FUTURES = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


def first_change(
    here: Mapping[str, Any], again: tuple[Mapping[str, Any], Mapping[str, Any]], parts: Sequence[str]
) -> tuple[str, str] | None:
    """The first of ``parts`` that ``here`` is something else than its source says, and what has changed, in words.

    ``again`` is what the source has given in two runs. What differs between these, such as a random number, can tell
    nothing. None if no change is found.
    """
    found, unsure = _Comparison(), _Comparison()
    once, twice = again
    for name in parts:
        passed = set(unsure.of(twice[name], once[name], name))
        for what in found.of(here[name], once[name], name):
            if what not in passed:
                return name, what
    return None


class _Comparison:
    """Compares values of the notebook with those that its source gives, and what they are made of.

    What it does not know, such as a layer of a network, counts as the same.
    """

    def __init__(self) -> None:
        self._begun: set[tuple[int, int]] = set()

    def of(self, here: Any, there: Any, what: str) -> Iterator[str]:
        """What differs, in words. ``what`` is the name of the value itself."""
        pair = id(here), id(there)
        if here is there or pair in self._begun:  # a method knows its class, which knows the method
            return
        self._begun.add(pair)
        if not _same_name(type(here), type(there)):
            yield what
        elif isinstance(here, type):
            yield from self._of_classes(here, there, what)
        elif isinstance(here, FunctionType):
            yield from self._of_functions(here, there, what)
        elif isinstance(there, _MEMORY) and not there:
            return
        elif (parts := _parts(here)) is not None:
            others = _parts(there) or ()
            if len(parts) != len(others) or any(any(self.of(*pair, what)) for pair in zip(parts, others, strict=True)):
                yield what
        elif not _equal(here, there):
            yield what

    def _of_classes(self, here: type, there: type, what: str) -> Iterator[str]:
        if not _same_name(here, there):
            yield what
            return
        for mine, other in zip_longest(here.__bases__, there.__bases__):
            if any(self.of(mine, other, what)):
                yield f"the base {(mine or other).__name__}"
        for name in sorted({**vars(there), **vars(here)}, key=lambda name: name.startswith("_")):
            mine, other = vars(here).get(name, _ABSENT), vars(there).get(name, _ABSENT)
            if _counts(name, mine, other, here.__module__):
                yield from self.of(mine, other, f"{here.__qualname__}.{name}")

    def _of_functions(self, here: FunctionType, there: FunctionType, what: str) -> Iterator[str]:
        if not _same_code(here.__code__, there.__code__):
            yield what
            return
        mine, other = _defaults(here), _defaults(there)
        for name in {**other, **mine}:
            if any(self.of(mine.get(name, _ABSENT), other.get(name, _ABSENT), what)):
                yield f"the default of {name} in {what}"
        # What a decorator has got as an argument is in the closure of the function that it has made.
        for known, seen in zip(here.__closure__ or (), there.__closure__ or (), strict=True):
            if any(self.of(_content(known), _content(seen), what)):
                yield what
                return


def _same_name(one: type, other: type) -> bool:
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def _counts(name: str, here: Any, there: Any, module: str) -> bool:
    """Whether an attribute of a class is compared. One of the two values may be absent."""
    given = there if here is _ABSENT else here
    inner = getattr(given, "__func__", given)
    own = isinstance(inner, FunctionType) and inner.__module__ == module
    if name.startswith("__") and name.endswith("__"):
        return own and not name.startswith("__annot")  # Python makes what annotates
    if here is _ABSENT or there is _ABSENT:
        return own or (not name.startswith("_") and (isinstance(given, _KNOWN) or _is_array(given)))
    return not (name.startswith("_") and there is None)  # a place for something that is made later


def _defaults(function: FunctionType) -> dict[str, Any]:
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    return dict(zip(names[len(names) - len(given) :], given, strict=True)) | (function.__kwdefaults__ or {})


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _same_code(one: CodeType, other: CodeType) -> bool:
    """Whether code is the same, wherever it stands."""
    if one.co_flags & ~_FUTURES != other.co_flags & ~_FUTURES or len(one.co_consts) != len(other.co_consts):
        return False
    for name in ("co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount"):
        if getattr(one, name) != getattr(other, name):
            return False
    return _steps(one) == _steps(other) and all(
        _same_code(mine, its) if isinstance(mine, CodeType) and isinstance(its, CodeType) else repr(mine) == repr(its)
        for mine, its in zip(one.co_consts, other.co_consts, strict=True)
    )


def _steps(code: CodeType) -> list[tuple[str, Any]]:
    """The instructions of code. Python compiles ``math.sqrt(x)`` in another way if ``math`` is imported beside it."""
    kept = [step for step in dis.get_instructions(code) if step.opname not in ("PUSH_NULL", "EXTENDED_ARG")]
    places = [step.offset for step in kept]

    def argument(step: dis.Instruction) -> Any:
        if step.opcode in _JUMPS:
            return bisect_left(places, step.argval)
        return step.argval if step.opcode in dis.hasname else step.arg

    return [("LOAD_ATTR" if step.opname == "LOAD_METHOD" else step.opname, argument(step)) for step in kept]


def _parts(value: Any) -> Sequence[Any] | None:
    """What a value consists of. None if it has no parts, or none that are known."""
    match value:
        case Enum():
            return [value.name, value.value]
        case dict() | MappingProxyType():
            return [*value, *value.values()]
        case list() | tuple() | deque():
            return [*value]
        case staticmethod() | classmethod():
            return [value.__func__]
        case property():
            return [value.fget, value.fset, value.fdel]
        case functools.cached_property():
            return [value.func]
        case functools.partial() | functools.partialmethod():
            return [value.func, value.args, value.keywords]
        case MethodType():
            return [value.__func__, value.__self__]
        case _ if dataclasses.is_dataclass(value):
            return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        case _ if isinstance(value, _CACHING):
            return [value.__wrapped__]
    return None


def _equal(here: Any, there: Any) -> bool:
    """Whether two values of one type are equal. Also true if nobody can tell."""
    with suppress(Exception):
        if isinstance(here, _PLAIN):
            return repr(here) == repr(there)  # also for NaN, and for -0.0
        if _is_array(here):
            if (here.dtype, here.shape) != (there.dtype, there.shape):
                return False
            return bool(((here == there) | ((here != here) & (there != there))).all())
        by_value = _has_own(here, "__eq__") and _has_own(here, "__hash__")
        if by_value or isinstance(here, set | bytearray) or inspect.isroutine(here):
            return bool(here == there)
        # What there is once, such as a dtype of torch, is pickled by its name.
        return not (_has_own(here, "__reduce__") and isinstance(here.__reduce__(), str))
    return True


def _has_own(value: Any, method: str) -> bool:
    """Whether the type of a value has a method, and another one than every object has."""
    return getattr(type(value), method) not in (None, getattr(object, method))


def _is_array(value: Any) -> bool:
    """Whether a value is an array of numpy, a tensor or the like."""
    with suppress(Exception):
        return not isinstance(value, type) and hasattr(value, "dtype") and hasattr(value, "shape")
    return False
