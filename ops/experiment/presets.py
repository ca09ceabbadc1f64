"""The experiments that come with fedemu, ``shipped/NAME.toml``, and the methods, ``shipped/methods/NAME.toml``.

``SETTING+METHOD`` is a setting (data, model, local training, fleet) with the settings of a method laid over it. Several
methods may follow each other; each is laid over what comes before it. The first line of every file is a comment that
describes it. With ``extends = "NAME"`` a file is laid over another file of its folder. A setting may have tables
``[methods.METHOD]``, which are laid over that method: they say what a paper changes for it. A method that does not go
with the setting ``digits`` names in ``after`` what it follows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedemu.ops.experiment.layers import merge
from fedemu.ops.experiment.near import did_you_mean, near
from fedemu.protocol.errors import ConfigurationError

FOLDER = Path(__file__).parent / "shipped"
METHODS = FOLDER / "methods"
DEFAULT = "digits"
JOINT = "+"
LISTED = "`fedemu presets` lists them"
OF_FILES = ("extends", "after")
"""Keys of a file that are no settings."""


def presets() -> list[tuple[str, str]]:
    """The name and the description of every setting, sorted by name. The default setting comes first."""
    return sorted(_described(FOLDER), key=lambda preset: preset[0] != DEFAULT)


def methods() -> list[tuple[str, str]]:
    """The name and the description of everything that may follow a setting after ``+``, sorted by name."""
    return _described(METHODS)


def preset_names() -> list[str]:
    """The names of all settings, sorted. The default setting comes first."""
    return sorted(names_in(FOLDER), key=lambda name: name != DEFAULT)


def part_names() -> list[str]:
    """The names of everything that may follow a setting after ``+``, sorted."""
    return names_in(METHODS)


def names_in(folder: Path) -> list[str]:
    """The names by which the TOML files of a folder are called, sorted."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def is_preset(name: str) -> bool:
    """Whether there is a preset of this name: a setting, alone or with methods."""
    setting, *parts = name.split(JOINT)
    return setting in names_in(FOLDER) and {*parts} <= {*names_in(METHODS)}


def preset(name: str) -> dict[str, Any]:
    """The table of ``SETTING`` or ``SETTING+METHOD+...``. Its ``name`` consists of the parts, joined by dashes.

    Raises ConfigurationError with the nearest names if a part does not exist.
    """
    setting, *parts = name.split(JOINT)
    if setting in names_in(METHODS):
        raise ConfigurationError(_alone(name))
    if parts and not setting:
        raise ConfigurationError(f'the name of a preset is missing before "{JOINT}"; {LISTED}')
    table: dict[str, Any] = {}
    for path in chain(preset_path(setting)):
        table = merge(table, _read(path))
    said: Mapping[str, Any] = table.pop("methods", {})
    for part in parts:
        for path in chain(part_path(part)):
            table = merge(merge(table, _read(path)), said.get(path.stem, {}))
    return table | {"name": name.replace(JOINT, "-")}


def parts_of(name: str) -> dict[str, Any]:
    """The settings of those parts that follow the setting of a preset, without it."""
    table: dict[str, Any] = {}
    for part in name.split(JOINT)[1:]:
        table = merge(table, part_table(part))
    return table


def preset_path(name: str) -> Path:
    """The file of a setting. Raises ConfigurationError with the nearest names if there is none."""
    if name not in (known := preset_names()):
        parts = [example_of(part) for part in near(name, part_names())]
        hint = did_you_mean(name, known, 3) or (f"; did you mean {parts[0]}?" if parts else f"; {LISTED}")
        said = name if name.isprintable() else repr(name)[1:-1]
        raise ConfigurationError(f'there is no file and no preset "{said}"{hint}')
    return FOLDER / f"{name}.toml"


def part_path(name: str) -> Path:
    """The file of a part that follows a setting. Raises ConfigurationError with the nearest names if there is none."""
    if name not in (known := part_names()):
        if not name:
            raise ConfigurationError(f'the name of a preset part is missing after "{JOINT}"; {LISTED}')
        if name in names_in(FOLDER):
            raise ConfigurationError(
                f'{name} is a preset, and can\'t follow another after "{JOINT}"; name one preset, and then its parts'
            )
        hint = did_you_mean(name, known, 3) or f"; {LISTED}"
        raise ConfigurationError(f'there is no method "{name}" to follow a preset after "{JOINT}"{hint}')
    return METHODS / f"{name}.toml"


def part_table(name: str) -> dict[str, Any]:
    """The settings of a part that follows a setting. Raises ConfigurationError if there is none of this name."""
    table: dict[str, Any] = {}
    for path in chain(part_path(name)):
        table = merge(table, _read(path))
    return table


def example_of(part: str) -> str:
    """A preset with this part that runs, such as ``digits+wsm``."""
    files = [_parsed(path) for path in chain(part_path(part))]
    after = next((file["after"] for file in reversed(files) if "after" in file), DEFAULT)
    return f"{after}{JOINT}{part}"


def chain(path: Path) -> list[Path]:
    """A file and the files that it extends, in the order in which they are laid over each other."""
    below = _parsed(path).get("extends")
    return [*(chain(path.with_name(f"{below}.toml")) if below else []), path]


def _alone(name: str) -> str:
    """Say how to write a name that begins with a part instead of a setting."""
    parts = name.split(JOINT)
    first = parts[0]
    settings = [part for part in parts if part in names_in(FOLDER)]
    rest = [part for part in parts[1:] if part not in settings]
    joined = JOINT.join([settings[0], first, *rest]) if settings else JOINT.join([example_of(first), *rest])
    return f"{first} is a {kind_of(first)}, which follows a preset: write {joined}"


def kind_of(part: str) -> str:
    """What a part is, in words: a method, a loss, a local term, or just a preset part."""
    algorithm = part_table(part).get("algorithm", {})
    for key, word in (("name", "method"), ("terms", "local term"), ("loss", "loss")):
        if key in algorithm:
            return word
    return "preset part"


def _read(path: Path) -> dict[str, Any]:
    return {key: value for key, value in _parsed(path).items() if key not in OF_FILES}


def _parsed(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _described(folder: Path) -> list[tuple[str, str]]:
    lines = {
        name: (folder / f"{name}.toml").read_text(encoding="utf-8").partition("\n")[0] for name in names_in(folder)
    }
    return [(name, line.removeprefix("#").strip()) for name, line in lines.items()]
