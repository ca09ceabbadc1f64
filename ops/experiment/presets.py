"""The experiments that come with fedemu, ``shipped/NAME.toml``, and the methods, ``shipped/methods/NAME.toml``.

``SETTING+METHOD`` is a setting (data, model, local training, fleet) with the settings of a method laid over it. Several
methods may follow each other; each is laid over what comes before it. The first line of every file is a comment that
describes it. With ``extends = "NAME"`` a file is laid over another file of its folder. A setting may have tables
``[methods.METHOD]``, which are laid over that method: they say what a paper changes for it.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedemu.ops.experiment.layers import merge
from fedemu.protocol.errors import ConfigurationError

FOLDER = Path(__file__).parent / "shipped"
METHODS = FOLDER / "methods"
DEFAULT = "digits"
_JOINT = "+"


def presets() -> list[tuple[str, str]]:
    """The name and the description of every setting, sorted by name. The default setting comes first."""
    return sorted(_described(FOLDER), key=lambda preset: preset[0] != DEFAULT)


def methods() -> list[tuple[str, str]]:
    """The name and the description of everything that may follow a setting after ``+``, sorted by name."""
    return _described(METHODS)


def is_preset(name: str) -> bool:
    """Whether there is a preset of this name: a setting, alone or with methods."""
    setting, *parts = name.split(_JOINT)
    return setting in _names(FOLDER) and {*parts} <= {*_names(METHODS)}


def preset(name: str) -> dict[str, Any]:
    """The table of ``SETTING`` or ``SETTING+METHOD+...``. Its ``name`` consists of the parts, joined by dashes.

    Raises ConfigurationError with the nearest names if a part does not exist.
    """
    setting, *parts = name.split(_JOINT)
    table: dict[str, Any] = {}
    for path in _chain(preset_path(setting)):
        table = merge(table, _read(path))
    said: Mapping[str, Any] = table.pop("methods", {})
    for part in parts:
        for path in _chain(_method_path(part)):
            table = merge(merge(table, _read(path)), said.get(path.stem, {}))
    return table | {"name": name.replace(_JOINT, "-")}


def preset_path(name: str) -> Path:
    """The file of a setting. Raises ConfigurationError with the nearest names if there is none."""
    if name not in (known := [known for known, _ in presets()]):
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the presets are {', '.join(known)}"
        raise ConfigurationError(f'there is no file and no preset "{name}"; {hint}')
    return FOLDER / f"{name}.toml"


def _method_path(name: str) -> Path:
    if name not in (known := _names(METHODS)):
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"they are {', '.join(known)}"
        raise ConfigurationError(f'there is no method "{name}" to follow a preset after "{_JOINT}"; {hint}')
    return METHODS / f"{name}.toml"


def _chain(path: Path) -> list[Path]:
    """A file and the files that it extends, in the order in which they are laid over each other."""
    below = _parsed(path).get("extends")
    return [*(_chain(path.with_name(f"{below}.toml")) if below else []), path]


def _read(path: Path) -> dict[str, Any]:
    return {key: value for key, value in _parsed(path).items() if key != "extends"}


def _parsed(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def _described(folder: Path) -> list[tuple[str, str]]:
    lines = {name: (folder / f"{name}.toml").read_text(encoding="utf-8").partition("\n")[0] for name in _names(folder)}
    return [(name, line.removeprefix("#").strip()) for name, line in lines.items()]
