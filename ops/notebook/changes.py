"""What has changed in a class or a function of a notebook or a script since its definition, so that its source is old.

A source is written as it stands. What it computes when it runs is looked at again here, as far as that needs no call:
bases, attributes and defaults. Methods must be those of the source.
"""

from __future__ import annotations

import ast
import dataclasses
from abc import ABCMeta
from collections import ChainMap
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from fedemu.ops.notebook.sources import source_of, value_of

_PLAIN = (bool, int, float, str, bytes, tuple, type(None))
"""Values that nobody changes in place, as a class does with a list that it has for a memory."""


def changed_since(thing: type | FunctionType, source: str, names: Mapping[str, Any]) -> str | None:
    """What the source of ``thing`` no longer says as it is, in words. None if nothing is found.

    ``names`` are those of the module in which it is defined.
    """
    match ast.parse(source).body[0]:
        case ast.FunctionDef(decorator_list=[]) as node if isinstance(thing, FunctionType):
            return next(_defaults(thing, node, names), None)
        case ast.ClassDef() as node if isinstance(thing, type) and _is_ordinary(thing, node):
            return next(_parts(thing, node, names), None)
    return None


def _is_ordinary(thing: type, node: ast.ClassDef) -> bool:
    """Whether a class is what its body says: neither a decorator nor a metaclass makes something else of it."""
    bare = not node.decorator_list or (dataclasses.is_dataclass(thing) and len(node.decorator_list) == 1)
    return bare and type(thing) in (type, ABCMeta)


def _defaults(function: FunctionType, node: ast.FunctionDef, names: Mapping[str, Any]) -> Iterator[str]:
    given = node.args
    last = [*given.posonlyargs, *given.args][-len(given.defaults) :] if given.defaults else []
    named = [(arg.arg, default) for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default]
    known = dict(zip((arg.arg for arg in last), function.__defaults__ or (), strict=False))
    known |= function.__kwdefaults__ or {}
    for name, default in [*zip((arg.arg for arg in last), given.defaults, strict=True), *named]:
        if name not in known or _differs(default, known[name], names):
            yield f"the default of {name} in {function.__qualname__}"


def _parts(thing: type, node: ast.ClassDef, names: Mapping[str, Any]) -> Iterator[str]:
    for expression, base in zip(node.bases, getattr(thing, "__orig_bases__", thing.__bases__), strict=False):
        if _differs(expression, base, names):
            yield f"the base {ast.unparse(expression)}"
    bound = dict(_bound(node))
    inner = ChainMap(dict(vars(thing)), dict(names))
    for name, value in vars(thing).items():
        what = f"{thing.__qualname__}.{name}"
        function = getattr(value, "__func__", value)
        match bound.get(name):
            case ast.FunctionDef(decorator_list=[]) as method:
                if not isinstance(function, FunctionType) or function.__qualname__ != what:
                    yield what
                else:
                    yield from _defaults(function, method, inner)
            case ast.expr() as expression:
                if not name.startswith("__") and _differs(expression, value, inner):
                    yield what
            case None if name not in bound:
                own = isinstance(function, FunctionType) and function.__module__ == thing.__module__
                if function.__qualname__ != what if own else isinstance(value, _PLAIN) and not name.startswith("_"):
                    yield what


def _bound(node: ast.ClassDef) -> Iterator[tuple[str, ast.FunctionDef | ast.expr | None]]:
    """The names that the body of a class binds, with the function or the expression. None for all that is not clear."""
    for item in node.body:
        match item:
            case ast.FunctionDef(name=name):
                yield name, item
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                yield name, value
            case _:
                for part in ast.walk(item):
                    match part:
                        case ast.Name(id=name, ctx=ast.Store()) | ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                            yield name, None
                        case ast.alias(name=name, asname=other):
                            yield other or name, None


def _differs(expression: ast.expr, value: Any, names: Mapping[str, Any]) -> bool:
    """Whether an expression is known to have another value now."""
    try:
        now = value_of(expression, names)
    except ValueError:
        return False
    if now is value:
        return False
    if isinstance(now, type | FunctionType) and isinstance(value, type | FunctionType):
        home = value.__module__
        # A cell that ran again has defined the same once more.
        return now.__module__ != home or source_of(now, home) != source_of(value, home)
    return isinstance(value, _PLAIN) and (type(now) is not type(value) or now != value)
