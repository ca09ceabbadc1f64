"""What a process that is started afresh gets by name: ``module:attribute``, or ``path/to/file.py:attribute``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from fedemu.protocol.errors import ConfigurationError


def load(name: str) -> Any:
    """The attribute; raises ConfigurationError if there is none of this name."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ConfigurationError(f"{name!r} is not of the form module:attribute")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        return getattr(module, attribute)
    except ImportError as error:
        raise ConfigurationError(f"{name!r} can't be imported: {error}") from error
    except AttributeError as error:
        raise ConfigurationError(f"{name!r}: {place} has no {attribute}") from error


def _from_file(path: Path) -> Any:
    """A file is imported once, under a name of its own."""
    name = f"fedemu_file_{path.resolve()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ConfigurationError(f"there is no Python file {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
