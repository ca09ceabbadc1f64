"""The experiments that come with fedemu: ``experiments/NAME.toml``, each described by its first comment line."""

from __future__ import annotations

import difflib
from pathlib import Path

from fedemu.protocol.errors import ConfigurationError

FOLDER = Path(__file__).parent / "experiments"


def presets() -> list[tuple[str, str]]:
    """Name and one-line description of every preset, by name, the default one first."""
    found = [(path.stem, _description(path)) for path in sorted(FOLDER.glob("*.toml"))]
    return sorted(found, key=lambda preset: preset[0] != DEFAULT)


def preset_path(name: str) -> Path:
    """The file of a preset; an unknown name raises ConfigurationError with the nearest ones."""
    path = FOLDER / f"{name}.toml"
    names = [known for known, _ in presets()]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the presets are {', '.join(names)}"
        raise ConfigurationError(f'there is no file and no preset "{name}"; {hint}')
    return path


DEFAULT = "digits"


def _description(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
