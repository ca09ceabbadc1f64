"""JSON as the run directory holds it: objects on lines of their own, without NaN and infinities."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fedemu.protocol.errors import ConfigurationError

T = TypeVar("T")


def plain(value: Any) -> Any:
    """The value as JSON knows it: arrays and tuples as lists, NaN and infinities as None, anything else as text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case tuple() | list():
            return [plain(item) for item in value]
        case set() | frozenset():
            return [plain(item) for item in sorted(value)]
    if hasattr(value, "tolist"):  # arrays and scalars of numpy, without importing it
        return plain(value.tolist())
    return str(value)


def to_line(values: Mapping[str, Any]) -> bytes:
    """One JSON object on one line, with its line break."""
    return json.dumps(plain(values), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def read_lines(path: Path, made: Callable[[dict[str, Any]], T] = dict) -> list[T]:
    """What is ``made`` of each object of a log; empty if there is no such file.

    A last line without a line break is still being written and does not count. ConfigurationError names the line that
    holds no JSON object, or for which ``made`` raises ValueError.
    """
    if not path.is_file():
        return []
    text = path.read_bytes()
    lines = text[: text.rfind(b"\n") + 1].splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        if line:
            place = f"line {number} of {path}"
            value = read_object(line, place)
            try:
                found.append(made(value))
            except ValueError as error:
                raise damaged(place, str(error)) from error
    return found


def read_object(text: bytes, place: Path | str) -> dict[str, Any]:
    """The JSON object that ``text`` holds; ConfigurationError that names ``place`` if it holds none."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise damaged(place, str(error)) from error
    if not isinstance(value, dict):
        raise damaged(place, "it holds no JSON object")
    return value


def damaged(place: Path | str, cause: str) -> ConfigurationError:
    """The error for a part of a run directory that cannot be read."""
    return ConfigurationError(f"{place} cannot be read: {cause}; mend the file or leave out the run")
