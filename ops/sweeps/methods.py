"""The methods that a sweep or a suite adds to a preset or a file: parts of fedemu, and methods of the user's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedemu.ops.experiment.presets import JOINT, OF_FILES
from fedemu.ops.experiment.read_toml import read_toml
from fedemu.ops.experiment.toml_text import toml_value
from fedemu.protocol.errors import ConfigurationError

_NAMED = re.compile(r"[^:+]+:([A-Za-z_][A-Za-z0-9_.]*)")


def resolved(preset: str, method: str) -> tuple[str, tuple[str, ...], str]:
    """The experiment of a preset, or of a file, with a method, its overrides, and its name in folders.

    A method is a part of fedemu or several (``uniform-replay+wsm``), a TOML file with the settings that make it one
    (``mine.toml``), which may begin with ``extends = "PART"``, or a class or function (``module:Name``). Raises
    ConfigurationError if there is no such file.
    """
    if method.endswith(".toml"):
        table = read_toml(Path(method))
        base = f"{preset}{JOINT}{table['extends']}" if table.get("extends") else preset
        settings = {key: value for key, value in table.items() if key not in (*OF_FILES, "name")}
        return base, tuple(_overrides(settings)), f"{folder_of(preset)}{JOINT}{label(method)}"
    if _NAMED.fullmatch(method):
        return preset, (f"algorithm.name={toml_value(method)}",), f"{folder_of(preset)}{JOINT}{label(method)}"
    if not method:
        raise ConfigurationError(f"a method of {preset} is empty; name a part, a TOML file or module:Name")
    return f"{preset}{JOINT}{method}", (), ""


def folder_of(experiment: str) -> str:
    """How an experiment is called in folders: a file by its name, without its own folder and its ending."""
    return re.sub(r"\.toml(?=\+|$)", "", Path(experiment).name)


def label(method: str) -> str:
    """How a method is called in tables and folders."""
    if method.endswith(".toml"):
        return Path(method).stem
    found = _NAMED.fullmatch(method)
    return found[1] if found else method


def _overrides(table: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The settings of a table in the form of ``--set``. The name of a method comes before its options."""
    for key, value in sorted(table.items(), key=lambda item: item[0] not in ("name", "kind")):
        inner = f"{path}.{key}" if path else key
        if isinstance(value, Mapping) and value and not path:
            yield from _overrides(value, inner)
        else:
            yield f"{inner}={toml_value(value)}"
