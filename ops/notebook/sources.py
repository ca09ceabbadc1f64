"""The source of what a notebook's cells or a script have defined, as Python keeps it for tracebacks."""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from operator import itemgetter
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from fedemu.protocol.host.paths import is_file

_WITHOUT_CALL = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.BitOr, ast.Tuple, ast.List, ast.Load, ast.Constant),
)
"""The parts of an expression that names something and computes nothing."""


def source_of(thing: type | FunctionType, home: str) -> str | None:
    """The source of a class or a function of ``__main__``, with its decorators. None if it is not at hand.

    That of a script is not at hand if somebody has edited the script since.
    """
    codes = codes_of(thing)
    if codes or isinstance(thing, FunctionType):
        found = None
        for code in codes:
            lines = linecache.getlines(code.co_filename)
            for _, place, text in _definitions(lines, thing.__name__):
                if code.co_firstlineno in place:
                    if is_file(Path(code.co_filename)) and code not in _compiled(lines, code.co_flags):
                        return None
                    found = text
        return found
    # A class without functions of its own, such as a dataclass. Some of the cells may never have come so far.
    fitting = [
        (_mismatches(thing, node), text)
        for lines in _cells(home)
        for node, place, text in _definitions(lines, thing.__name__)
        if isinstance(node, ast.ClassDef) and _may_be(thing, node, place)
    ]
    return min(reversed(fitting), key=itemgetter(0))[1] if fitting else None


def codes_of(thing: type | FunctionType) -> list[CodeType]:
    """The code of a function, or of the functions in the body of a class, as far as its source is at hand."""
    if isinstance(thing, FunctionType):
        return [inspect.unwrap(thing).__code__]
    found = []
    for value in vars(thing).values():
        inner = getattr(value, "__func__", getattr(value, "fget", value))
        inner = inspect.unwrap(inner) if callable(inner) else None
        if not isinstance(inner, FunctionType) or inner.__module__ != thing.__module__:
            continue  # collections gives a NamedTuple functions that are called after it
        if inner.__qualname__.startswith(f"{thing.__qualname__}."):
            found.append(inner.__code__)
    # What dataclasses make is of "<string>", and so is all of python -c, whose lines Python 3.13 keeps.
    return [code for code in found if code.co_filename != "<string>" and linecache.getlines(code.co_filename)]


def _compiled(lines: list[str], flags: int) -> Iterator[CodeType]:
    """The code of everything in a source."""
    futures = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
    try:
        waiting = [compile("".join(lines), "<script>", "exec", flags & futures, dont_inherit=True)]
    except SyntaxError:
        return
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [part for part in code.co_consts if isinstance(part, CodeType)]


def _cells(home: str) -> Iterator[list[str]]:
    """The lines of the script, or of every cell that was run, in their order. A cell that ran again comes again."""
    main = getattr(sys.modules[home], "__file__", None)
    if main:
        yield linecache.getlines(main)
    for name in list(linecache.cache):
        if "ipykernel" in name or "ipython-input" in name:
            yield linecache.getlines(name)
    for text in getattr(sys.modules[home], "_ih", []):  # what IPython knows as the inputs so far
        yield text.splitlines(keepends=True)


def _definitions(lines: list[str], name: str) -> Iterator[tuple[ast.stmt, range, str]]:
    """The definitions of ``name`` at the left margin, each with the numbers of its lines and its text."""
    for node in _statements(lines):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            last = node.end_lineno or first
            yield node, range(first, last + 1), "".join(lines[first - 1 : last]).rstrip()


def _statements(lines: list[str]) -> list[ast.stmt]:
    try:
        return ast.parse("".join(lines)).body
    except SyntaxError:
        return []


def _may_be(thing: type, node: ast.ClassDef, place: range) -> bool:
    """Whether a definition can be that of a class: it has its line, where Python tells that, and its annotations."""
    known = {*vars(thing), *vars(thing).get("__annotations__", {})}
    annotated = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
    names = {target.id for target in annotated if isinstance(target, ast.Name)}
    return vars(thing).get("__firstlineno__", place.start) == place.start and names <= known


def _mismatches(thing: type, node: ast.ClassDef) -> int:
    """The number of attributes of a class that have another value than its definition writes down."""
    found = 0
    for item in node.body:
        match item:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=expression)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as expression)
            ):
                with suppress(ValueError):  # it is no literal
                    now = getattr(thing, name, None)
                    found += repr(ast.literal_eval(expression)) != repr(now.value if isinstance(now, Enum) else now)
    return found


def submodules(name: str, home: str) -> list[str]:
    """The modules below the module ``name`` that cells import by their whole names, as ``import xml.dom.minidom``."""
    imports = (node for lines in _cells(home) for node in _statements(lines) if isinstance(node, ast.Import))
    whole = (alias.name for node in imports for alias in node.names if alias.asname is None)
    return list(dict.fromkeys(module for module in whole if module.startswith(f"{name}.")))


def alias_of(name: str, value: Any, home: str) -> str | None:
    """The last statement of a cell that would give ``name`` this value now, by an import or without a call. Or None."""
    found = None
    for lines in _cells(home):
        for node in _statements(lines):
            match node:
                case ast.ImportFrom(module=str(module), names=names, level=0):
                    for imported in names:
                        of_all = imported.name == "*"
                        same = getattr(sys.modules.get(module), name if of_all else imported.name, home) is value
                        if same and (of_all or (imported.asname or imported.name) == name):
                            found = f"from {module} import {name if of_all else imported.name} as {name}"
                case ast.Assign(targets=[ast.Name(id=target)], value=expression) if target == name:
                    if _gives(expression, value, vars(sys.modules[home])):
                        found = ast.unparse(node)
    return found


def _gives(expression: ast.expr, value: Any, names: Mapping[str, Any]) -> bool:
    """Whether an expression that only names something has this value now."""
    if not all(isinstance(part, _WITHOUT_CALL) for part in ast.walk(expression)):
        return False
    try:
        found = eval(compile(ast.Expression(expression), "<cell>", "eval"), dict(names))
        return found is value or (type(found) is type(value) and bool(found == value))
    except Exception:  # a name is gone, or the values cannot be compared
        return False
