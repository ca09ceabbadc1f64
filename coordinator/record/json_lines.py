"""JSON as the run directory holds it: objects on lines of their own, without NaN and infinities."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import is_file


def plain(value: Any) -> Any:
    """The value as JSON knows it: arrays and tuples as lists, NaN and infinities as None, other objects as text."""
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


def strange(value: Any, name: str = "") -> tuple[str, Any] | None:
    """The name and the value of the first part that JSON does not know, so that ``plain`` would make a text of it.

    Parts of a mapping are named by their keys, as in ``replay.periods``. None if there is no such part.
    """
    match value:
        case None | bool() | int() | float() | str():
            return None
        case Mapping():
            parts = ((f"{name}.{key}" if name else str(key), item) for key, item in value.items())
        case tuple() | list() | set() | frozenset():
            parts = ((name, item) for item in value)
        case _:
            return strange(value.tolist(), name) if hasattr(value, "tolist") else (name, value)
    return next((found for key, item in parts if (found := strange(item, key)) is not None), None)


def to_line(values: Mapping[str, Any]) -> bytes:
    """One JSON object on one line, with its line break."""
    return json.dumps(plain(values), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a log; empty if there is no such file. Raises ConfigurationError for a damaged line."""
    text = path.read_bytes() if is_file(path) else b""
    # A last line without a line break is still being written and does not count.
    return [value for _, value in numbered_lines(path, text[: text.rfind(b"\n") + 1])]


def numbered_lines(path: Path, text: bytes, before: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in ``text``, whole lines of a log, each with the number of its line. ``before`` lines come before.

    Raises ConfigurationError for a damaged line.
    """
    for number, line in enumerate(text.splitlines(), before + 1):
        if line:
            yield number, read_object(line, place_of(path, number))


def place_of(path: Path, number: int) -> str:
    """Words for a line of a log, such as ``line 3 of metrics.jsonl``."""
    return f"line {number} of {path}"


def read_object(text: bytes, place: Path | str) -> dict[str, Any]:
    """The JSON object that ``text`` holds. Raises ConfigurationError that names ``place`` if it holds none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(place, str(error)) from error
    if not isinstance(value, dict):
        raise damaged(place, "it holds no JSON object")
    return value


def object_in(text: bytes | str) -> dict[str, Any] | None:
    """The JSON object that ``text`` holds. None if it holds none, as where a line is damaged or was cut off."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def damaged(place: Path | str, cause: str) -> ConfigurationError:
    """The error for a part of a run directory that cannot be read."""
    return ConfigurationError(f"{place} cannot be read: {cause}; mend the file or leave out the run")
