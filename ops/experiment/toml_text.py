"""Writes plain tables as TOML. Sections keep their order, and tables inside a section are written inline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def toml_text(table: Mapping[str, Any]) -> str:
    """A table as TOML. Values are texts, bools, ints, finite floats, lists and tables; None leaves its key out."""
    scalars = [
        f"{_key(key)} = {_value(value)}"
        for key, value in table.items()
        if not isinstance(value, Mapping) and value is not None
    ]
    blocks = ["\n".join(scalars)] if scalars else []
    for key, section in table.items():
        if isinstance(section, Mapping):
            lines = [f"{_key(inner)} = {_value(value)}" for inner, value in section.items() if value is not None]
            blocks.append("\n".join([f"[{_key(key)}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _value(key)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # JSON and TOML have the same escapes, except that TOML escapes the delete character too.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
            return f"{{ {inner} }}" if inner else "{}"
        case list() | tuple():
            return f"[{', '.join(_value(item) for item in value)}]"
        case _:
            raise TypeError(f"{value!r} has no TOML form")
