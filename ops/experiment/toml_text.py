"""Writes plain tables as TOML. Sections keep their order, and tables inside a section are written inline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SCHEMA_FILE = "experiment.schema.json"
SCHEMA_LINE = f"#:schema ./{SCHEMA_FILE}"
"""The line by which editors (Taplo, Even Better TOML) find the schema of an experiment, beside its file."""
_COMMENT_COLUMN = 40
"""Where a comment begins in its line, if the value leaves room for it."""


def toml_text(table: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """A table as TOML. Values are texts, bools, ints, finite floats, lists and tables; None leaves its key out.

    ``comments`` holds a comment for some keys, such as ``seed`` or ``local.lr``. That of a section, such as ``local``,
    stands above it, and may have several lines.
    """
    said = comments or {}
    scalars = [
        _line(key, value, said.get(key))
        for key, value in table.items()
        if not isinstance(value, Mapping) and value is not None
    ]
    blocks = ["\n".join(scalars)] if scalars else []
    for key, section in table.items():
        if isinstance(section, Mapping):
            above = [f"# {line}".rstrip() for line in said.get(key, "").splitlines()]
            lines = [
                _line(inner, value, said.get(f"{key}.{inner}")) for inner, value in section.items() if value is not None
            ]
            blocks.append("\n".join([*above, f"[{toml_key(key)}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def _line(key: str, value: Any, comment: str | None) -> str:
    line = f"{toml_key(key)} = {toml_value(value)}"
    return line if comment is None else f"{line:<{_COMMENT_COLUMN}} # {comment}"


def toml_key(key: str) -> str:
    """One part of a key as TOML writes it: in quotation marks if it has other signs than letters, digits, - and _."""
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else toml_value(key)


def toml_value(value: Any) -> str:
    """A value as TOML writes it behind a key. Raises TypeError if it has no TOML form."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return int.__repr__(value)
        case float():
            return float.__repr__(value)  # a number of numpy is a float, too, and would name its type
        case str():
            # JSON and TOML have the same escapes, except that TOML escapes the delete character too.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            inner = ", ".join(
                f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items() if item is not None
            )
            return f"{{ {inner} }}" if inner else "{}"
        case list() | tuple():
            return f"[{', '.join(toml_value(item) for item in value)}]"
        case _:
            raise TypeError(f"{value!r} has no TOML form")
