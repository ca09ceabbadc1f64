"""Presets and their parts as TOML with comments, as ``fedemu presets NAME`` prints them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedemu.ops.experiment.presets import (
    JOINT,
    OF_FILES,
    chain,
    example_of,
    kind_of,
    part_names,
    part_path,
    part_table,
    preset,
    preset_path,
)
from fedemu.ops.experiment.toml_text import SCHEMA_LINE, toml_text

_COMMENTED = re.compile(r"(?P<key>[A-Za-z0-9_-]+) = (?P<value>.+?)\s+# (?P<comment>.+)")


def printed(name: str) -> str:
    """A preset or a part as TOML with its comments. A preset is a complete experiment, which can be saved and run.

    What is made of several files is printed as one. Raises ConfigurationError with the nearest names if there is none.
    """
    if name in part_names():
        files, table = chain(part_path(name)), part_table(name)
        said = [f"A {kind_of(name)}, which follows a preset, as in {example_of(name)}"]
    else:
        table = preset(name)
        setting, *parts = name.split(JOINT)
        files = [*chain(preset_path(setting)), *(path for part in parts for path in chain(part_path(part)))]
        own = [] if parts else _methods_of(files)
        said = [f"For {', '.join(own)} it sets other values; write {name}+{own[0]} to see them."] if own else []
    texts = [path.read_text(encoding="utf-8") for path in files]
    if len(texts) == 1 and not said and "name" in tomllib.loads(texts[0]):
        head, _, rest = texts[0].partition("\n")
        return f"{head}\n{SCHEMA_LINE}\n{rest}"
    heads = [line for text in texts for line in _head(text)]
    comments = {path: comment for text in texts for path, comment in _comments(text, table)}
    plain = {key: value for key, value in table.items() if key not in OF_FILES}
    ordered = {"name": plain["name"], **plain} if "name" in plain else plain
    heads += [f"# {line}" for line in said] + ([] if name in part_names() else [SCHEMA_LINE])
    return "\n".join(heads) + "\n" + toml_text(ordered, comments)


def _methods_of(files: list[Path]) -> list[str]:
    """The methods for which a setting has values of its own."""
    tables = [tomllib.loads(path.read_text(encoding="utf-8")).get("methods", {}) for path in files]
    return sorted({method for table in tables for method in table})


def _head(text: str) -> Iterator[str]:
    """The comment lines with which a file begins."""
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        yield line


def _comments(text: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The comments behind values of a file, by the full keys, as far as ``table`` has these values."""
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.partition("]")[0].removeprefix("[")
        elif found := _COMMENTED.fullmatch(line):
            here: Any = table
            keys = [*section.split("."), found["key"]] if section else [found["key"]]
            for key in keys:
                here = here.get(key) if isinstance(here, Mapping) else None
            if here == tomllib.loads(f"v = {found['value']}")["v"]:
                yield ".".join(keys), found["comment"]
