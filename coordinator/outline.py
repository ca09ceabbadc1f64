"""Taking a state apart into named tensors and a JSON outline, and putting it together again, bit for bit.

A state is a frozen dataclass whose fields are tensors, scalars, text, None, tuples, lists, mappings with text or
whole-number keys, named tuples and dataclasses, nested as one likes. The outline says what stands where; an example of
the state tells which classes to build. Nothing is ever unpickled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedemu.protocol.errors import FedemuError

S = TypeVar("S")


def flatten(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """The outline of ``value``; its tensors are added to ``tensors`` under their path, each in memory of its own."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return {"float": value.hex()}
        case Tensor():
            tensors[path] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {"tensor": path}
        case np.generic():
            return flatten(value.item(), tensors, path)
        case Mapping():
            return {"map": [_entry(key, item, tensors, path) for key, item in value.items()]}
        case tuple() | list():
            items = [flatten(item, tensors, f"{path}/{place}") for place, item in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": items}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: flatten(getattr(value, field.name), tensors, f"{path}/{field.name}")
            for field in dataclasses.fields(value)
        }
        return {"class": type(value).__qualname__, "fields": fields}
    raise TypeError(f"the state's {path or 'value'} is a {type(value).__name__}, which a checkpoint cannot hold")


def restore(outline: Any, tensors: Mapping[str, Tensor], example: S, path: str = "") -> S:
    """The value that ``flatten`` took apart, built of the example's classes; FedemuError where they do not fit."""
    return _restore(outline, tensors, example, path)  # type: ignore[no-any-return]


def _entry(key: Any, item: Any, tensors: dict[str, Tensor], path: str) -> list[Any]:
    if isinstance(key, np.integer):
        key = int(key)
    if not isinstance(key, str | int) or isinstance(key, bool):
        raise TypeError(f"the state's {path} has the key {key!r}; a checkpoint holds text and whole numbers as keys")
    return [key, flatten(item, tensors, f"{path}/{key!r}" if isinstance(key, int) else f"{path}/{key}")]


def _restore(outline: Any, tensors: Mapping[str, Tensor], example: Any, path: str) -> Any:
    match outline:
        case {"float": str(text)}:
            return float.fromhex(text)
        case {"tensor": str(name)}:
            return tensors[name]
        case {"map": list(entries)}:
            known = example if isinstance(example, Mapping) else {}
            # Mappings by device or task grow: any entry of the example tells the class of those it lacks.
            other = next(iter(known.values()), None)
            return {key: _restore(item, tensors, known.get(key, other), f"{path}/{key}") for key, item in entries}
        case {"tuple": list(items)}:
            restored = [
                _restore(item, tensors, _at(example, place), f"{path}/{place}") for place, item in enumerate(items)
            ]
            if isinstance(example, tuple) and hasattr(example, "_fields"):
                return type(example)(*restored)
            return tuple(restored)
        case {"list": list(items)}:
            return [_restore(item, tensors, _at(example, place), f"{path}/{place}") for place, item in enumerate(items)]
        case {"class": str(name), "fields": dict(fields)}:
            return _restore_class(name, fields, tensors, example, path)
    return outline


def _restore_class(name: str, fields: dict[str, Any], tensors: Mapping[str, Tensor], example: Any, path: str) -> Any:
    where = f"the checkpoint's {path.removeprefix('/')}" if path else "the checkpoint"
    if not dataclasses.is_dataclass(example) or type(example).__qualname__ != name:
        raise FedemuError(f"{where} holds a {name}, but this experiment needs a {type(example).__name__}")
    known = {field.name for field in dataclasses.fields(example)}
    if known != fields.keys():
        raise FedemuError(f"{where} holds a {name} whose field {min(known ^ fields.keys())!r} is not in both versions")
    values = {
        field: _restore(item, tensors, getattr(example, field), f"{path}/{field}") for field, item in fields.items()
    }
    return type(example)(**values)


def _at(example: Any, place: int) -> Any:
    if isinstance(example, tuple | list) and example:
        return example[min(place, len(example) - 1)]
    return None
