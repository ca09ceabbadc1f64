"""The experiments that come with fedemu, ``experiments/NAME.toml``, and the methods to put into one of them.

``SETTING+METHOD`` is a setting (data, model, local training, fleet) with ``experiments/methods/METHOD.toml`` over it;
there may be several, each over what is before it. Every file is described by its first comment line and may begin with
``extends = "NAME"``, another of its folder, over which it then lies. A setting's tables ``[methods.METHOD]`` lie over
that method: so it says what its paper changes for it.
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
    """Name and one-line description of every setting, by name, the default one first."""
    return sorted(_described(FOLDER), key=lambda preset: preset[0] != DEFAULT)


def methods() -> list[tuple[str, str]]:
    """Name and one-line description of all that may follow a setting after ``+``, by name."""
    return _described(METHODS)


def is_preset(name: str) -> bool:
    """Whether the name is that of a setting, or a setting's with methods."""
    setting, *parts = name.split(_JOINT)
    return setting in _names(FOLDER) and {*parts} <= {*_names(METHODS)}


def preset(name: str) -> dict[str, Any]:
    """The settings of ``SETTING`` or ``SETTING+METHOD+...``, called by the parts joined with dashes.

    A part that does not exist raises ConfigurationError with the nearest names.
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
    """The file of a setting; an unknown name raises ConfigurationError with the nearest ones."""
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
    """The file and those it extends, the last one first."""
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
