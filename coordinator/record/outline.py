"""A state is taken apart into named tensors and a JSON outline, and put together again, equal to the bit.

A state is a frozen dataclass whose fields are tensors, scalars, text, None, tuples, lists, mappings with text or
whole-number keys, named tuples and dataclasses, nested to any depth. The outline says which value is where, and the
module and the name of each class. The classes to build are found in an example of the state, in the type hints of its
fields, and in modules that are loaded already. Nothing is ever imported or unpickled.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.wording import an_object

S = TypeVar("S")

_Place = tuple[str, str]
"""Where a class is: its module, and its name there."""
_CHANGED = "undo what was changed in the algorithm, or start a new run"


def taken_apart(value: Any, tensors: dict[str, Tensor], path: str = "state") -> Any:
    """The outline of ``value``. Its tensors are added to ``tensors`` under their path, each in memory of its own.

    Raises ConfigurationError for a value or a key that a checkpoint cannot hold.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return {"float": value.hex()}
        case Tensor():
            if value.layout is not torch.strided or value.is_meta:
                raise ConfigurationError(
                    f"{path} of the algorithm is a tensor that is sparse or has no values, which a checkpoint cannot "
                    "hold; use a dense one."
                )
            while path in tensors:  # the key "a/b", and the key "b" within "a", have the same path
                path += "'"
            tensors[path] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {"tensor": path}
        case np.generic():
            return taken_apart(value.item(), tensors, path)
        case Mapping():
            return {
                "map": [[_key(key, path), taken_apart(item, tensors, f"{path}/{key}")] for key, item in value.items()]
            }
    if _is_record(type(value)):
        kind = type(value)
        fields = {name: taken_apart(getattr(value, name), tensors, f"{path}/{name}") for name in _fields(kind)}
        return {"class": kind.__qualname__, "module": kind.__module__, "fields": fields}
    if isinstance(value, tuple | list):
        items = [taken_apart(item, tensors, f"{path}/{place}") for place, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    raise ConfigurationError(
        f"{path} of the algorithm is {an_object(value)}, which a checkpoint cannot hold; use tensors, scalars, "
        "text, tuples, mappings and dataclasses."
    )


def put_together(outline: Any, tensors: Mapping[str, Tensor], example: S) -> S:
    """The value that ``taken_apart`` took apart. A field that the outline lacks has its default.

    Raises ConfigurationError if the value is not of the example's classes.
    """
    classes: dict[_Place, type] = {}
    _collect_values(example, classes)
    value = _restore(outline, tensors, classes)
    if type(value) is not type(example):
        raise ConfigurationError(
            f"The checkpoint holds {an_object(value)}, but this experiment needs {an_object(example)}; {_CHANGED}."
        )
    return value


def _restore(outline: Any, tensors: Mapping[str, Tensor], classes: Mapping[_Place, type]) -> Any:
    match outline:
        case {"float": str(text)}:
            return float.fromhex(text)
        case {"tensor": str(name)}:
            return tensors[name]
        case {"map": list(entries)}:
            return {key: _restore(item, tensors, classes) for key, item in entries}
        case {"tuple": list(items)}:
            return tuple(_restore(item, tensors, classes) for item in items)
        case {"list": list(items)}:
            return [_restore(item, tensors, classes) for item in items]
        case {"class": str(name), "fields": dict(fields)}:
            known = _found(name, outline.get("module"), classes)
            if known is None:
                raise ConfigurationError(
                    f"The checkpoint holds a {name}, which this experiment does not know; {_CHANGED}."
                )
            if differing := (set(_fields(known)) ^ fields.keys()) - _optional(known):
                raise ConfigurationError(
                    f"The checkpoint's {name} comes from another version: it differs in {min(differing)!r}; resume the "
                    "run with the version that wrote it."
                )
            return _built(known, {field: _restore(item, tensors, classes) for field, item in fields.items()})
    return outline


def _found(name: str, module: str | None, classes: Mapping[_Place, type]) -> type | None:
    """The class of this name: the one of its module, or else of any, as when a file has moved since.

    Outlines of earlier versions name no module.
    """
    if module is not None and (known := classes.get((module, name))) is not None:
        return known
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and _is_record(found):
        return found
    return next((kind for (_, called), kind in classes.items() if called == name), None)


def _built(kind: type, values: Mapping[str, Any]) -> Any:
    """An object of ``kind`` with these fields, also with those that its constructor does not take."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    later = {field.name for field in fields if not field.init}
    built = kind(**{name: value for name, value in values.items() if name not in later})
    for name in later & values.keys():
        object.__setattr__(built, name, values[name])
    return built


def _key(key: Any, path: str) -> str | int:
    if isinstance(key, np.integer):
        return int(key)
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise ConfigurationError(f"{path} of the algorithm has the key {key!r}; use text or whole numbers.")
    return key


def _is_record(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _fields(kind: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return tuple(kind._fields)


def _optional(kind: Any) -> set[str]:
    """The fields that have a default. A checkpoint of an earlier version, which knew no such field, may lack them."""
    if dataclasses.is_dataclass(kind):
        fixed = (dataclasses.MISSING, dataclasses.MISSING)
        return {field.name for field in dataclasses.fields(kind) if (field.default, field.default_factory) != fixed}
    return set(kind._field_defaults)


def _collect(hint: Any, classes: dict[_Place, type]) -> None:
    """Add the dataclasses and named tuples that a type hint names."""
    if isinstance(hint, type) and _is_record(hint):
        if (place := (hint.__module__, hint.__qualname__)) in classes:
            return
        classes[place] = hint
        try:
            hints: Iterable[Any] = typing.get_type_hints(hint).values()
        except NameError:  # a class inside a function, or a name that only type checkers import, cannot be looked up
            hints = ()
        for inner in hints:
            _collect(inner, classes)
    for inner in typing.get_args(hint):
        _collect(inner, classes)


def _collect_values(value: Any, classes: dict[_Place, type]) -> None:
    """Add the classes of the values that an example holds."""
    if isinstance(value, Mapping):
        for item in value.values():
            _collect_values(item, classes)
    elif _is_record(type(value)):
        _collect(type(value), classes)
        for name in _fields(type(value)):
            _collect_values(getattr(value, name), classes)
    elif isinstance(value, tuple | list):
        for item in value:
            _collect_values(item, classes)
