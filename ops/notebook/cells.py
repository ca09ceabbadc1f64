"""Code that a notebook's cell or a script defines, brought to the other processes of a run.

A fleet loads code by its name, and no other process has this one's ``__main__``. So the source of a class or a
function is written to a file, with the source of everything of ``__main__`` that it uses. Modules are imported by name,
and plain values are written as they are. What cannot be written so that it means the same there is refused.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import hashlib
import importlib.util
import symtable
import sys
import textwrap
from functools import cached_property
from types import FunctionType, ModuleType
from typing import Any

from fedemu.ops.notebook.again import changed_since
from fedemu.ops.notebook.elsewhere import require_elsewhere
from fedemu.ops.notebook.sources import alias_of, codes_of, source_of, submodules
from fedemu.protocol.code.named import CELLS
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import usable, write_among_others
from fedemu.protocol.host.paths import is_file
from fedemu.protocol.wording import an_object

_LONGEST = 20_000
"""Characters of the longest plain value that is written."""
_DIGITS = 12
_LAMBDA = "<lambda>"
_FUTURE = "from __future__ import annotations"
_AT_ONCE = frozenset({"lambda", "listcomp", "setcomp", "dictcomp", "genexpr"})
"""What ``symtable`` calls functions that an expression makes, and perhaps calls: a decorator may call a lambda."""


def name_of(thing: Any, setting: str) -> str:
    """The name by which every process finds a class or a function: ``module:Name`` or ``file.py:Name``.

    The file is written if ``thing`` is of ``__main__``; its name has the digest of its content. ``setting`` names the
    setting in errors. Raises ConfigurationError if other processes cannot have ``thing``.
    """
    name = getattr(thing, "__name__", "")
    if not isinstance(thing, type | FunctionType):
        raise ConfigurationError(
            f"{setting} = {short(thing)} is an object; name a class, or a function that makes such an object"
        )
    if name == _LAMBDA:
        raise ConfigurationError(
            f"{setting} is a lambda, which has no name by which other processes could find it; write it with def, at "
            "the left margin of a cell or a file"
        )
    if not name.isidentifier() or thing.__qualname__ != name:
        raise ConfigurationError(
            f"{setting} = {thing.__qualname__} is defined inside of something else, where other processes "
            "can't find it; define it at the left margin of a cell or a file"
        )
    if _is_found(thing.__module__):
        require_elsewhere(thing.__module__, setting, name)
        return f"{thing.__module__}:{name}"
    text = Written(setting, name, thing.__module__).text
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
    path = CELLS / f"{name.lower()}_{digest}.py"
    with usable(CELLS, "start Python in a folder that can be written"):
        if not is_file(path):
            CELLS.mkdir(exist_ok=True)
            write_among_others(path, text.encode())
    return f"{path}:{name}"


class Written:
    """The text of a module that defines one name of the module ``home``, such as ``__main__``, and all that it uses."""

    def __init__(self, setting: str, name: str, home: str) -> None:
        self._setting = setting
        self._name = name
        self._home = home
        self._names = vars(sys.modules[home])
        self._parts: dict[str, str] = {}
        self._begun: set[str] = set()
        self._future = False

    @cached_property
    def text(self) -> str:
        """The module. Raises ConfigurationError if a part of it cannot be written."""
        self._add(self._name)
        imports = [part for part in self._parts.values() if part.startswith(("import ", "from "))]
        others = [part for part in self._parts.values() if part not in imports]
        head = f'"""{self._name}, as it was defined in a notebook or a script. Written by fedemu."""'
        if self._future:
            head += f"\n\n{_FUTURE}"
        text = "\n\n\n".join([head, *(["\n".join(imports)] if imports else []), *others]) + "\n"
        if changed := changed_since(text, self._home, [name for name in self._parts if self._is_own(name)]):
            source = self._names[changed.name].__name__
            raise self._refusal(f"the source of {source} no longer says what {changed.what} is (run it again)")
        return text

    def _is_own(self, name: str) -> bool:
        """Whether a name means a class or a function that stands at the left margin of this module."""
        value = self._names[name]
        is_code = isinstance(value, type | FunctionType) and value.__module__ == self._home
        return is_code and value.__qualname__ == value.__name__

    def _add(self, name: str) -> None:
        """Write the parts that the definition of ``name`` reads, then its own, and then those that its functions read.

        Two classes may name each other in their methods, which run when both are there.
        """
        if name in self._begun or name not in self._names:
            return
        self._begun.add(name)
        value = self._names[name]
        if getattr(value, "__wrapped__", value) is getattr(builtins, name, self):  # IPython wraps ``open``.
            return
        part, own = self._part(name, value), self._is_own(name)
        future = own and _has_future(value)
        self._future |= future
        at_once, later = _used(part, future=future)
        for used in sorted(at_once):
            self._add(used)
        if own:
            begins_from_it = _begins_from(part, name) and not hasattr(builtins, name)
            if begins_from_it or (name != value.__name__ in self._parts and self._names[value.__name__] is not value):
                raise self._refusal(f"it uses {name}, which is an earlier {value.__name__}")
            part += "" if value.__name__ == name else f"\n\n\n{name} = {value.__name__}"
        self._parts[name] = part
        for used in sorted(later):
            self._add(used)

    def _part(self, name: str, value: Any) -> str:
        """The source that gives ``name`` its value."""
        if isinstance(value, ModuleType) and value.__name__ != self._home:
            require_elsewhere(value.__name__, self._setting, self._name)
            if value.__name__ != name:
                return f"import {value.__name__} as {name}"
            return "\n".join(f"import {module}" for module in submodules(name, self._home) or [name])
        origin = getattr(value, "__module__", None)
        for true_name in (getattr(value, "__qualname__", None), getattr(value, "__name__", None)):
            if not origin or origin == self._home or not true_name:
                continue
            if getattr(sys.modules.get(origin), true_name, self) is value:
                require_elsewhere(origin, self._setting, self._name)
                return f"from {origin} import {true_name}" + (f" as {name}" if true_name != name else "")
        if self._is_own(name):
            if value.__name__ == _LAMBDA:
                raise self._refusal(f"it uses {name}, which is a lambda (write it with def)")
            source = source_of(value, self._home)
            if source is None:
                raise self._refusal(f"the source of {value.__name__} is not at hand, or no longer what ran")
            return source
        if _is_plain(value):
            return f"{name} = {value!r}"
        alias = alias_of(name, value, self._home)
        if alias is not None:
            return alias
        inner = isinstance(value, type | FunctionType)
        what = "defined inside of something else" if inner else f"{an_object(value)} and no code"
        raise self._refusal(f"it uses {name}, which is {what}")

    def _refusal(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self._setting} = {self._name} can't be brought to other processes: {why}; put {self._name} and all that "
            f"it uses into a cell that begins with %%writefile mine.py, run that cell, and write "
            f'{self._setting}="mine:{self._name}"'
        )


def _begins_from(source: str, name: str) -> bool:
    """Whether a decorator or a base of a definition has the name: it is an earlier thing that is called so."""
    node: Any = ast.parse(source).body[0]
    begun = [*node.decorator_list, *getattr(node, "bases", [])]
    return any(isinstance(part, ast.Name) and part.id == name for one in begun for part in ast.walk(one))


def _has_future(thing: type | FunctionType) -> bool:
    """Whether the annotations of a class or a function are not evaluated at its definition."""
    return any(code.co_flags & __future__.annotations.compiler_flag for code in codes_of(thing))


def _used(source: str, *, future: bool) -> tuple[set[str], set[str]]:
    """The global names that a source reads when it runs, and those that it reads later: in functions that are called.

    With ``future`` annotations are not evaluated. Somebody may do it later.
    """
    at_once: set[str] = set()
    later: set[str] = set()

    def visit(table: symtable.SymbolTable, names: set[str]) -> None:
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (top or symbol.is_global()):
                names.add(symbol.get_name())
        for child in table.get_children():
            waits = child.get_type() in ("function", "annotation") and child.get_name() not in _AT_ONCE
            visit(child, later if waits else names)

    if future:
        visit(symtable.symtable(source, "<cell>", "exec"), later)
        source = f"{_FUTURE}\n{source}"
    visit(symtable.symtable(source, "<cell>", "exec"), at_once)
    return at_once, later - at_once


def _is_found(module: str) -> bool:
    """Whether other processes find a module by its name."""
    try:
        return module != "__main__" and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _is_plain(value: Any) -> bool:
    """Whether a value can be written as a literal and means the same."""
    text = repr(value) if isinstance(value, bool | int | float | str | bytes | tuple | list | dict | set | None) else ""
    if not text or len(text) > _LONGEST:
        return False
    try:
        read = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return type(read) is type(value) and bool(read == value)


def short(value: Any) -> str:
    """A value in a sentence: at most 60 characters of it."""
    return textwrap.shorten(repr(value), 60, placeholder=" ...")
