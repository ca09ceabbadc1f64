"""Rows and settings in the form that trackers know: numbers and texts by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedemu.coordinator.record.row import Row


def numbers_of(row: Row) -> dict[str, float]:
    """All numbers of a row. The value of class 3 is ``class_accuracy/3``. What was not measured is left out."""
    return {
        name: float(value)
        for name, value in _flat(row.to_json(), "/")
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and name != "round"
    }


def names_of(row: Row) -> set[str]:
    """The names of all values of a row, in the form of ``numbers_of``, also of those that were not measured."""
    return {name for name, _ in _flat(row.to_json(), "/")}


def parameters_of(table: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """The settings of an experiment by dotted key. A list is a text. What is not set is left out."""
    return {
        name: value if isinstance(value, str | int | float | bool) else str(value)
        for name, value in _flat({key: _listed(value) for key, value in table.items()}, ".")
        if value is not None
    }


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _listed(inner) for key, inner in value.items()}
    return str(list(value)) if isinstance(value, list | tuple) else value


def _flat(value: Any, between: str, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items = [(str(key), inner) for key, inner in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        items = [(str(place), inner) for place, inner in enumerate(value)]
    else:
        yield path, value
        return
    for key, inner in items:
        yield from _flat(inner, between, f"{path}{between}{key}" if path else key)
